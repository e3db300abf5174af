"""A few threads that share a list of jobs; the first error stops all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Job = TypeVar("_Job")


def run(
    jobs: Iterable[_Job], make_worker: Callable[[], Callable[[_Job], None]], *, threads: int
) -> None:
    """Returns once every job is done.

    Args:
        jobs: Taken in order, one at a time.
        make_worker: Called in each thread; returns the function that does a job there.
        threads: How many; 1 works in the calling thread.

    Raises:
        Exception: The first error of any job; no job starts after it.
    """
    if threads <= 1:
        work = make_worker()
        for job in jobs:
            work(job)
        return
    _Team(jobs, make_worker).run(threads)


class _Team:
    def __init__(
        self, jobs: Iterable[_Job], make_worker: Callable[[], Callable[[_Job], None]]
    ) -> None:
        self._jobs = iter(jobs)
        self._make_worker = make_worker
        self._guard = threading.Lock()
        self._error: BaseException | None = None
        self._stopped = False

    def run(self, threads: int) -> None:
        started: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(target=self._work, name=f"waypost-{number}", daemon=True)
                thread.start()
                started.append(thread)
        finally:
            try:
                for thread in started:
                    thread.join()
            finally:
                self._stopped = True
                for thread in started:
                    thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            work = self._make_worker()
            while True:
                with self._guard:
                    if self._stopped:
                        return
                    job = next(self._jobs, self)
                if job is self:
                    return
                work(job)  # type: ignore[arg-type]  # the sentinel was taken out
        except BaseException as error:  # noqa: BLE001 - thread boundary: the caller raises it
            with self._guard:
                self._stopped = True
                self._error = self._error or error
