"""Boxes: parts of a tensor in its global coordinates, and the byte ranges that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod


def bounds(
    box: Sequence[slice | tuple[int, int]], shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) for every dimension; dimensions that the box does not name are whole.

    Raises:
        ValueError: Too many dimensions, a step, or a range outside the shape.
    """
    if len(box) > len(shape):
        raise ValueError(f"a box of {len(box)} dimensions for a tensor of shape {shape}")
    found: list[tuple[int, int]] = []
    for dimension, size in enumerate(shape):
        part = box[dimension] if dimension < len(box) else slice(None)
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step != 1:
                raise ValueError(f"a box with a step, {part}")
            stop = max(start, stop)
        else:
            start, stop = part
        if not 0 <= start <= stop <= size:
            raise ValueError(f"box {start} to {stop} in a dimension of size {size}")
        found.append((start, stop))
    return tuple(found)


def ranges(
    box: Sequence[tuple[int, int]], shape: tuple[int, ...], item_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yields the contiguous byte ranges of a box in a row-major tensor.

    Args:
        box: (start, stop) for every dimension of ``shape``.
        shape: Of the whole tensor.
        item_bytes: Bytes of one element.

    Yields:
        First byte in the tensor, first byte in the box's own row-major memory, length in bytes.
    """
    lengths = [stop - start for start, stop in box]
    if not prod(lengths):
        return
    inner = len(shape)
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = prod(shape[inner:]) * item_bytes
    if inner:
        run *= lengths[inner - 1]
    strides = [prod(shape[dimension + 1 :]) * item_bytes for dimension in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    outer = lengths[: max(0, inner - 1)]
    at = 0
    for number in range(prod(outer)):
        offset = base
        rest = number
        for dimension in reversed(range(len(outer))):
            rest, index = divmod(rest, outer[dimension])
            offset += index * strides[dimension]
        yield offset, at, run
        at += run
