"""Which bytes go where: a pure function from pieces to files, done before the first byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waypost.buffers import Source
from waypost.format import names, paths, safetensors
from waypost.format.tensortypes import TensorType


@dataclass(frozen=True, slots=True)
class Stored:
    """One piece in a data file: its bytes are at ``start`` to ``stop`` of the file's data."""

    start: int
    stop: int
    source: Source


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A data file to be written.

    Attributes:
        name: Base name.
        entry: The entry that it belongs to.
        header: Its first bytes, up to the start of data.
        pieces: By position, without gaps.
        data_bytes: Bytes after the header.
    """

    name: str
    entry: str
    header: bytes
    pieces: tuple[Stored, ...]
    data_bytes: int

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, slots=True)
class Item:
    """A piece before it has a place: path, type and source."""

    path: str
    type: TensorType
    source: Source


def plan_files(
    items: Iterable[Item], ties: Mapping[str, str], *, rank: int, file_bytes_max: int
) -> list[FilePlan]:
    """Returns the files that hold ``items``: one family for each entry.

    Within a file, tensors with larger elements come first, so that each is aligned to its own
    element size; the header names them in the order given.

    Args:
        items: In state order.
        ties: Leaf to the leaf that it is tied to, noted in the header for other readers.
        rank: Who writes.
        file_bytes_max: A file is closed before it would pass this size; one item may alone.
    """
    families: dict[str, list[Item]] = {}
    for item in items:
        families.setdefault(paths.entry_of(item.path), []).append(item)
    plans: list[FilePlan] = []
    for entry, family in families.items():
        for number, group in enumerate(_split(family, file_bytes_max)):
            plans.append(_plan_file(entry, names.data_file(entry, rank, number), group, ties))
    return plans


def _split(items: list[Item], file_bytes_max: int) -> list[list[Item]]:
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.source.nbytes > file_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.source.nbytes
    return groups


def _plan_file(entry: str, name: str, items: list[Item], ties: Mapping[str, str]) -> FilePlan:
    position = 0
    placed: dict[str, tuple[int, int]] = {}
    pieces: list[Stored] = []
    for item in sorted(items, key=lambda item: -item.type.item_bytes):
        stop = position + item.source.nbytes
        placed[item.path] = position, stop
        pieces.append(Stored(position, stop, item.source))
        position = stop
    entries: dict[str, safetensors.Item] = {}
    for item in items:
        dtype, shape = item.type.stored
        entries[paths.key_of(item.path)] = safetensors.Item(dtype, shape, *placed[item.path])
    metadata = {"format": "pt"}
    for leaf, base in ties.items():
        is_free = paths.key_of(leaf) not in metadata
        if is_free and base in placed and paths.entry_of(leaf) == entry:
            metadata[paths.key_of(leaf)] = paths.key_of(base)
    return FilePlan(name, entry, safetensors.header(entries, metadata), tuple(pieces), position)
