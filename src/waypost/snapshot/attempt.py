"""One try at saving: a folder of its own, what every rank writes there, and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from waypost import limits
from waypost.comm import Group
from waypost.core import commit, write
from waypost.core.plan import Plan
from waypost.errors import AlreadyExistsError, WaypostError
from waypost.format import digests, documents, names
from waypost.format.cuts import Cut
from waypost.format.documents import Entry, FileRecord
from waypost.options import Settings
from waypost.state.describe import Description
from waypost.storage import Location
from waypost.storage.base import Lock


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written.

    Attributes:
        index: The record of its index.
        entry_bytes: Payload bytes by entry path.
        has_pickle: Something was pickled.
    """

    index: FileRecord
    entry_bytes: dict[str, int]
    has_pickle: bool


@dataclass(slots=True)
class Attempt:
    """One try at saving, in a folder of its own, which rank 0 keeps locked until it has ended.

    Attributes:
        snapshot: What is to be.
        id: Unique; rank 0's holds for all.
        group: The ranks.
        settings: All options.
        algorithm: Of digests.
    """

    snapshot: Location
    id: str
    group: Group
    settings: Settings
    algorithm: digests.Algorithm
    _lock: Lock | None = None

    @property
    def folder(self) -> Location:
        """Where all ranks write."""
        return self.snapshot / names.DATA / self.id

    def begin(self) -> None:
        """Makes the folder and locks it; on rank 0."""
        storage = self.snapshot.storage
        storage.make_folder(self.folder.path, durable=self.settings.durable)
        self._lock = storage.lock(self.folder.path)

    def close(self) -> None:
        """Lets go of the folder: it is committed, or may be swept."""
        if self._lock is not None:
            self._lock.release()

    def write(
        self, description: Description, plan: Plan, advance: Callable[[int], None]
    ) -> Written:
        """Writes this rank's data and index, durably; returns what the manifest has to know.

        Args:
            description: What this rank holds.
            plan: What it writes of that.
            advance: Told of bytes written.
        """
        files = write.write_files(self.folder, plan.files, self.algorithm, self.settings, advance)
        own = {
            name: entry for name, entry in description.entries.items() if entry.scope == "per_rank"
        }
        index = documents.Index(
            rank=self.group.rank,
            algorithm=self.algorithm.name,
            chunk_bytes=limits.CHUNK_BYTES,
            files=files,
            entries=own,
            nodes=description.own,
        )
        record = self._document(names.index_file(self.group.rank), documents.encode(index))
        self._settle()
        return Written(
            index=record, entry_bytes=plan.entry_bytes(), has_pickle=description.has_pickle
        )

    def write_structure(self, entries: Mapping[str, Entry], cuts: list[Cut]) -> FileRecord:
        """Writes, on rank 0, what all ranks share; returns its record."""
        structure = documents.Structure(entries=dict(entries), cuts=cuts)
        record = self._document(names.STRUCTURE, documents.encode(structure))
        self._settle()
        return record

    def publish(self, manifest: documents.Manifest, *, replace: bool) -> bytes:
        """Makes the snapshot exist; returns the manifest's bytes."""
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

    def _document(self, name: str, data: bytes) -> FileRecord:
        return commit.write_document(
            self.folder, name, data, self.algorithm, durable=self.settings.durable
        )

    def _settle(self) -> None:
        if self.settings.durable:
            self.snapshot.storage.settle(self.folder.path)
