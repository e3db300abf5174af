"""An opened snapshot: its documents, and which items its data files hold.

Files of a rank are looked at when something of that rank is asked for, so that a rank that loads
what it saved opens only what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from waypost import collector
from waypost.audit import opening
from waypost.core import read
from waypost.errors import CorruptionError, FormatError, WaypostError
from waypost.format import digests, documents, paths, safetensors, shards
from waypost.format.documents import DataFile, Index, Manifest
from waypost.format.shards import Extent
from waypost.format.tensornodes import Consistency
from waypost.options import Settings
from waypost.storage import Location


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A data file with its header."""

    path: str
    record: DataFile
    index: Index
    items: Mapping[str, safetensors.Item]


@dataclass(frozen=True, slots=True)
class Stored:
    """An item of a data file, and the part of a leaf that it is; None for all of it."""

    file: PlacedFile
    item: safetensors.Item
    extent: Extent | None


class Contents:
    """Where everything in a snapshot is; safe to use from several threads.

    Attributes:
        location: The snapshot.
        documents: Manifest, structure and indexes.
    """

    def __init__(self, location: Location, opened: opening.Documents) -> None:
        self.location = location
        self.documents = opened
        self._damaged: dict[str, WaypostError] = {}
        self._items: dict[tuple[int, str], dict[str, list[Stored]]] = {}
        if opened.world_size == 1:
            self._check_single()

    def check_entries(self, names: Iterable[str]) -> None:
        """Makes sure that the data files of the entries are there and have their headers.

        Of a snapshot of several ranks, each file is checked when it is first needed.

        Raises:
            CorruptionError, FormatError: One is damaged.
        """
        for name in names:
            error = self._damaged.get(paths.segment(name))
            if error is not None:
                raise error

    def stored(self, path: str, rank: int) -> Sequence[Stored]:
        """Returns what ``rank`` has stored of the piece at ``path``.

        Raises:
            CorruptionError, FormatError: A file of the entry is damaged.
        """
        found = self._items_of(rank, paths.entry_of(path))
        return found.get(paths.key_of(path), ())

    def read(
        self,
        wants: Mapping[str, tuple[PlacedFile, Sequence[read.Want]]],
        settings: Settings,
        *,
        verify: bool,
        advance: Callable[[int], None],
    ) -> int:
        """Fills targets with byte ranges of files; returns the bytes read.

        Args:
            wants: By path of the file.
            settings: Threads and segment size.
            verify: Check every chunk that is read.
            advance: Told of bytes read, from any thread.

        Raises:
            CorruptionError: Stored bytes are not what was saved.
        """
        with ExitStack() as stack:
            reads: list[read.FileRead] = []
            for path, (file, wanted) in wants.items():
                opened = stack.enter_context(opening.open_data(self.location, path, file.record))
                reads.append(
                    read.FileRead(
                        name=path,
                        file=opened,
                        data_start=file.record.data_start,
                        data_bytes=file.record.bytes - file.record.data_start,
                        chunk_bytes=file.index.chunk_bytes,
                        chunks=documents.chunk_digests(file.record) if verify else b"",
                        algorithm=digests.algorithm(file.index.algorithm),
                        wants=wanted,
                        leaf_at=_leaf_finder(file),
                    )
                )
            return read.read_files(
                reads,
                threads=settings.workers,
                segment_bytes=settings.segment_bytes,
                advance=advance,
            )

    def _items_of(self, rank: int, entry: str) -> dict[str, list[Stored]]:
        key = rank, entry
        if key not in self._items:
            index = self.documents.index(rank)
            found: dict[str, list[Stored]] = {}
            for record in index.files:
                if record.entry == entry:
                    placed = self._place(index, record)
                    for name, item in placed.items.items():
                        leaf, extent = shards.parse_key(name)
                        found.setdefault(leaf, []).append(Stored(placed, item, extent))
            self._items[key] = found
        return self._items[key]

    def _place(self, index: Index, record: DataFile) -> PlacedFile:
        path = opening.data_path(self.documents.manifest, record)
        algorithm = digests.algorithm(index.algorithm)
        with opening.open_data(self.location, path, record) as file:
            items = opening.read_header(file, path, record, algorithm)
        return PlacedFile(path, record, index, items)

    def _check_single(self) -> None:
        """Checks, in a snapshot of one process, that trees and files agree.

        A damaged data file is no error here, but as soon as its entry is asked for.
        """
        entries = dict.fromkeys(record.entry for record in self.documents.index(0).files)
        consistency = Consistency()
        for segment in entries:
            try:
                items = self._items_of(0, segment)
            except (CorruptionError, FormatError) as error:
                self._damaged[segment] = error
                continue
            files = {stored.file.path: stored.file for found in items.values() for stored in found}
            for file in files.values():
                consistency.add_items(segment, 0, file.items)
        for name, entry in self.documents.entries.items():
            path = paths.segment(name)
            if path not in self._damaged:
                consistency.add_tree(entry.tree, path)
        consistency.check(self._damaged)


def _leaf_finder(file: PlacedFile) -> Callable[[int], str | None]:
    """Returns a function from a byte of the file's data to its leaf, made when it is needed."""

    @functools.cache
    def finder() -> Callable[[int], str | None]:
        return opening.leaf_finder(file.record.entry, dict(file.items))

    return lambda position: finder()(position)


def open_contents(location: Location, manifest: Manifest | None = None) -> Contents:
    """Returns the contents of the snapshot at a location, after checking its documents.

    Args:
        location: Where.
        manifest: When it was read already.

    Raises:
        NotFoundError, CorruptionError, FormatError: As
            :func:`waypost.audit.opening.open_documents`.
    """
    with collector.paused():
        return Contents(location, opening.open_documents(location, manifest))
