"""Saving one snapshot: describe, plan, write, commit. Complete or absent, whatever happens."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from waypost import collector
from waypost.clock import SYSTEM_CLOCK, Clock, timestamp
from waypost.comm import Agreement, Group, Subject, group_of, names_text
from waypost.core import commit
from waypost.core.plan import Plan, Planner
from waypost.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    CoordinationTimeoutError,
    PeerError,
    WaypostError,
)
from waypost.format import digests, documents, paths
from waypost.format.documents import EntrySummary
from waypost.format.jsontext import Json
from waypost.options import Options, Settings, divided
from waypost.options import resolve as resolve_options
from waypost.snapshot import metadata as facts
from waypost.snapshot.alike import Agreed, Comparison
from waypost.snapshot.attempt import Attempt, Written
from waypost.state import describe as states
from waypost.state import scopes as scoping
from waypost.state.scopes import Scopes, scopes
from waypost.storage import Location, failures, resolve
from waypost.storage.urls import Url

_log = logging.getLogger("waypost")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReceipt:
    """Proof of a commit.

    Attributes:
        url: The snapshot.
        step: Its step.
        attempt: The id of the attempt that was committed.
        nbytes: Payload bytes: those of all leaves, each stored once.
        seconds: From the call to the commit.
        digest: The manifest's digest, which covers every byte of the snapshot.
    """

    url: str
    step: int | None
    attempt: str
    nbytes: int
    seconds: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a snapshot of a run comes from.

    Attributes:
        run: The run's id.
        incarnation: The start of the run that saved it.
        reason: Why it was saved.
        parent: The snapshot that it goes on from.
        epoch: Epochs done.
    """

    run: str | None = None
    incarnation: int = 0
    reason: str | None = None
    parent: documents.Parent | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What to save a state as.

    Attributes:
        step: Optimizer steps done, checked.
        metrics: Names to numbers.
        metadata: Plain values.
        overwrite: Replace a committed snapshot.
        may_replace: Asked on rank 0 instead of ``overwrite``.
        scopes: Who owns which leaves.
        facts: What all ranks must say alike, by name.
        origin: The run that the snapshot belongs to.
        before_commit: Called on rank 0 when all data is written; raising there gives it up.
        watch: Returns ranks that are known to have failed outside of the save.
    """

    step: int | None
    metrics: Mapping[str, object] | None = None
    metadata: object = None
    overwrite: bool = False
    may_replace: Callable[[], bool] | None = None
    scopes: Scopes = scoping.NONE
    facts: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = Origin()
    before_commit: Callable[[], None] | None = None
    watch: Callable[[], dict[int, str]] | None = None


def save(
    url: Url,
    state: Mapping[str, object],
    *,
    step: object = None,
    metrics: Mapping[str, object] | None = None,
    metadata: object = None,
    replicated: Iterable[str] = (),
    per_rank: Iterable[str] = (),
    overwrite: bool = False,
    process_group: object = None,
    options: Options | None = None,
) -> CommitReceipt:
    """Makes ``url`` a committed snapshot of ``state``; returns once it is durable. Collective.

    Every rank of the group calls it, and all leave with the same outcome. Tensors that are sharded
    are stored in parts; what all ranks hold alike is stored once, each rank writing a share.

    When this raises, nothing is there that was not there before, or, with ``overwrite``, the old
    snapshot still is; unless the error says that the outcome is not known, or that the snapshot is
    committed and only another rank did not confirm it. Tensors are read where they lie; do not
    change them during the call.

    Args:
        url: The snapshot's own folder: a path, ``file://`` or ``memory://``.
        state: Entry names to modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, tensors of any shape, or plain values and containers.
        step: Optimizer steps done, any kind of integer from 0 on.
        metrics: Names to numbers, at full precision.
        metadata: Plain values that travel with the snapshot.
        replicated: Globs of leaf paths that are equal on all ranks, and need not be compared.
        per_rank: Globs of leaf paths, or of what stands above them, that each rank has for itself.
        overwrite: Replace a committed snapshot, atomically.
        process_group: The ranks that save together: None for the default group of
            ``torch.distributed``, or for this process when there is none; ``"self"`` for this
            process alone in any case; or a process group.
        options: See :class:`~waypost.Options`.

    Raises:
        PeerError: Other ranks failed; says which, and why.
        CoordinationTimeoutError: Other ranks did not take part in time; says which.
        MismatchError: Ranks do not ask for the same, or hold different things under one name.
        AlreadyExistsError: A snapshot is there and ``overwrite`` is false.
        UnsupportedError: A leaf cannot be restored exactly; names it.
        StorageFullError: There is no room, with the bytes needed and free.
        StorageError: The storage failed.
        CommitUnknownError: The answer to the commit was lost; nothing was removed.
        ValueError: A step, metric or option is out of bounds.
    """
    settings = resolve_options(options)
    said = declared(replicated, per_rank)
    return save_at(
        resolve(url),
        state,
        Saving(
            step=facts.check_step(step),
            metrics=metrics,
            metadata=metadata,
            overwrite=overwrite,
            scopes=said.scopes,
            facts=said.facts,
        ),
        group=group_of(process_group),
        settings=settings,
        planner=Planner(settings.file_bytes_max),
    )


@dataclass(frozen=True, slots=True)
class Declared:
    """What a caller says of leaves, as rules and as text."""

    scopes: Scopes
    facts: dict[str, str]


def declared(replicated: Iterable[str], per_rank: Iterable[str]) -> Declared:
    """Returns what the arguments ``replicated`` and ``per_rank`` say."""
    globs = [[given] if isinstance(given, str) else list(given) for given in (replicated, per_rank)]
    facts = {"replicated": ", ".join(globs[0]), "per_rank": ", ".join(globs[1])}
    return Declared(scopes(globs[0], globs[1]), facts)


def save_at(
    snapshot: Location,
    state: Mapping[str, object],
    saving: Saving,
    *,
    group: Group,
    settings: Settings,
    planner: Planner,
    clock: Clock = SYSTEM_CLOCK,
) -> CommitReceipt:
    """Saves at a location; see :func:`save`.

    Args:
        snapshot: Where.
        state: As in :func:`save`.
        saving: What to save it as.
        group: The ranks.
        settings: All options, resolved.
        planner: Remembers the plan for the next save of a state of the same structure.
        clock: For dates and durations.
    """
    return _Save(snapshot, state, saving, group, settings, planner, clock).run()


class _Save:
    """One save, on one rank: a series of rounds in which all ranks take part."""

    def __init__(
        self,
        snapshot: Location,
        state: Mapping[str, object],
        saving: Saving,
        group: Group,
        settings: Settings,
        planner: Planner,
        clock: Clock,
    ) -> None:
        self._snapshot = snapshot
        self._state = state
        self._saving = saving
        self._group = group
        self._settings = settings
        self._planner = planner
        self._clock = clock
        self._algorithm = digests.algorithm(settings.digest)
        self._metrics: Json = None
        self._metadata: Json = None
        self._overwrite = saving.overwrite
        self._call = Agreement(group, self._subject(), settings.timeout_s, saving.watch)

    def run(self) -> CommitReceipt:
        """Saves; returns the proof."""
        started = self._clock.monotonic()
        description, agreed = self._describe()
        attempt = Attempt(
            self._snapshot, f"a{secrets.token_hex(8)}", self._group, self._settings, self._algorithm
        )
        committed: dict[str, Any] = {}
        is_ready = False
        try:
            plan = self._plan(attempt, description, agreed)
            written = self._write(attempt, description, plan)
            is_ready = True
            committed = self._agree_to_commit(
                lambda: self._commit(attempt, description, agreed, plan, written)
            )
            self._depart(committed)
        except CommitUnknownError:
            raise
        except BaseException as error:
            # Rank 0 cannot commit what another rank has not called ready; so that may discard, too,
            # what it wrote, and must not later, when it cannot know whether there was a commit.
            # One that was interrupted leaves that to the others, which may still be writing.
            is_failure = isinstance(error, Exception)
            if not committed and (self._call.is_leader or (is_failure and not is_ready)):
                attempt.discard(error)
            raise
        finally:
            attempt.close()
        if self._call.is_leader:
            _sweep_replaced(self._snapshot)
        self._call.close()
        return CommitReceipt(
            url=self._snapshot.url,
            step=self._saving.step,
            attempt=attempt.id,
            nbytes=committed["bytes"],
            seconds=self._clock.monotonic() - started,
            digest=committed["digest"],
        )

    def _subject(self) -> Subject:
        settings = self._settings
        return Subject(
            call="save",
            facts={
                "url": self._snapshot.url,
                "step": str(self._saving.step),
                "overwrite": str(self._saving.overwrite),
                "entries": names_text(self._state),
                "metrics": names_text(self._saving.metrics or {}),
                "options": f"durable={settings.durable}, digest={settings.digest}, "
                f"allow_pickle={settings.allow_pickle}, check_replicas={settings.check_replicas}, "
                f"timeout_s={settings.timeout_s:g}",
                **self._saving.facts,
            },
        )

    def _describe(self) -> tuple[states.Description, Agreed]:
        comparison = Comparison(
            self._call, self._group, self._saving.scopes, self._algorithm, self._settings
        )
        found: list[states.Description] = []

        def describe() -> dict[str, Any]:
            states.check_state(self._state, "state")
            self._metrics = facts.encode_metrics(self._saving.metrics)
            self._metadata = facts.encode_metadata(self._saving.metadata)
            with collector.paused():
                found.append(
                    states.describe(
                        self._state,
                        allow_pickle=self._settings.allow_pickle,
                        ranks=self._group.ranks,
                        scopes=self._saving.scopes,
                    )
                )
                return comparison.say(found[0])

        def judge(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
            if self._saving.may_replace is not None:
                self._overwrite = self._saving.may_replace()
            _check_free(self._snapshot, self._overwrite)
            return comparison.judge(said)

        judged = self._call.share("describe", describe, judge)
        return found[0], comparison.settle(found[0], judged)

    def _plan(self, attempt: Attempt, description: states.Description, agreed: Agreed) -> Plan:
        found: list[Plan] = []

        def plan() -> int:
            with collector.paused():
                found.append(self._planner.plan(agreed.pieces, description.ties, self._group.ranks))
            return found[0].nbytes

        def begin(needed_bytes: dict[int, int]) -> str:
            _check_space(self._snapshot, sum(needed_bytes.values()), self._settings)
            attempt.begin()
            return attempt.id

        attempt.id = self._call.share("plan", plan, begin)
        return found[0]

    def _write(
        self, attempt: Attempt, description: states.Description, plan: Plan
    ) -> dict[int, Written]:
        """Writes this rank's part; returns, on rank 0, what all ranks have written."""
        received: dict[int, Written] = {}

        def write() -> Any:
            self._group.reach("stage")
            attempt.settings = divided(self._settings, self._group.local_size())
            return msgspec.to_builtins(attempt.write(description, plan, self._call.progress))

        def receive(said: dict[int, Any]) -> None:
            received.update({rank: msgspec.convert(one, Written) for rank, one in said.items()})

        self._call.share("write", write, receive)
        return received

    def _agree_to_commit(self, commit: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Has rank 0 commit when every rank is ready; returns what all have to know of it."""
        try:
            return self._call.share("commit", lambda: None, lambda _: commit())
        except CoordinationTimeoutError as error:
            if 0 in error.missing:
                error.args = (
                    f"{error}\nWhether {self._snapshot.url} was committed before that is not known "
                    f"here; nothing was removed",
                )
            raise

    def _commit(
        self,
        attempt: Attempt,
        description: states.Description,
        agreed: Agreed,
        plan: Plan,
        written: dict[int, Written],
    ) -> dict[str, Any]:
        """Makes the snapshot exist, on rank 0."""
        saving = self._saving
        structure = attempt.write_structure(agreed.entries, plan.cuts)
        if saving.before_commit is not None:
            saving.before_commit()
        has_pickle = any(one.has_pickle for one in written.values())
        manifest = documents.Manifest(
            format=documents.FORMAT,
            version=documents.VERSION,
            required=["pickle"] if has_pickle else [],
            optional=[],
            attempt=attempt.id,
            step=saving.step,
            created=timestamp(self._clock.now()),
            world_size=self._group.world_size,
            bytes=sum(sum(one.entry_bytes.values()) for one in written.values()),
            entries=_summaries(description, agreed, written.values()),
            structure=structure,
            indexes=[one.index for _, one in sorted(written.items())],
            run=saving.origin.run,
            incarnation=saving.origin.incarnation,
            reason=saving.origin.reason,
            parent=saving.origin.parent,
            epoch=saving.origin.epoch,
            metrics=self._metrics,
            metadata=self._metadata,
            environment=facts.environment(),
        )
        data = attempt.publish(manifest, replace=self._overwrite)
        return {"bytes": manifest.bytes, "digest": self._algorithm.of(data)}

    def _depart(self, committed: dict[str, Any]) -> None:
        """Makes sure that all ranks know of the commit."""
        try:
            self._call.share("depart", lambda: None, lambda _: None)
        except (PeerError, CoordinationTimeoutError) as error:
            error.args = (
                f"{error}\nThe snapshot {self._snapshot.url} is committed ({committed['digest']}); "
                f"only, not all ranks have confirmed that they know it",
            )
            raise


def _check_free(snapshot: Location, overwrite: bool) -> None:
    """Makes sure that a snapshot may be saved at a location.

    Raises:
        AlreadyExistsError: One is there, and it must not be replaced.
    """
    path = (snapshot / documents.MANIFEST).path
    if not overwrite and snapshot.storage.size(path) is not None:
        raise AlreadyExistsError(
            f"{snapshot.url}: a snapshot is already there; choose another name, or pass "
            f"overwrite=True to replace it"
        )


def _sweep_replaced(snapshot: Location) -> None:
    """Removes what the commit replaced, and what failed attempts at this place left."""
    try:
        commit.sweep_attempts(snapshot)
    except WaypostError as error:
        _log.warning("%s: data of the replaced snapshot is left behind: %s", snapshot.url, error)


def _check_space(snapshot: Location, needed_bytes: int, settings: Settings) -> None:
    if not settings.check_space:
        return
    free_bytes = snapshot.storage.free_bytes(snapshot.path)
    if free_bytes is not None and needed_bytes > free_bytes:
        raise failures.full(
            f"no room for a snapshot at {snapshot.url}",
            snapshot.url,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _summaries(
    description: states.Description, agreed: Agreed, written: Iterable[Written]
) -> dict[str, EntrySummary]:
    sizes: Counter[str] = Counter()
    for one in written:
        sizes.update(one.entry_bytes)
    return {
        name: EntrySummary(
            kind=entry.kind,
            scope=entry.scope,
            tensors=description.tensor_counts[name] + agreed.added_tensors.get(name, 0),
            bytes=sizes[paths.segment(name)],
        )
        for name, entry in description.entries.items()
    }
