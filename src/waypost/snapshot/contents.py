"""An opened snapshot: its documents, and where in which file each stored piece lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from waypost import collector
from waypost.audit import opening
from waypost.buffers import Target
from waypost.core import read
from waypost.errors import CorruptionError, FormatError, WaypostError
from waypost.format import digests, documents, paths, safetensors
from waypost.format.documents import DataFile, Index
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
class Contents:
    """Where everything in a snapshot is.

    Attributes:
        location: The snapshot.
        documents: Manifest, structure and indexes.
        files: The data files.
    """

    location: Location
    documents: opening.Documents
    files: tuple[PlacedFile, ...]
    _places: Mapping[tuple[str, str], tuple[PlacedFile, safetensors.Item]]
    _damaged: Mapping[str, WaypostError]

    def check_entries(self, names: Iterable[str]) -> None:
        """Makes sure that the data files of the entries are there and have their headers.

        Raises:
            CorruptionError, FormatError: One is damaged.
        """
        for name in names:
            error = self._damaged.get(paths.segment(name))
            if error is not None:
                raise error

    def sizes(self) -> Sizes:
        """Returns the size in bytes of each stored piece, by path."""
        return Sizes(self._places)

    def place(self, path: str) -> tuple[PlacedFile, safetensors.Item]:
        """Returns the file that holds the piece at ``path``, and the piece's range there.

        Raises:
            FormatError: None does.
        """
        found = self._places.get((paths.entry_of(path), paths.key_of(path)))
        if found is None:
            self.check_entries([paths.entry_of(path)])
            raise FormatError(f"{self.location.url}: no data file holds {path}")
        return found

    def read_pieces(
        self, targets: Mapping[str, Sequence[Target]], settings: Settings, *, verify: bool
    ) -> int:
        """Fills targets with whole pieces; returns the bytes read.

        Args:
            targets: By path of the piece.
            settings: Threads and segment size.
            verify: Check every chunk that is read.

        Raises:
            CorruptionError: Stored bytes are not what was saved.
        """
        wants: dict[str, list[read.Want]] = {}
        for path, found in targets.items():
            file, item = self.place(path)
            wants.setdefault(file.path, []).extend(read.Want(item.start, t) for t in found)
        return self.read_wants(wants, settings, verify=verify)

    def read_wants(
        self, wants: Mapping[str, Sequence[read.Want]], settings: Settings, *, verify: bool
    ) -> int:
        """Fills targets with byte ranges, given by the file's path; see :meth:`read_pieces`."""
        with ExitStack() as stack:
            reads: list[read.FileRead] = []
            for file in self.files:
                if file.path not in wants:
                    continue
                opened = stack.enter_context(
                    opening.open_data(self.location, file.path, file.record)
                )
                reads.append(
                    read.FileRead(
                        name=file.path,
                        file=opened,
                        data_start=file.record.data_start,
                        data_bytes=file.record.bytes - file.record.data_start,
                        chunk_bytes=file.index.chunk_bytes,
                        chunks=documents.chunk_digests(file.record) if verify else b"",
                        algorithm=digests.algorithm(file.index.algorithm),
                        wants=wants[file.path],
                        leaf_at=_leaf_finder(file),
                    )
                )
            return read.read_files(
                reads, threads=settings.workers, segment_bytes=settings.segment_bytes
            )


class Sizes(Mapping[str, int]):
    """Sizes of stored pieces by path, looked up in the files' headers."""

    def __init__(self, places: Mapping[tuple[str, str], tuple[PlacedFile, safetensors.Item]]):
        self._places = places

    def __getitem__(self, path: str) -> int:
        _, item = self._places[paths.entry_of(path), paths.key_of(path)]
        return item.end - item.start

    def __iter__(self):  # type: ignore[no-untyped-def]  # an iterator of paths
        return (paths.path_of(entry, key) for entry, key in self._places)

    def __len__(self) -> int:
        return len(self._places)


def open_contents(location: Location) -> Contents:
    """Returns the contents of the snapshot at a location, after checking documents and headers.

    A damaged data file is no error here, but as soon as its entry is asked for.

    Raises:
        NotFoundError, CorruptionError, FormatError: As
            :func:`waypost.audit.opening.open_documents`.
    """
    with collector.paused():
        return _open(location)


def _open(location: Location) -> Contents:
    opened = opening.open_documents(location)
    files: list[PlacedFile] = []
    places: dict[tuple[str, str], tuple[PlacedFile, safetensors.Item]] = {}
    damaged: dict[str, WaypostError] = {}
    for index in opened.indexes:
        for record in index.files:
            try:
                placed = _place_file(location, opened, index, record)
            except (CorruptionError, FormatError) as error:
                damaged.setdefault(record.entry, error)
                continue
            files.append(placed)
            for key, item in placed.items.items():
                if (record.entry, key) in places:
                    raise FormatError(f"{placed.path}: {record.entry}/{key} is stored twice")
                places[record.entry, key] = placed, item
    stored = {key: item for key, (_, item) in places.items()}
    for name, entry in opened.entries.items():
        path = paths.segment(name)
        if path not in damaged:
            consistency = Consistency()
            consistency.add_tree(entry.tree, path)
            consistency.check(stored, damaged)
    return Contents(location, opened, tuple(files), places, damaged)


def _place_file(
    location: Location, opened: opening.Documents, index: Index, record: DataFile
) -> PlacedFile:
    path = opening.data_path(opened.manifest, record)
    algorithm = digests.algorithm(index.algorithm)
    with opening.open_data(location, path, record) as file:
        items = opening.read_header(file, path, record, algorithm)
    return PlacedFile(path, record, index, items)


def _leaf_finder(file: PlacedFile):  # type: ignore[no-untyped-def]  # see opening.leaf_finder
    finder = None

    def find(position: int) -> str | None:
        nonlocal finder
        if finder is None:
            finder = opening.leaf_finder(file.record.entry, dict(file.items))
        return finder(position)

    return find
