"""The documents of a snapshot, read and checked from the manifest down."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from waypost import limits
from waypost.errors import CorruptionError, FormatError, NotFoundError, WaypostError
from waypost.format import digests, documents, names, paths, safetensors
from waypost.format.documents import DataFile, FileRecord, Index, Manifest, Structure
from waypost.storage import Location, ReadFile


@dataclass(frozen=True, slots=True)
class Documents:
    """Everything about a snapshot but its data."""

    manifest: Manifest
    structure: Structure
    indexes: tuple[Index, ...]

    @property
    def entries(self) -> dict[str, documents.Entry]:
        """The entries that all ranks share, and those of rank 0, in the order of the manifest."""
        own = self.indexes[0].entries
        found = {**self.structure.entries, **own}
        return {name: found[name] for name in self.manifest.entries if name in found}


def read_manifest(snapshot: Location) -> Manifest:
    """Returns the manifest of the snapshot at a location.

    Raises:
        NotFoundError: No manifest is there; the message says what is.
        CorruptionError: It is not the bytes that were written.
        FormatError: It is not a manifest, or one that needs a newer reader.
    """
    location = snapshot / documents.MANIFEST
    try:
        data = location.storage.read(location.path, limits.MANIFEST_BYTES_MAX)
    except NotFoundError as error:
        raise NotFoundError(_what_is_there(snapshot)) from error
    return documents.decode_manifest(data, location.url)


def open_documents(snapshot: Location) -> Documents:
    """Returns the manifest and all that it names but data files, each checked by its digest.

    Raises:
        NotFoundError, CorruptionError, FormatError: As :func:`read_manifest`.
    """
    manifest = read_manifest(snapshot)
    structure_data = read_document(snapshot, manifest.structure)
    structure = documents.decode_structure(structure_data, manifest.structure.path)
    indexes = []
    for rank, record in enumerate(manifest.indexes):
        index = documents.decode_index(read_document(snapshot, record), record.path)
        if index.rank != rank:
            raise FormatError(f"{record.path}: is the index of rank {index.rank}, not of {rank}")
        indexes.append(index)
    if set(manifest.entries) != set(structure.entries) | set(indexes[0].entries):
        raise FormatError(f"{snapshot.url}: manifest and documents name different entries")
    return Documents(manifest, structure, tuple(indexes))


def read_document(snapshot: Location, record: FileRecord) -> bytes:
    """Returns the bytes of a document that the manifest names.

    Raises:
        CorruptionError: It is missing, or not the bytes that were written.
    """
    algorithm, expected = digests.split(record.digest)
    location = snapshot / record.path
    try:
        data = location.storage.read(location.path, record.bytes)
    except NotFoundError as error:
        raise _missing(snapshot, record.path) from error
    if len(data) != record.bytes:
        raise CorruptionError(
            f"{location.url}: expected {record.bytes} bytes, found "
            f"{'more' if len(data) > record.bytes else len(data)}",
            file=record.path,
        )
    if algorithm.one_shot(data) != expected:
        raise CorruptionError(
            f"{location.url}: its digest does not fit its bytes", file=record.path, offset=0
        )
    return data


def data_path(manifest: Manifest, file: DataFile) -> str:
    """Returns the path of a data file, relative to the snapshot."""
    return f"{names.DATA}/{manifest.attempt}/{file.name}"


def open_data(snapshot: Location, path: str, file: DataFile) -> ReadFile:
    """Returns the data file, open, after checking its size.

    Raises:
        CorruptionError: It is missing or has another size.
    """
    location = snapshot / path
    try:
        opened = location.storage.open(location.path)
    except NotFoundError as error:
        raise _missing(snapshot, path) from error
    if opened.size_bytes != file.bytes:
        size_bytes = opened.size_bytes
        leaf = _leaf_at_cut(opened, path, file) if size_bytes < file.bytes else None
        opened.close()
        raise CorruptionError(
            f"{location.url}: expected {file.bytes} bytes, found {size_bytes}"
            + (f" (cut off in leaf {leaf})" if leaf else ""),
            file=path,
            leaf=leaf,
            offset=min(size_bytes, file.bytes),
        )
    return opened


def read_header(
    opened: ReadFile, path: str, file: DataFile, algorithm: digests.Algorithm
) -> dict[str, safetensors.Item]:
    """Returns the items of a data file, after checking its header and its digest.

    Raises:
        CorruptionError: The header is not the bytes that were written.
    """
    header = bytearray(file.data_start)
    opened.read(0, [memoryview(header)])
    digest = algorithm.one_shot(header)
    if algorithm.text(digest) != file.header:
        raise CorruptionError(f"{path}: the header's digest does not fit", file=path, offset=0)
    whole = algorithm.text(algorithm.over([digest, documents.chunk_digests(file)]))
    if whole != file.digest:
        raise CorruptionError(f"{path}: the file's digest does not fit its chunks'", file=path)
    if safetensors.header_length(bytes(header[:8]), path) != file.data_start:
        raise FormatError(f"{path}: data does not start where the index says")
    items, _ = safetensors.parse(bytes(header), file.bytes - file.data_start, path)
    return items


def leaf_finder(entry: str, items: dict[str, safetensors.Item]) -> Callable[[int], str | None]:
    """Returns a function from a byte of a file's data to the leaf path that it belongs to."""
    ordered = sorted((item.start, key) for key, item in items.items() if item.end > item.start)
    starts = [start for start, _ in ordered]

    def find(position: int) -> str | None:
        number = bisect.bisect_right(starts, position) - 1
        if number < 0:
            return None
        return paths.path_of(entry, ordered[number][1])

    return find


def _leaf_at_cut(opened: ReadFile, path: str, file: DataFile) -> str | None:
    """Returns the leaf in which a file ends early, if its header can still be read."""
    try:
        items = read_header(opened, path, file, digests.split(file.header)[0])
    except WaypostError:
        return None
    return leaf_finder(file.entry, items)(max(0, opened.size_bytes - file.data_start))


def _missing(snapshot: Location, path: str) -> WaypostError:
    """Returns the error for a file that the manifest named and that is not there."""
    attempt = path.split("/")[1]
    try:
        if read_manifest(snapshot).attempt != attempt:
            return NotFoundError(f"{snapshot.url} was replaced while it was being read")
    except NotFoundError:
        return NotFoundError(f"{snapshot.url} was removed while it was being read")
    except WaypostError:
        pass
    return CorruptionError(f"{(snapshot / path).url} is missing", file=path)


def _what_is_there(snapshot: Location) -> str:
    found = snapshot.storage.list(snapshot.path)
    if not found:
        return f"{snapshot.url}: no snapshot is there"
    steps = [step for name in found if (step := names.parse_step(name.name)) is not None]
    if steps:
        return (
            f"{snapshot.url} is a run, not a snapshot; name one, such as {snapshot.url}@latest "
            f"({len(steps)} snapshots, the last of step {max(steps)})"
        )
    return f"{snapshot.url}: no snapshot is there (no {documents.MANIFEST}); a save may have failed"
