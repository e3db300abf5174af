"""Boxes as callers give them: parts of a tensor in its global coordinates."""

from __future__ import annotations

from collections.abc import Sequence


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
