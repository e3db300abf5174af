"""Who writes to a run: one process at a time, known by a lock and by the number of its start.

The lock is a record lock: it ends with the process, and data workers do not inherit it. Each start
raises the run's incarnation; a process whose incarnation is no longer the run's must not commit.
"""

from __future__ import annotations

import os
import platform
import secrets
from dataclasses import dataclass
from typing import Any

from waypost import clock, limits
from waypost.errors import (
    AlreadyOwnedError,
    FencedError,
    FormatError,
    NotFoundError,
    WaypostError,
)
from waypost.format import jsontext, names
from waypost.storage import Location
from waypost.storage.base import Lock


@dataclass(slots=True)
class Ownership:
    """The right to write to a run.

    Attributes:
        run: Where.
        run_id: The run's id, for ever the same.
        incarnation: The number of this start, from 1.
        pid: The process that holds it.
    """

    run: Location
    run_id: str
    incarnation: int
    pid: int
    _lock: Lock

    def check(self) -> None:
        """Makes sure that this process still owns the run.

        Raises:
            FencedError: A later start has taken over.
            NotFoundError: The run's folder was removed.
        """
        try:
            found = _read(self.run)
        except NotFoundError as error:
            raise NotFoundError(f"{self.run.url}: the run's {names.RUN} is gone") from error
        if found.get("incarnation") != self.incarnation or found.get("run") != self.run_id:
            owner = found.get("owner", {})
            raise FencedError(
                f"{self.run.url}: start {found.get('incarnation')} of this run, process "
                f"{owner.get('pid')} on {owner.get('host')}, has taken over; this is start "
                f"{self.incarnation} and must not write any more"
            )

    def release(self) -> None:
        """Gives the run up, so that another process may start."""
        self._lock.release()


def acquire(run: Location, *, at_least: int, durable: bool) -> Ownership:
    """Takes a run for this process; makes the run if it is not there.

    Args:
        run: Where.
        at_least: The highest incarnation that any snapshot of the run has.
        durable: Sync what is written.

    Raises:
        AlreadyOwnedError: A live process owns it.
    """
    storage = run.storage
    storage.make_folder(run.path, durable=durable)
    lock = storage.lock((run / names.LOCK).path)
    if lock is None:
        owner = (read_record(run) or {}).get("owner", {})
        raise AlreadyOwnedError(
            f"{run.url}: process {owner.get('pid')} on {owner.get('host')}, started "
            f"{owner.get('started')}, writes to this run. Wait for it or stop it; two runs need "
            f"two folders"
        )
    try:
        found = read_record(run) or {}
        ownership = Ownership(run, found.get("run") or secrets.token_hex(8), 0, os.getpid(), lock)
        ownership.incarnation = max(at_least, _number(found.get("incarnation"))) + 1
        record: jsontext.Json = {
            "run": ownership.run_id,
            "incarnation": ownership.incarnation,
            "owner": {
                "host": platform.node(),
                "pid": ownership.pid,
                "started": clock.timestamp(clock.SYSTEM_CLOCK.now()),
            },
        }
        storage.publish(
            (run / names.RUN).path,
            jsontext.dump_pretty(record) + b"\n",
            replace=True,
            durable=durable,
        )
    except BaseException:
        lock.release()
        raise
    return ownership


def is_owned(run: Location) -> bool:
    """Tells whether a live process owns a run; takes and gives back the lock to find out."""
    if run.storage.size((run / names.LOCK).path) is None:
        return False
    lock = run.storage.lock((run / names.LOCK).path)
    if lock is None:
        return True
    lock.release()
    return False


def read_record(run: Location) -> dict[str, Any] | None:
    """Returns what ``run.json`` says, or None when it is missing or damaged."""
    try:
        return _read(run)
    except WaypostError:
        return None


def _read(run: Location) -> dict[str, Any]:
    data = run.storage.read((run / names.RUN).path, limits.POINTER_BYTES_MAX)
    document = jsontext.parse(data, names.RUN, bytes_max=limits.POINTER_BYTES_MAX)
    if not isinstance(document, dict) or not isinstance(document.get("owner", {}), dict):
        raise FormatError(f"{(run / names.RUN).url}: not a record of a run")
    return document


def _number(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
