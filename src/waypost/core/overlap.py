"""Parts that are stored against parts that are wanted: which bytes of a file go where.

Both are boxes of one tensor, each in row-major order. Where they meet in long runs, the bytes are
read to their place; where the runs are short, a block is read beside it and spread from there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from waypost import limits
from waypost.buffers import Target
from waypost.core.read import Want
from waypost.format.shardings import Box
from waypost.format.shards import Extent, lengths_of

_RUN_BYTES_MIN = 64 * limits.KIB
"""Runs from this length on are read one by one, to where they belong."""

_BLOCK_BYTES_MAX = 2 * limits.MIB
"""Memory for one block of short runs."""


class Filling:
    """A target that is filled by several reads, and done when all of its bytes are there.

    Args:
        target: What to fill.
        nbytes: How many of its bytes will be filled; 0 finishes at once.
    """

    def __init__(self, target: Target, nbytes: int) -> None:
        self._target = target
        self._remaining = nbytes
        self._guard = threading.Lock()
        self._view: memoryview | None = None
        if not nbytes:
            target.done()

    def view(self) -> memoryview:
        """Returns the target's memory."""
        with self._guard:
            if self._view is None:
                self._view = self._target.view()
            return self._view

    def finish(self, count: int) -> None:
        """Notes that ``count`` more bytes are there."""
        with self._guard:
            self._remaining -= count
            if self._remaining:
                return
            self._view = None
        self._target.done()


class Window:
    """A contiguous part of a filling."""

    def __init__(self, filling: Filling, start: int, length: int) -> None:
        self._filling = filling
        self._start = start
        self._length = length

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self._length

    def view(self) -> memoryview:
        """Returns the memory of the part."""
        return self._filling.view()[self._start : self._start + self._length]

    def done(self) -> None:
        """Counts the bytes."""
        self._filling.finish(self._length)


class _Block:
    """Memory for a block of short runs, spread over a filling when it was read.

    Args:
        filling: Where the runs go.
        nbytes: From the first byte of the first run to the last of the last.
        shape: Runs along each dimension, and bytes of a run.
        source: Steps, in bytes, from run to run in the block.
        target: The same in the filling.
        start: Of the first run in the filling.
    """

    def __init__(
        self,
        filling: Filling,
        nbytes: int,
        shape: tuple[int, ...],
        source: tuple[int, ...],
        target: tuple[int, ...],
        start: int,
    ) -> None:
        self._filling = filling
        self._nbytes = nbytes
        self._shape = shape
        self._source = source
        self._target = target
        self._start = start
        self._memory: memoryview | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the block in the file, between runs too."""
        return self._nbytes

    def view(self) -> memoryview:
        """Returns the block's memory."""
        if self._memory is None:
            self._memory = memoryview(bytearray(self._nbytes))
        return self._memory

    def done(self) -> None:
        """Copies the runs to their places."""
        strided = np.lib.stride_tricks.as_strided
        source = np.frombuffer(self.view(), dtype=np.uint8)
        target = np.frombuffer(self._filling.view(), dtype=np.uint8)[self._start :]
        strided(target, self._shape, (*self._target, 1))[...] = strided(
            source, self._shape, (*self._source, 1)
        )
        self._memory = None
        self._filling.finish(prod(self._shape))


def wants(
    stored: Extent, position: int, wanted: Extent, filling: Filling, item_bytes: int
) -> Iterator[tuple[Want, int]]:
    """Yields what to read of a stored part for a wanted one, each with the bytes that it brings.

    Args:
        stored: The part that an item of a file holds.
        position: Where the item begins in the file's data.
        wanted: The part to be filled now.
        filling: The memory of the whole box that ``wanted`` is of.
        item_bytes: Bytes of one element.
    """
    if stored.box == wanted.box:
        start, stop = max(stored.start, wanted.start), min(stored.stop, wanted.stop)
        if start < stop:
            length = (stop - start) * item_bytes
            at = position + (start - stored.start) * item_bytes
            yield Want(at, Window(filling, start * item_bytes, length)), length
        return
    origin = position - stored.start * item_bytes
    for source, target in itertools.product(_boxes(stored), _boxes(wanted)):
        common = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, target, strict=True)
        )
        if all(start < stop for start, stop in common):
            yield from _runs(common, stored.box, origin, wanted.box, filling, item_bytes)


def _runs(
    common: Box, stored: Box, origin: int, wanted: Box, filling: Filling, item_bytes: int
) -> Iterator[tuple[Want, int]]:
    """Yields the reads for a box that both sides have."""
    lengths = lengths_of(common)
    steps = [_steps(stored, item_bytes), _steps(wanted, item_bytes)]
    inner = len(common)
    while inner and lengths[inner - 1] == _length(stored, inner - 1) == _length(wanted, inner - 1):
        inner -= 1
    run = prod(lengths[max(0, inner - 1) :]) * item_bytes
    outer = lengths[: max(0, inner - 1)]
    source = origin + _offset(common, stored, steps[0])
    target = _offset(common, wanted, steps[1])
    if run >= _RUN_BYTES_MIN or prod(outer) == 1:
        for index in itertools.product(*map(range, outer)):
            at = source + sum(i * step for i, step in zip(index, steps[0], strict=False))
            to = target + sum(i * step for i, step in zip(index, steps[1], strict=False))
            yield Want(at, Window(filling, to, run)), run
        return
    yield from _blocks(outer, run, steps, source, target, filling)


def _blocks(
    outer: tuple[int, ...],
    run: int,
    steps: Sequence[Sequence[int]],
    source: int,
    target: int,
    filling: Filling,
) -> Iterator[tuple[Want, int]]:
    """Yields reads of blocks of short runs, each of bounded size."""
    depth = len(outer) - 1
    while depth and _span(outer[depth:], steps[0][depth:], run) <= _BLOCK_BYTES_MAX:
        depth -= 1
    if _span(outer[depth + 1 :], steps[0][depth + 1 :], run) > _BLOCK_BYTES_MAX:
        depth += 1
    count = max(1, _BLOCK_BYTES_MAX // max(1, steps[0][depth]))
    for index in itertools.product(*map(range, outer[:depth])):
        at = source + sum(i * step for i, step in zip(index, steps[0], strict=False))
        to = target + sum(i * step for i, step in zip(index, steps[1], strict=False))
        for first in range(0, outer[depth], count):
            number = min(count, outer[depth] - first)
            shape = (number, *outer[depth + 1 :])
            block = _Block(
                filling,
                _span(shape, steps[0][depth:], run),
                (*shape, run),
                tuple(steps[0][depth : len(outer)]),
                tuple(steps[1][depth : len(outer)]),
                to + first * steps[1][depth],
            )
            yield Want(at + first * steps[0][depth], block), prod(shape) * run


def _span(lengths: Sequence[int], steps: Sequence[int], run: int) -> int:
    """Returns the bytes from the first to the last byte of runs at regular steps."""
    return sum((length - 1) * step for length, step in zip(lengths, steps, strict=False)) + run


def _boxes(extent: Extent) -> list[Box]:
    """Returns boxes that together are a range of the elements of a box."""
    if extent.is_whole_box:
        return [extent.box]
    return _range_boxes(extent.box, extent.start, extent.stop)


def _range_boxes(box: Box, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not box or (start, stop) == (0, prod(lengths_of(box))):
        return [box]
    (low, _), rest = box[0], box[1:]
    row = prod(lengths_of(rest))
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = _range_boxes(rest, start - first * row, stop - first * row)
        return [((low + first, low + first + 1), *below) for below in inner]
    found: list[Box] = []
    if start % row:
        found += _range_boxes(box, start, (first + 1) * row)
        first += 1
    whole_rows = stop // row
    if first < whole_rows:
        found.append(((low + first, low + whole_rows), *rest))
    if stop % row:
        found += _range_boxes(box, whole_rows * row, stop)
    return found


def _steps(box: Box, item_bytes: int) -> list[int]:
    """Returns the bytes from index to index along each dimension of a box in its own memory."""
    lengths = lengths_of(box)
    return [prod(lengths[dimension + 1 :]) * item_bytes for dimension in range(len(box))]


def _offset(box: Box, within: Box, steps: Sequence[int]) -> int:
    return sum(
        (start - first) * step
        for (start, _), (first, _), step in zip(box, within, steps, strict=True)
    )


def _length(box: Box, dimension: int) -> int:
    start, stop = box[dimension]
    return stop - start
