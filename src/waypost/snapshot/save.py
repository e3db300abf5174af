"""Saving one snapshot: describe, plan, write, commit. Complete or absent, whatever happens."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from waypost import collector, limits
from waypost.clock import SYSTEM_CLOCK, Clock, timestamp
from waypost.comm import Group, group_of
from waypost.core import commit, plan, write
from waypost.errors import AlreadyExistsError, CommitUnknownError, WaypostError
from waypost.format import digests, documents, names, paths
from waypost.format.documents import Entry, EntrySummary, FileRecord
from waypost.format.jsontext import Json
from waypost.options import Options, Settings
from waypost.options import resolve as resolve_options
from waypost.snapshot import metadata as facts
from waypost.state import describe as states
from waypost.storage import Location, failures, resolve
from waypost.storage.base import Lock
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
    """Makes ``url`` a committed snapshot of ``state``; returns once it is durable.

    When this raises, nothing is there that was not there before, or, with ``overwrite``, the old
    snapshot still is. Tensors are read where they lie; do not change them during the call.

    Args:
        url: The snapshot's own folder: a path, ``file://`` or ``memory://``.
        state: Entry names to modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, tensors of any shape, or plain values and containers.
        step: Optimizer steps done, any kind of integer from 0 on.
        metrics: Names to numbers, at full precision.
        metadata: Plain values that travel with the snapshot.
        replicated: Globs of leaves that are equal on all ranks.
        per_rank: Globs of leaves that each rank has for itself.
        overwrite: Replace a committed snapshot, atomically.
        process_group: The ranks that save together; None for one process.
        options: See :class:`~waypost.Options`.

    Raises:
        AlreadyExistsError: A snapshot is there and ``overwrite`` is false.
        UnsupportedError: A leaf cannot be restored exactly; names it.
        StorageFullError: There is no room, with the bytes needed and free.
        StorageError: The storage failed.
        CommitUnknownError: The answer to the commit was lost; nothing was removed.
        ValueError: A step, metric or option is out of bounds.
    """
    del replicated, per_rank  # of meaning for several ranks only
    return save_at(
        resolve(url),
        state,
        step=facts.check_step(step),
        metrics=metrics,
        metadata=metadata,
        overwrite=overwrite,
        group=group_of(process_group),
        settings=resolve_options(options),
    )


def save_at(
    snapshot: Location,
    state: Mapping[str, object],
    *,
    step: int | None,
    metrics: Mapping[str, object] | None = None,
    metadata: object = None,
    overwrite: bool = False,
    group: Group,
    settings: Settings,
    origin: Origin | None = None,
    before_commit: Callable[[], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> CommitReceipt:
    """Saves at a location; see :func:`save`.

    Args:
        snapshot: Where.
        state: As in :func:`save`.
        step: Checked already.
        metrics: As in :func:`save`.
        metadata: As in :func:`save`.
        overwrite: As in :func:`save`.
        group: The ranks.
        settings: All options, resolved.
        origin: The run that the snapshot belongs to.
        before_commit: Called when all data is written; raising there gives the attempt up.
        clock: For dates and durations.
    """
    started = clock.monotonic()
    _check_free(snapshot, overwrite)
    attempt = _Attempt(
        snapshot, f"a{secrets.token_hex(8)}", group, settings, digests.algorithm(settings.digest)
    )
    said = _Said(
        step, facts.encode_metrics(metrics), facts.encode_metadata(metadata), origin or Origin()
    )
    with collector.paused():
        description = states.describe(state, allow_pickle=settings.allow_pickle)
        files = plan.plan_files(
            (plan.Item(piece.path, piece.type, piece.source) for piece in description.pieces),
            description.ties,
            rank=group.rank,
            file_bytes_max=settings.file_bytes_max,
        )
    _check_space(snapshot, files, settings)
    try:
        records = attempt.write(description, files)
        if before_commit is not None:
            before_commit()
        manifest = attempt.manifest(said, description, files, records, timestamp(clock.now()))
        data = attempt.publish(manifest, replace=overwrite)
    except CommitUnknownError:
        raise
    except BaseException as error:
        attempt.discard(error)
        raise
    finally:
        attempt.close()
    _sweep_replaced(snapshot)
    return CommitReceipt(
        url=snapshot.url,
        step=step,
        attempt=attempt.id,
        nbytes=manifest.bytes,
        seconds=clock.monotonic() - started,
        digest=attempt.algorithm.of(data),
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """What the caller says of the snapshot, checked and encoded."""

    step: int | None
    metrics: Json
    metadata: Json
    origin: Origin


@dataclass(slots=True)
class _Attempt:
    """One try at saving, in a folder of its own, locked until it has ended."""

    snapshot: Location
    id: str
    group: Group
    settings: Settings
    algorithm: digests.Algorithm
    _lock: Lock | None = None

    def close(self) -> None:
        """Lets go of the folder: it is committed, or may be swept."""
        if self._lock is not None:
            self._lock.release()

    @property
    def folder(self) -> Location:
        return self.snapshot / names.DATA / self.id

    def write(
        self, description: states.Description, files: list[plan.FilePlan]
    ) -> list[FileRecord]:
        """Writes data and documents; returns the records of the structure and of this index."""
        durable = self.settings.durable
        storage = self.snapshot.storage
        storage.make_folder(self.folder.path, durable=durable)
        self._lock = storage.lock(self.folder.path)
        records = write.write_files(self.folder, files, self.algorithm, self.settings)
        shared = {k: v for k, v in description.entries.items() if v.scope != "per_rank"}
        own = {k: v for k, v in description.entries.items() if v.scope == "per_rank"}
        structure = documents.Structure(entries=shared)
        index = documents.Index(
            rank=self.group.rank,
            algorithm=self.algorithm.name,
            chunk_bytes=limits.CHUNK_BYTES,
            files=records,
            entries=own,
        )
        written = [
            commit.write_document(
                self.folder, name, documents.encode(document), self.algorithm, durable=durable
            )
            for name, document in (
                (names.STRUCTURE, structure),
                (names.index_file(self.group.rank), index),
            )
        ]
        if durable:
            storage.settle(self.folder.path)
        return written

    def manifest(
        self,
        said: _Said,
        description: states.Description,
        files: list[plan.FilePlan],
        records: list[FileRecord],
        created: str,
    ) -> documents.Manifest:
        """Returns the manifest for what :meth:`write` wrote."""
        return documents.Manifest(
            format=documents.FORMAT,
            version=documents.VERSION,
            required=["pickle"] if description.has_pickle else [],
            optional=[],
            attempt=self.id,
            step=said.step,
            created=created,
            world_size=self.group.world_size,
            bytes=sum(file.data_bytes for file in files),
            entries=_summaries(description.entries, description.tensor_counts, files),
            structure=records[0],
            indexes=records[1:],
            run=said.origin.run,
            incarnation=said.origin.incarnation,
            reason=said.origin.reason,
            parent=said.origin.parent,
            epoch=said.origin.epoch,
            metrics=said.metrics,
            metadata=said.metadata,
            environment=facts.environment(),
        )

    def publish(self, manifest: documents.Manifest, *, replace: bool) -> bytes:
        """Makes the snapshot exist."""
        try:
            return commit.publish_manifest(
                self.snapshot,
                manifest,
                self.algorithm,
                replace=replace,
                durable=self.settings.durable,
            )
        except AlreadyExistsError as error:
            raise AlreadyExistsError(
                f"{self.snapshot.url}: another writer committed a snapshot here first; this "
                f"attempt was given up"
            ) from error

    def discard(self, error: BaseException) -> None:
        """Removes what the attempt wrote, unless it may have been committed."""
        try:
            if commit.committed_attempt(self.snapshot) != self.id:
                commit.discard_attempt(self.snapshot, self.id)
        except WaypostError as failure:
            error.add_note(f"files of the failed attempt are left behind: {failure}")


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


def _check_space(snapshot: Location, files: list[plan.FilePlan], settings: Settings) -> None:
    if not settings.check_space:
        return
    needed_bytes = sum(file.nbytes for file in files)
    free_bytes = snapshot.storage.free_bytes(snapshot.path)
    if free_bytes is not None and needed_bytes > free_bytes:
        raise failures.full(
            f"no room for a snapshot at {snapshot.url}",
            snapshot.url,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _summaries(
    entries: Mapping[str, Entry], counts: Mapping[str, int], files: Iterable[plan.FilePlan]
) -> dict[str, EntrySummary]:
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.entry] = sizes.get(file.entry, 0) + file.data_bytes
    return {
        name: EntrySummary(
            kind=entry.kind,
            scope=entry.scope,
            tensors=counts.get(name, 0),
            bytes=sizes.get(paths.segment(name), 0),
        )
        for name, entry in entries.items()
    }
