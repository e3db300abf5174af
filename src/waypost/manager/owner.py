"""Who writes to a run: one process at a time, known by a lock and by the number of its start.

The lock ends with the process, and forked data workers do not keep it. Each start
raises the run's incarnation; a process whose incarnation is no longer the run's must not commit.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from waypost import clock, limits
from waypost.audit import runrecord
from waypost.audit.runrecord import Owner, Rollback, RunRecord
from waypost.errors import AlreadyOwnedError, FencedError, NotFoundError
from waypost.format import names
from waypost.storage import Location
from waypost.storage.base import Lock


@dataclass(slots=True)
class Ownership:
    """The right to write to a run.

    Attributes:
        run: Where.
        record: What ``run.json`` says since this start.
        pid: The process that holds it.
    """

    run: Location
    record: RunRecord
    pid: int
    _lock: Lock
    _durable: bool

    def check(self) -> None:
        """Makes sure that this process still owns the run.

        Raises:
            FencedError: A later start has taken over.
            NotFoundError: The run's folder was removed.
        """
        try:
            found = runrecord.read(self.run)
        except NotFoundError as error:
            raise NotFoundError(f"{self.run.url}: the run's {names.RUN} is gone") from error
        if (found.run, found.incarnation) != (self.record.run, self.record.incarnation):
            raise FencedError(
                f"{self.run.url}: start {found.incarnation} of this run, process "
                f"{found.owner.pid} on {found.owner.host}, has taken over; this is start "
                f"{self.record.incarnation} and must not write any more"
            )

    def roll_back_to(self, step: int) -> None:
        """Records that this start gave up the snapshots of earlier ones beyond ``step``."""
        earlier = [rollback for rollback in self.record.rollbacks if rollback.step < step]
        earlier = earlier[-limits.ROLLBACKS_MAX :]
        rollback = Rollback(incarnation=self.record.incarnation, step=step)
        self.record = msgspec.structs.replace(self.record, rollbacks=[*earlier, rollback])
        self._publish()

    def release(self) -> None:
        """Gives the run up, so that another process may start."""
        self._lock.release()

    def _publish(self) -> None:
        self.run.storage.publish(
            (self.run / names.RUN).path,
            runrecord.encode(self.record),
            replace=True,
            durable=self._durable,
        )


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
        raise AlreadyOwnedError(_owned_text(run))
    try:
        found = runrecord.find(run) or RunRecord(run=secrets.token_hex(8), incarnation=0)
        record = msgspec.structs.replace(
            found,
            incarnation=max(at_least, found.incarnation) + 1,
            owner=Owner(
                host=platform.node(),
                pid=os.getpid(),
                started=clock.timestamp(clock.SYSTEM_CLOCK.now()),
            ),
        )
        ownership = Ownership(run, record, os.getpid(), lock, durable)
        ownership._publish()
    except BaseException:
        lock.release()
        raise
    return ownership


@contextlib.contextmanager
def held(run: Location) -> Iterator[None]:
    """Holds a run's lock for the block, so that no process starts in it.

    Raises:
        AlreadyOwnedError: A live process owns the run.
    """
    if not run.storage.list(run.path):
        yield
        return
    lock = run.storage.lock((run / names.LOCK).path)
    if lock is None:
        raise AlreadyOwnedError(_owned_text(run))
    try:
        yield
    finally:
        lock.release()


def _owned_text(run: Location) -> str:
    found = runrecord.find(run)
    who = "a process"
    if found is not None:
        owner = found.owner
        is_this = (owner.host, owner.pid) == (platform.node(), os.getpid())
        who = f"process {owner.pid} on {owner.host}, started {owner.started},"
        who = f"this process (start {found.incarnation})" if is_this else who
    return (
        f"{run.url}: {who} writes to this run. Wait for it, close it or stop it; two runs need two "
        f"folders"
    )
