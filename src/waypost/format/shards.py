"""Parts of leaves in data files: the key says which part of the whole tensor an item is.

A leaf that is stored whole has its own key. A part has the leaf's key, ``/~@``, the box that it
belongs to, and, when it is only a range of the box's elements in row-major order, ``@`` and the
range: ``layers.0.weight/~@0:4,0:8@16:32``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from waypost.errors import FormatError
from waypost.format.safetensors import Item
from waypost.format.shardings import Box, box_text, overlaps, parse_box, whole
from waypost.format.tensortypes import TensorType

_PAIRS_MAX: Final = 256
"""Parts that are compared one with another; of more, only the number of elements is checked."""

_KEY = re.compile(r"(?s:(.*))/~@([0-9:,]*)(?:@(\d{1,19}):(\d{1,19}))?")


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a tensor: elements ``start`` to ``stop``, in row-major order, of a box."""

    box: Box
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def is_whole_box(self) -> bool:
        """Whether it is all of its box."""
        return self.count == count_of(self.box)


def count_of(box: Box) -> int:
    """Returns the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def lengths_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(stop - start for start, stop in box)


def all_of(box: Box) -> Extent:
    """Returns the extent that is all of a box."""
    return Extent(box, 0, count_of(box))


def key_for(key: str, shape: tuple[int, ...], extent: Extent) -> str:
    """Returns the key of a part of the leaf that has ``key`` and ``shape``."""
    if extent.is_whole_box and extent.box == whole(shape):
        return key
    text = f"{key}/~@{box_text(extent.box)}"
    return text if extent.is_whole_box else f"{text}@{extent.start}:{extent.stop}"


def parse_key(key: str) -> tuple[str, Extent | None]:
    """Returns the leaf's key, and the part that an item holds; None for all of it.

    Raises:
        FormatError: The part is not one.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return key, None
    box = parse_box(match.group(2))
    if match.group(3) is None:
        return match.group(1), all_of(box)
    extent = Extent(box, int(match.group(3)), int(match.group(4)))
    if not 0 <= extent.start <= extent.stop <= count_of(box):
        raise FormatError(f"not a part of a leaf: {key[:200]!r}")
    return match.group(1), extent


def type_of(dtype: str, extent: Extent) -> TensorType:
    """Returns type and shape of the item that holds a part: flat unless it is a whole box."""
    shape = lengths_of(extent.box) if extent.is_whole_box else (extent.count,)
    return TensorType(dtype, shape)


def check_item(path: str, kind: TensorType, item: Item, extent: Extent | None) -> Extent:
    """Returns the part of a tensor that an item holds, after comparing their types.

    Raises:
        FormatError: The item is no part of such a tensor.
    """
    part = extent or all_of(whole(kind.shape))
    expected = kind if extent is None else type_of(kind.dtype, part)
    is_inside = len(part.box) == len(kind.shape) and all(
        stop <= size for (_, stop), size in zip(part.box, kind.shape, strict=True)
    )
    if not is_inside or (item.dtype, item.shape) != expected.stored:
        raise FormatError(
            f"{path}: the tree says {kind.text}, the data file holds "
            f"{item.dtype}{list(item.shape)}" + (f" at {box_text(part.box)}" if extent else "")
        )
    return part


def are_all(extents: Sequence[Extent], shape: tuple[int, ...]) -> bool:
    """Tells whether parts make up a tensor of ``shape``, each element once."""
    if sum(extent.count for extent in extents) != prod(shape):
        return False
    filled = [extent for extent in extents if extent.count]
    if len(filled) > _PAIRS_MAX:
        return len(set(filled)) == len(filled)
    return not any(_overlap(one, other) for one, other in itertools.combinations(filled, 2))


def _overlap(one: Extent, other: Extent) -> bool:
    if one.box == other.box:
        return max(one.start, other.start) < min(one.stop, other.stop)
    return overlaps(one.box, other.box)
