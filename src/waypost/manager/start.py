"""The begin and the end of a run's training, which all ranks go through together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from waypost.audit import catalog
from waypost.audit.catalog import Record
from waypost.audit.runrecord import RunRecord
from waypost.comm import Agreement, Group, Subject
from waypost.errors import Difference, MismatchError
from waypost.manager import resume as resuming
from waypost.manager import writer as writers
from waypost.manager.keeping import Keeping
from waypost.manager.resume import Resume, ResumePlan
from waypost.manager.writer import RunWriter
from waypost.options import Settings
from waypost.snapshot.load import Loaded, Loading
from waypost.storage import Location


@dataclass(slots=True)
class Start:
    """How a run's training began.

    Attributes:
        record: The run, its id and the number of this start.
        loaded: Where it goes on; None on a fresh start.
        is_own: What was loaded is of this run.
        writer: Writes for all ranks; on rank 0 only.
    """

    record: RunRecord
    loaded: Loaded | None
    is_own: bool
    writer: RunWriter | None

    @property
    def name(self) -> str:
        """A name that no other start of any run has."""
        return f"{self.record.run}-{self.record.incarnation}"

    def release(self) -> None:
        """Gives the run up."""
        if self.writer is not None:
            self.writer.release()


def start(
    run: Location,
    state: MutableMapping[str, object],
    *,
    group: Group,
    settings: Settings,
    resume: Resume,
    keep: Keeping | None,
    loading: Loading,
    facts: Mapping[str, str],
) -> Start:
    """Takes the run, and loads what it goes on from into ``state``. Collective.

    Rank 0 takes the run and looks at it for all.

    Raises:
        AlreadyOwnedError: A live process writes to the run.
        ResumeError: Snapshots are there and none can be used.
        NotFoundError: A snapshot must be there and is not.
        MismatchError: The snapshot does not fit the state, or ranks do not start the same run.
    """
    subject = Subject(
        call="start",
        facts={"url": run.url, "resume": str(resume), "keep": str(keep), **facts},
    )
    call = Agreement(group, subject, settings.timeout_s)
    begun = _Begin(run, resume, keep, settings)
    try:
        said: dict[str, Any] = call.share("start", lambda: None, begun.decide)
        call.close()
        plan = msgspec.convert(said["plan"], ResumePlan)
        loaded = resuming.follow(run, plan, state, loading, group=group, settings=settings)
        is_own = loaded is not None and loaded.location.url == (run / loaded.location.name).url
        if begun.writer is not None:
            _settle(begun.writer, begun.records, loaded, is_own=is_own, resume=resume)
    except BaseException:
        if begun.writer is not None:
            begun.writer.release()
        raise
    record = msgspec.convert(said["record"], RunRecord)
    return Start(record, loaded, is_own, begun.writer)


class _Begin:
    """What rank 0 finds out about a run, and takes, before anything is loaded."""

    def __init__(
        self, run: Location, resume: Resume, keep: Keeping | None, settings: Settings
    ) -> None:
        self._run = run
        self._resume = resume
        self._keep = keep
        self._settings = settings
        self.writer: RunWriter | None = None
        self.records: list[Record] = []

    def decide(self, said: dict[int, None]) -> dict[str, Any]:
        """Takes the run; returns what the other ranks have to know."""
        del said
        self.writer = writers.acquire(self._run, self._keep, durable=self._settings.durable)
        self.records = catalog.scan(self._run)
        plan = resuming.plan(self._run, self.records, self._resume)
        return {
            "record": msgspec.to_builtins(self.writer.record),
            "plan": msgspec.to_builtins(plan),
        }


def _settle(
    writer: RunWriter,
    records: list[Record],
    loaded: Loaded | None,
    *,
    is_own: bool,
    resume: Resume,
) -> None:
    """Notes roll-backs, so that no later start takes what was passed over, and sweeps.

    A roll-back that was asked for holds at once. One that came of falling back holds from the first
    commit on: until then the passed-over snapshot may turn out to be readable after all.
    """
    if loaded is not None:
        name = loaded.location.name if is_own else None
        writer.note_resumed(records, loaded.manifest.step or 0, name)
        if resume not in ("auto", "must"):
            writer.before_commit()
    writer.sweep()


def finish(
    group: Group,
    name: str,
    *,
    step: int,
    received: int,
    knows: bool,
    timeout_s: float,
    watch: Callable[[], dict[int, str]],
) -> tuple[int, bool]:
    """Agrees, at the end of a block, on the signal that asks to stop. Collective.

    Args:
        group: The ranks.
        name: Of the start.
        step: Steps done, which must be the same on all ranks.
        received: The signal that this rank has got; 0 if none.
        knows: Whether the program has been told of it.
        timeout_s: Longest wait for one another.
        watch: Returns ranks whose training is known to have failed.

    Returns:
        The signal that any rank has got, and whether any program knows of one.

    Raises:
        MismatchError: Ranks end after different steps.
    """
    if group.world_size == 1:
        return received, knows

    def decide(said: dict[int, list[int]]) -> list[int]:
        steps = {rank: one[0] for rank, one in said.items()}
        different = [
            Difference(
                kind="ranks",
                path="step",
                expected=f"rank 0 ends after {steps[0]}",
                actual=f"rank {rank} after {other}",
            )
            for rank, other in steps.items()
            if other != steps[0]
        ]
        if different:
            raise MismatchError("the ranks end their training at different steps", tuple(different))
        signals = [one[1] for one in said.values() if one[1]]
        return [signals[0] if signals else 0, int(any(one[2] for one in said.values()))]

    call = Agreement(group, Subject(call="end", facts={"start": name}), timeout_s, watch)
    decided: list[int] = call.share("end", lambda: [step, received, int(knows)], decide)
    call.close()
    return decided[0], bool(decided[1])
