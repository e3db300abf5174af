"""What one process does for a run on behalf of all its ranks: own it, point, prune, sweep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from waypost.audit import catalog
from waypost.audit.catalog import Record
from waypost.audit.runrecord import RunRecord
from waypost.errors import AlreadyExistsError, WaypostError
from waypost.format import jsontext, names
from waypost.manager import owner, prune
from waypost.manager.keeping import Keeping, decide
from waypost.storage import Location

_log = logging.getLogger("waypost")


@dataclass(slots=True)
class RunWriter:
    """The run as rank 0 writes it; see :func:`acquire`.

    Attributes:
        run: Where.
        ownership: The right to write.
        keep: What to keep; None keeps everything.
        durable: Sync what is written.
        protected: Names of snapshots that retention must leave, with reasons.
    """

    run: Location
    ownership: owner.Ownership
    keep: Keeping | None
    durable: bool
    protected: dict[str, str]
    _rollback_to: int = -1
    _is_rollback_due: bool = False

    @property
    def record(self) -> RunRecord:
        """What ``run.json`` says."""
        return self.ownership.record

    def note_resumed(self, records: Sequence[Record], step: int, name: str | None) -> None:
        """Notes where training goes on, and that later snapshots were passed over.

        Resuming from another run gives up all snapshots of this one.

        Args:
            records: Of the run, as they were at the start.
            step: Gone on from.
            name: The snapshot's name in this run, or None when it is of another.
        """
        if name is not None:
            self.protected[name] = "resumed from"
        self._rollback_to = step if name is not None else -1
        self._is_rollback_due = any(
            record.is_committed and not record.is_superseded and record.step > self._rollback_to
            for record in records
        )

    def before_commit(self) -> None:
        """Makes sure that the run is still this process's; records a roll-back that is due.

        Raises:
            FencedError: A later start has taken over.
        """
        self.ownership.check()
        if self._is_rollback_due:
            self.ownership.roll_back_to(self._rollback_to)
            self._is_rollback_due = False

    def may_replace(self, name: str) -> bool:
        """Tells whether a snapshot of that name is there and is the run's own to replace.

        Raises:
            AlreadyExistsError: It belongs to another run.
        """
        found = catalog.record_of(self.run, name)
        if found is None or found.problem_code == "not-found":
            return False
        if found.run not in (None, self.record.run):
            raise AlreadyExistsError(
                f"{found.url} belongs to another run ({found.run}); it is not overwritten"
            )
        return True

    def committed(self, name: str, step: int) -> None:
        """Points to a new snapshot and removes what retention does not keep."""
        self.protected = {name: "just saved"}
        self._point_to(name, step)
        if self.keep is not None:
            self._prune(self.keep)

    def sweep(self) -> None:
        """Removes what saves left that did not finish."""
        try:
            for url in prune.sweep(self.run):
                _log.info("removed %s (left by a save that did not finish)", url)
        except WaypostError as error:
            _log.warning("%s: debris was not removed: %s", self.run.url, error)

    def release(self) -> None:
        """Gives the run up."""
        self.ownership.release()

    def _point_to(self, name: str, step: int) -> None:
        document: jsontext.Json = {"snapshot": name, "step": step}
        try:
            self.run.storage.publish(
                (self.run / names.LATEST).path,
                jsontext.dump_pretty(document) + b"\n",
                replace=True,
                durable=self.durable,
            )
        except WaypostError as error:
            _log.warning(
                "%s: %s was not updated, which costs a listing: %s",
                self.run.url,
                names.LATEST,
                error,
            )

    def _prune(self, keep: Keeping) -> None:
        try:
            records = prune.own_records(catalog.scan(self.run), self.record)
            decisions = decide(records, keep, self.protected)
            removed = tuple(decision for decision in decisions if not decision.keep)
            prune.remove_decided(self.run, removed)
        except WaypostError as error:
            _log.warning("%s: retention did not run: %s", self.run.url, error)


def acquire(run: Location, keep: Keeping | None, *, durable: bool) -> RunWriter:
    """Takes a run for this process; makes it if it is not there.

    Raises:
        AlreadyOwnedError: A live process writes to it.
    """
    incarnation = max((record.incarnation for record in catalog.scan(run)), default=0)
    ownership = owner.acquire(run, at_least=incarnation, durable=durable)
    return RunWriter(run, ownership, keep, durable, {})
