"""The documents of a snapshot, read and checked from the manifest down."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping

import msgspec

from waypost import limits
from waypost.errors import CorruptionError, FormatError, NotFoundError, WaypostError
from waypost.format import (
    digests,
    documents,
    names,
    paths,
    safetensors,
    shardings,
    shards,
    tensornodes,
    tensortypes,
    trees,
)
from waypost.format.documents import DataFile, FileRecord, Index, Manifest, Structure
from waypost.format.jsontext import Json
from waypost.storage import Location, ReadFile


class Documents:
    """Everything about a snapshot but its data; rank indexes are read when they are asked for.

    Attributes:
        location: The snapshot.
        manifest: Its manifest.
        structure: What all ranks share.
    """

    def __init__(self, location: Location, manifest: Manifest, structure: Structure) -> None:
        self.location = location
        self.manifest = manifest
        self.structure = structure
        self._indexes: dict[int, Index] = {}
        self._entries: dict[int | None, dict[str, documents.Entry]] = {}

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    def index(self, rank: int) -> Index:
        """Returns what ``rank`` wrote.

        Raises:
            CorruptionError, FormatError: Its index is damaged.
        """
        if rank not in self._indexes:
            if not 0 <= rank < self.world_size:
                raise FormatError(f"{self.location.url}: rank {rank} of {self.world_size}")
            record = self.manifest.indexes[rank]
            index = documents.decode_index(read_document(self.location, record), record.path)
            if index.rank != rank:
                raise FormatError(
                    f"{record.path}: is the index of rank {index.rank}, not of {rank}"
                )
            self._indexes[rank] = index
        return self._indexes[rank]

    @property
    def indexes(self) -> list[Index]:
        """The indexes of all ranks."""
        return [self.index(rank) for rank in range(self.world_size)]

    @property
    def entries(self) -> dict[str, documents.Entry]:
        """The entries as rank 0 sees them; see :meth:`entries_of`."""
        return self.entries_of(0)

    def entries_of(self, rank: int | None) -> dict[str, documents.Entry]:
        """Returns the entries as ``rank`` sees them, in the order of the manifest.

        For None, those that are per rank are as rank 0's, and what is per rank within the others
        stays a placeholder.

        Raises:
            FormatError: Manifest and documents name different entries.
        """
        if rank not in self._entries:
            index = self.index(rank or 0)
            found = {**self.structure.entries, **index.entries}
            if set(self.manifest.entries) != set(found):
                raise FormatError(
                    f"{self.location.url}: manifest and documents name different entries"
                )
            if rank is not None and self.world_size > 1:
                found = {name: _with_nodes(name, e, index.nodes) for name, e in found.items()}
            self._entries[rank] = {name: found[name] for name in self.manifest.entries}
        return self._entries[rank]


def _with_nodes(name: str, entry: documents.Entry, nodes: Mapping[str, Json]) -> documents.Entry:
    """Returns an entry with a rank's own nodes in place of placeholders, as far as it has any."""

    def change(node: Json, at: str) -> Json:
        is_placeholder = isinstance(node, dict) and trees.PER_RANK in node and len(node) == 1
        return nodes.get(at, trees.DROP) if is_placeholder else node

    tree = trees.changed(entry.tree, paths.segment(name), change)
    return msgspec.structs.replace(entry, tree=tree)


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


def open_documents(snapshot: Location, manifest: Manifest | None = None) -> Documents:
    """Returns the manifest and all that it names but data files, each checked by its digest.

    Args:
        snapshot: Where.
        manifest: When it was read already.

    Raises:
        NotFoundError, CorruptionError, FormatError: As :func:`read_manifest`.
    """
    if manifest is None:
        manifest = read_manifest(snapshot)
    structure_data = read_document(snapshot, manifest.structure)
    structure = documents.decode_structure(structure_data, manifest.structure.path)
    if manifest.world_size > 1:
        _check_shardings(structure, manifest)
    return Documents(snapshot, manifest, structure)


def _check_shardings(structure: Structure, manifest: Manifest) -> None:
    """Makes sure that every sharding is one of its tensor, over ranks that saved the snapshot.

    Raises:
        FormatError: It is not.
    """
    if any(rank >= manifest.world_size for _, rank, _ in structure.cuts):
        raise FormatError(f"{manifest.structure.path}: a cut of a rank that did not save")
    for name, entry in structure.entries.items():
        for leaf in trees.leaves(entry.tree, paths.segment(name)):
            described = tensornodes.described(leaf.tensor_node, leaf.path) if leaf.is_tensor else {}
            if "sharding" not in described:
                continue
            sharding = shardings.parse(described["sharding"])
            shape = tensortypes.parse(described["type"]).shape
            if max(sharding.ranks) >= manifest.world_size or not sharding.fits(shape):
                raise FormatError(
                    f"{leaf.path}: {described['type'][:80]} cannot be spread as "
                    f"{sharding.text[:80]} over {manifest.world_size} ranks"
                )


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
        key, _ = shards.parse_key(ordered[number][1])
        return paths.path_of(entry, key)

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
