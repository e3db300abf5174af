"""Which bytes go where: a pure function from pieces to files, done before the first byte moves.

Every rank plans for itself, from what it holds and how that is spread. What does not depend on the
tensors' content is remembered by a planner as long as the structure stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from waypost.buffers import BytesSource, Source
from waypost.core import partition
from waypost.core.partition import Claim
from waypost.format import names, paths, safetensors, shards
from waypost.format.cuts import Cut
from waypost.format.shardings import Box, Ranks, whole
from waypost.format.shards import Extent
from waypost.format.tensortypes import TensorType
from waypost.state.describe import Piece


@dataclass(frozen=True, slots=True)
class Stored:
    """One item in a data file: its bytes are at ``start`` to ``stop`` of the file's data."""

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
class Plan:
    """What a rank writes.

    Attributes:
        files: Its files.
        cuts: Where the share of each rank begins in what all hold alike; equal on all ranks.
    """

    files: tuple[FilePlan, ...]
    cuts: list[Cut]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def entry_bytes(self) -> dict[str, int]:
        """Returns payload bytes by entry path."""
        sizes: dict[str, int] = {}
        for file in self.files:
            sizes[file.entry] = sizes.get(file.entry, 0) + file.data_bytes
        return sizes


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a piece that this rank writes: which source, and which of its bytes."""

    path: str
    key: str
    type: TensorType
    source: tuple[int, int]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """A data file but for its sources: each slot says which source fills it, and from where."""

    name: str
    entry: str
    header: bytes
    slots: tuple[tuple[int, int, _Item], ...]
    data_bytes: int


class Planner:
    """Plans saves; remembers the last structure.

    Args:
        file_bytes_max: A file is closed before it would pass this size; one item may alone.
    """

    def __init__(self, file_bytes_max: int) -> None:
        self._file_bytes_max = file_bytes_max
        self._structure: object = None
        self._layouts: list[_Layout] = []
        self._cuts: list[Cut] = []
        self.hits = 0

    def plan(self, pieces: Sequence[Piece], ties: Mapping[str, str], ranks: Ranks) -> Plan:
        """Returns the files that hold this rank's part of ``pieces``: a family for each entry.

        Within a file, tensors with larger elements come first, so that each is aligned to its own
        element size; the header names them in the order given.

        Args:
            pieces: In state order.
            ties: Leaf to the leaf that it is tied to, noted in the header for other readers.
            ranks: Who writes.
        """
        structure = (
            ranks,
            dict(ties),
            [
                (
                    piece.path,
                    piece.type,
                    piece.sharding,
                    piece.is_own,
                    [box for box, _ in piece.held],
                )
                for piece in pieces
            ],
        )
        if structure == self._structure:
            self.hits += 1
        else:
            self._layouts, self._cuts = self._lay_out(pieces, ties, ranks)
            self._structure = structure
        return Plan(tuple(_bind(layout, pieces) for layout in self._layouts), self._cuts)

    def _lay_out(
        self, pieces: Sequence[Piece], ties: Mapping[str, str], ranks: Ranks
    ) -> tuple[list[_Layout], list[Cut]]:
        held, claims = _claims(pieces, ranks)
        families: dict[str, list[_Item]] = {}
        shares = partition.shares(claims, ranks.rank)
        for (number, at, box), claim, (start, stop) in zip(held, claims, shares, strict=True):
            is_first = claim.replicas[0] == ranks.rank
            if start < stop or (not claim.nbytes and is_first):
                item = _item(pieces[number], (number, at), box, start, stop)
                families.setdefault(paths.entry_of(item.path), []).append(item)
        layouts: list[_Layout] = []
        for entry, family in families.items():
            for number, group in enumerate(_split(family, self._file_bytes_max)):
                name = names.data_file(entry, ranks.rank, number)
                layouts.append(_lay_out_file(entry, name, group, ties))
        everywhere = tuple(range(ranks.world_size))
        common = [claim for claim in claims if claim.replicas == everywhere]
        return layouts, partition.cuts(common, ranks.world_size)


def _claims(
    pieces: Sequence[Piece], ranks: Ranks
) -> tuple[list[tuple[int, int, Box]], list[Claim]]:
    """Returns all that this rank holds: number of the piece, of the box in it, and the box."""
    everywhere = tuple(range(ranks.world_size))
    held: list[tuple[int, int, Box]] = []
    claims: list[Claim] = []
    for number, piece in enumerate(pieces):
        if piece.is_own:
            replicas: tuple[int, ...] = (ranks.rank,)
        elif piece.sharding is None:
            replicas = everywhere
        elif piece.sharding.includes(ranks.rank):
            replicas = piece.sharding.replicas(ranks.rank)
        else:
            continue
        item_bytes = piece.type.item_bytes
        boxes = [box for box, _ in piece.held]
        if not boxes and not prod(piece.type.shape) and piece.sharding is not None:
            boxes, replicas = [whole(piece.type.shape)], piece.sharding.ranks
        for at, box in enumerate(boxes):
            held.append((number, at, box))
            nbytes = shards.count_of(box) * item_bytes
            claims.append(Claim(piece.path, nbytes, item_bytes, replicas))
    return held, claims


def _item(piece: Piece, source: tuple[int, int], box: Box, start: int, stop: int) -> _Item:
    item_bytes = piece.type.item_bytes
    extent = Extent(box, start // item_bytes, stop // item_bytes)
    key = shards.key_for(paths.key_of(piece.path), piece.type.shape, extent)
    kind = shards.type_of(piece.type.dtype, extent)
    return _Item(piece.path, key, kind, source, start, stop)


def _split(items: list[_Item], file_bytes_max: int) -> list[list[_Item]]:
    groups: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        nbytes = item.stop - item.start
        if groups[-1] and size + nbytes > file_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    return groups


def _lay_out_file(
    entry: str, name: str, items: Iterable[_Item], ties: Mapping[str, str]
) -> _Layout:
    items = list(items)
    position = 0
    placed: dict[str, tuple[int, int]] = {}
    slots: list[tuple[int, int, _Item]] = []
    for item in sorted(items, key=lambda item: -item.type.item_bytes):
        stop = position + item.stop - item.start
        placed[item.key] = position, stop
        slots.append((position, stop, item))
        position = stop
    entries: dict[str, safetensors.Item] = {}
    for item in items:
        dtype, shape = item.type.stored
        entries[item.key] = safetensors.Item(dtype, shape, *placed[item.key])
    metadata = {"format": "pt"}
    for leaf, base in ties.items():
        is_here = paths.entry_of(base) == paths.entry_of(leaf) == entry
        is_free = paths.key_of(leaf) not in metadata
        if is_here and is_free and paths.key_of(base) in placed:
            metadata[paths.key_of(leaf)] = paths.key_of(base)
    return _Layout(name, entry, safetensors.header(entries, metadata), tuple(slots), position)


def _bind(layout: _Layout, pieces: Sequence[Piece]) -> FilePlan:
    """Returns the file with the sources that fill it now."""
    stored: list[Stored] = []
    for start, stop, item in layout.slots:
        number, at = item.source
        held = pieces[number].held
        source = held[at][1] if at < len(held) else _NOTHING
        if item.stop - item.start != source.nbytes:
            source = _Slice(source, item.start, item.stop)
        stored.append(Stored(start, stop, source))
    return FilePlan(layout.name, layout.entry, layout.header, tuple(stored), layout.data_bytes)


class _Slice:
    """A range of the bytes of another source."""

    def __init__(self, whole: Source, start: int, stop: int) -> None:
        self._whole = whole
        self._start = start
        self._stop = stop

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self._stop - self._start

    def view(self) -> memoryview | None:
        """Returns the memory, if the whole source has one."""
        view = self._whole.view()
        return None if view is None else view[self._start : self._stop]

    def copy(self, start: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``start`` of the range on."""
        self._whole.copy(self._start + start, out)


_NOTHING = BytesSource(b"")
