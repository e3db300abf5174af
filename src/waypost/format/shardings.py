"""How a tensor is spread over ranks: a mesh with placements, or boxes named one by one.

A sharding has a text form, ``<ranks>/<mesh>/<placements>``, such as ``0-3/2x2/S0,R``: four ranks in
a mesh of 2 × 2, dimension 0 of the tensor divided along the first dimension of the mesh, equal
along the second. From it and the shape of the whole tensor anyone can compute what each rank holds,
so a snapshot says this once for each leaf, not once for each leaf and rank.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from waypost import limits
from waypost.errors import FormatError

Box: TypeAlias = tuple[tuple[int, int], ...]
"""First and last-plus-one index of a part of a tensor, by dimension, in global coordinates."""

REPLICATE: Final = "R"

_PLACEMENT = re.compile(r"R|S(\d{1,2})(?:\*(\d{1,9}))?")
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:\+(\d{1,9}))?)?")


@dataclass(frozen=True)
class Ranks:
    """This process among those that save or load together.

    Attributes:
        rank: Its number, from 0.
        world_size: How many there are.
        members: Their numbers in the whole job, in order; None when they are the same.
    """

    rank: int = 0
    world_size: int = 1
    members: tuple[int, ...] | None = None

    @functools.cached_property
    def _indexes(self) -> dict[int, int]:
        members = range(self.world_size) if self.members is None else self.members
        return {member: number for number, member in enumerate(members)}

    def index(self, global_rank: int) -> int | None:
        """Returns the number in this group of a rank of the whole job; None if it is not in it."""
        return self._indexes.get(global_rank)


ONE: Final = Ranks()
"""A process on its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the whole tensor, and where it lies in what a rank holds."""

    box: Box
    local: Box


@dataclass(frozen=True)  # without slots: what is computed from it is kept with it
class Sharding:
    """How a tensor is spread over ranks.

    Attributes:
        ranks: Who takes part, in the row-major order of the mesh.
        mesh: The mesh's shape.
        placements: For each dimension of the mesh ``R`` (equal along it), ``S<d>`` (dimension ``d``
            divided along it, as ``torch.chunk`` does), or ``S<d>*<n>`` (the same, within each of
            ``n`` divisions that a later dimension of the mesh makes).
        boxes: Instead of placements, the boxes of each rank in ``ranks``.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    boxes: tuple[tuple[Box, ...], ...] | None = None

    @functools.cached_property
    def text(self) -> str:
        """The form in documents."""
        ranks = _ranks_text(self.ranks)
        if self.boxes is not None:
            held = ";".join("+".join(map(box_text, boxes)) for boxes in self.boxes)
            return f"{ranks}/=/{held}"
        return f"{ranks}/{'x'.join(map(str, self.mesh))}/{','.join(self.placements)}"

    @functools.cached_property
    def divided(self) -> tuple[int, ...]:
        """Dimensions of the mesh along which the tensor is divided."""
        return tuple(n for n, placement in enumerate(self.placements) if placement != REPLICATE)

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def includes(self, rank: int) -> bool:
        """Tells whether ``rank`` takes part."""
        return rank in self._positions

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tells whether a tensor of ``shape`` can be spread like this."""
        if self.boxes is None:
            matches = [_PLACEMENT.fullmatch(placement) for placement in self.placements]
            return all(m is None or int(m.group(1) or -1) < len(shape) for m in matches)
        return all(
            len(box) == len(shape)
            and all(stop <= size for (_, stop), size in zip(box, shape, strict=True))
            for held in self.boxes
            for box in held
        )

    def parts(self, rank: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Returns what ``rank`` holds of a tensor of ``shape``, in the order of its own memory.

        Raises:
            KeyError: The rank does not take part.
        """
        found = self._known_parts.get((rank, shape))
        if found is None:
            found = self._known_parts[rank, shape] = self._find_parts(rank, shape)
        return found

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same as ``rank``, in order; it is one of them."""
        position = self._positions[rank]
        if self.boxes is not None:
            own = self.boxes[position]
            return tuple(r for r, held in zip(self.ranks, self.boxes, strict=True) if held == own)
        return self._replicas(tuple(self._coordinate(position)[n] for n in self.divided))

    def holders(self, box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ranks that hold any element of ``box``, or of an empty tensor anything."""
        if not prod(shape):
            return self.ranks[:1]
        found = self._known_holders.get((box, shape))
        if found is None:
            found = self._known_holders[box, shape] = self._find_holders(box, shape)
        return found

    def restricted(self, owners: frozenset[int]) -> Sharding | None:
        """Returns the same on those of its ranks that are ``owners``.

        None when these are not a part of the mesh, as it is along dimensions that divide nothing.
        """
        kept = [rank in owners for rank in self.ranks]
        if all(kept):
            return self
        if self.boxes is not None or not any(kept):
            return None
        coordinates = [self._coordinate(p) for p, is_kept in enumerate(kept) if is_kept]
        along = [sorted(set(indexes)) for indexes in zip(*coordinates, strict=True)]
        mesh = tuple(map(len, along))
        is_grid = prod(mesh) == len(coordinates)
        if not is_grid or any(mesh[n] != self.mesh[n] for n in self.divided):
            return None
        ranks = tuple(r for r, is_kept in zip(self.ranks, kept, strict=True) if is_kept)
        return Sharding(ranks, mesh, self.placements)

    def boxes_of(self, shape: tuple[int, ...]) -> set[Box]:
        """Returns the different boxes that a tensor of ``shape`` is divided in."""
        firsts = {self.replicas(rank)[0] for rank in self.ranks}
        return {part.box for rank in firsts for part in self.parts(rank, shape)}

    # Few shapes and boxes are asked for again and again, of the same few shardings.

    @functools.cached_property
    def _known_parts(self) -> dict[tuple[int, tuple[int, ...]], tuple[Part, ...]]:
        return {}

    @functools.cached_property
    def _known_holders(self) -> dict[tuple[Box, tuple[int, ...]], tuple[int, ...]]:
        return {}

    def _find_parts(self, rank: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
        position = self._positions[rank]
        if self.boxes is not None:
            return tuple(
                Part(box, tuple((0, stop - start) for start, stop in box))
                for box in self.boxes[position]
                if is_filled(box)
            )
        return _parts(shape, self._divisions(position, len(shape)))

    def _find_holders(self, box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
        found: set[int] = set()
        seen: set[tuple[int, ...]] = set()
        for rank in self.ranks:
            replicas = self.replicas(rank)
            if replicas in seen:
                continue
            seen.add(replicas)
            if any(overlaps(part.box, box) for part in self._find_parts(rank, shape)):
                found.update(replicas)
        return tuple(sorted(found))

    def _coordinate(self, position: int) -> tuple[int, ...]:
        found = []
        for size in reversed(self.mesh):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))

    @functools.cached_property
    def _by_division(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for position, rank in enumerate(self.ranks):
            coordinate = self._coordinate(position)
            found.setdefault(tuple(coordinate[n] for n in self.divided), []).append(rank)
        return {key: tuple(sorted(ranks)) for key, ranks in found.items()}

    def _replicas(self, division: tuple[int, ...]) -> tuple[int, ...]:
        return self._by_division[division]

    def _divisions(self, position: int, dimensions: int) -> tuple[tuple[_Division, ...], ...]:
        """Returns, for each dimension of the tensor, how it is divided for one rank."""
        coordinate = self._coordinate(position)
        found: list[list[_Division]] = [[] for _ in range(dimensions)]
        for index, size, placement in zip(coordinate, self.mesh, self.placements, strict=True):
            match = _PLACEMENT.fullmatch(placement)
            if match is not None and match.group(1) is not None:
                dimension, within = int(match.group(1)), int(match.group(2) or 1)
                if dimension >= dimensions:
                    raise FormatError(f"{placement}: a tensor of {dimensions} dimensions")
                found[dimension].append((index, size, within))
        return tuple(map(tuple, found))


_Division: TypeAlias = tuple[int, int, int]
"""Index along a dimension of the mesh, its size, and the divisions within which it divides."""


def alone(ranks: Sequence[int]) -> Sharding:
    """Returns the sharding of a tensor that each of ``ranks`` holds as a whole, and nobody else."""
    return Sharding(tuple(ranks), (len(ranks),), (REPLICATE,))


def is_filled(box: Box) -> bool:
    """Tells whether a box holds any element."""
    return all(start < stop for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """Returns the box that is all of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def box_text(box: Box) -> str:
    """Returns the text form of a box, such as ``0:4,2:6``."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    """Returns the box that ``text`` describes; its numbers are of at most 19 digits.

    Raises:
        FormatError: It describes none.
    """
    box: list[tuple[int, int]] = []
    for pair in text.split(",") if text else []:
        start, colon, stop = pair.partition(":")
        is_number = start.isdecimal() and stop.isdecimal() and start.isascii() and stop.isascii()
        if not colon or not is_number or len(pair) > 39 or not int(start) <= int(stop):
            raise FormatError(f"not a box: {text[:80]!r}")
        box.append((int(start), int(stop)))
    return tuple(box)


@functools.lru_cache(maxsize=4096)
def parse(text: object) -> Sharding:
    """Returns the sharding that ``text`` describes.

    Raises:
        FormatError: It describes none.
    """
    if not isinstance(text, str) or len(text) > limits.SHARDING_CHARACTERS_MAX:
        raise FormatError(f"not a sharding: {str(text)[:80]!r}")
    pieces = text.split("/")
    if len(pieces) != 3:
        raise FormatError(f"not a sharding: {text[:80]!r}")
    ranks = _parse_ranks(pieces[0])
    if pieces[1] == "=":
        boxes = tuple(
            tuple(map(parse_box, held.split("+"))) if held else () for held in pieces[2].split(";")
        )
        if len(boxes) != len(ranks):
            raise FormatError(f"boxes of {len(boxes)} ranks for {len(ranks)}: {text[:80]!r}")
        return Sharding(ranks, (len(ranks),), (), boxes)
    sizes = pieces[1].split("x")
    placements = tuple(pieces[2].split(","))
    if not all(size.isascii() and size.isdecimal() and len(size) < 10 for size in sizes):
        raise FormatError(f"not a mesh: {text[:80]!r}")
    mesh = tuple(map(int, sizes))
    if prod(mesh) != len(ranks) or len(placements) != len(mesh):
        raise FormatError(f"mesh, ranks and placements do not fit: {text[:80]!r}")
    divisions_max = max(limits.DIVISIONS_MAX, len(ranks))
    if not all(_is_placement(placement, divisions_max) for placement in placements):
        raise FormatError(f"not placements: {text[:80]!r}")
    return Sharding(ranks, mesh, placements)


def _is_placement(text: str, divisions_max: int) -> bool:
    match = _PLACEMENT.fullmatch(text)
    return match is not None and 0 < int(match.group(2) or 1) <= divisions_max


def _parse_ranks(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for piece in text.split(","):
        match = _RUN.fullmatch(piece)
        if match is None:
            raise FormatError(f"not ranks: {text[:80]!r}")
        start = int(match.group(1))
        stop = start if match.group(2) is None else int(match.group(2))
        step = int(match.group(3) or 1)
        if step < 1 or (stop - start) // step + len(found) >= limits.WORLD_SIZE_MAX:
            raise FormatError(f"not ranks: {text[:80]!r}")
        found.extend(range(start, stop + 1, step))
    if len(set(found)) != len(found) or not found:
        raise FormatError(f"a rank is named twice, or none: {text[:80]!r}")
    return tuple(found)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    pieces: list[str] = []
    position = 0
    while position < len(ranks):
        end = position + 1
        step = ranks[end] - ranks[position] if end < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - position < 3 and step != 1:
            end = position + 1
        first, last = ranks[position], ranks[end - 1]
        pieces.append(
            str(first) if first == last else f"{first}-{last}" + (f"+{step}" if step > 1 else "")
        )
        position = end
    return ",".join(pieces)


@functools.lru_cache(maxsize=16384)
def _parts(
    shape: tuple[int, ...], divisions: tuple[tuple[_Division, ...], ...]
) -> tuple[Part, ...]:
    found: list[list[tuple[tuple[int, int], tuple[int, int]]]] = []
    for size, division in zip(shape, divisions, strict=True):
        at = 0
        ranges = []
        for start, stop in _intervals(size, division):
            ranges.append(((start, stop), (at, at + stop - start)))
            at += stop - start
        found.append(ranges)
    return tuple(
        Part(tuple(box for box, _ in ranges), tuple(local for _, local in ranges))
        for ranges in itertools.product(*found)
    )


@functools.lru_cache(maxsize=65536)
def _intervals(size: int, divisions: tuple[_Division, ...]) -> tuple[tuple[int, int], ...]:
    """Returns the indexes of one dimension that a rank holds, as ranges."""
    held: tuple[tuple[int, int], ...] = ((0, size),) if size else ()
    for index, count, within in divisions:
        length = sum(stop - start for start, stop in held)
        taken: list[tuple[int, int]] = []
        for number in range(min(within, length)):
            start, stop = _chunk(length, number, within)
            first, last = _chunk(stop - start, index, count)
            _append(taken, held, start + first, start + last)
        held = tuple(taken)
    return held


def _chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """Returns one of ``count`` divisions of ``length``, as ``torch.chunk`` makes them."""
    size = -(-length // count)
    return min(length, index * size), min(length, (index + 1) * size)


def _append(
    found: list[tuple[int, int]], held: Sequence[tuple[int, int]], start: int, stop: int
) -> None:
    """Adds positions ``start`` to ``stop`` of the concatenated ranges, as ranges, to ``found``."""
    at = 0
    for first, last in held:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            is_next = bool(found) and found[-1][1] == first + low
            begin = found.pop()[0] if is_next else first + low
            found.append((begin, first + high))
        at += last - first


def overlaps(box: Box, other: Box) -> bool:
    """Tells whether two boxes of one tensor share an element."""
    return all(
        max(start, first) < min(stop, last)
        for (start, stop), (first, last) in zip(box, other, strict=True)
    )
