"""Bytes from a storage straight into their targets, each chunk checked before it counts.

A file is read in segments of whole chunks. Large targets are filled where they lie; small ones, and
bytes that nobody wants, go through memory of the worker's own. A target is done when all of its
bytes were read and checked.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from waypost import limits
from waypost.buffers import Target, aligned
from waypost.core import workers
from waypost.core.write import chunks_of
from waypost.errors import CorruptionError
from waypost.format.digests import Algorithm
from waypost.storage import ReadFile

_CACHED_BYTES = 512 * limits.KIB
"""Bytes read by one call: they are still in a core's cache when they are digested."""

_DIRECT_BYTES_MIN = 64 * limits.KIB
"""Targets below this are filled from the worker's memory, so that calls stay large."""


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes wanted from a file's data: from ``start`` on, as many as the target takes."""

    start: int
    target: Target


@dataclass(frozen=True, slots=True)
class FileRead:
    """What to read of one file.

    Attributes:
        name: The file, for messages.
        file: Open for reading.
        data_start: Where data begins in the file.
        data_bytes: How much data there is.
        chunk_bytes: Unit of digests.
        chunks: Raw digests, one after the other; empty to read without checking.
        algorithm: Of the digests.
        wants: What is wanted, in any order; may overlap.
        leaf_at: Returns the leaf that holds a byte of data, for messages.
    """

    name: str
    file: ReadFile
    data_start: int
    data_bytes: int
    chunk_bytes: int
    chunks: bytes
    algorithm: Algorithm
    wants: Sequence[Want]
    leaf_at: Callable[[int], str | None]


@dataclass(slots=True)
class _Open:
    """A target that is being filled."""

    want: Want
    remaining: int
    guard: threading.Lock = field(default_factory=threading.Lock)
    view: memoryview | None = None

    def memory(self) -> memoryview:
        with self.guard:
            if self.view is None:
                self.view = self.want.target.view()
            return self.view

    def finish(self, count: int) -> None:
        with self.guard:
            self.remaining -= count
            if self.remaining:
                return
            self.view = None
        self.want.target.done()


@dataclass(frozen=True, slots=True)
class _Segment:
    read: FileRead
    start: int
    stop: int
    parts: list[tuple[_Open, int, int]]
    """Target, and the range of file data that goes to it."""


def read_files(
    reads: Sequence[FileRead],
    *,
    threads: int,
    segment_bytes: int,
    advance: Callable[[int], None],
) -> int:
    """Fills every target and returns the bytes read from the storage.

    Args:
        reads: What to read.
        threads: How many work at it.
        segment_bytes: Bytes that one thread reads at a time.
        advance: Told of bytes read, from any thread; what it raises ends the reading.

    Raises:
        CorruptionError: A digest does not fit, or a file is shorter than it should be. Targets
            that were filled stay filled; the caller says so.
    """
    wanted = sum(want.target.nbytes for read in reads for want in read.wants)
    threads = 1 if wanted <= segment_bytes // 2 else threads
    counts: list[int] = []
    segments = (segment for read in reads for segment in _segments(read, segment_bytes))
    workers.run(segments, lambda: _Reader(segment_bytes, counts, advance).read, threads=threads)
    return sum(counts)


def _segments(read: FileRead, segment_bytes: int) -> Iterator[_Segment]:
    grain = read.chunk_bytes if read.chunks else 1
    segment_bytes = max(1, segment_bytes // grain) * grain
    current: _Segment | None = None
    for want in sorted(read.wants, key=lambda want: want.start):
        if not want.target.nbytes:
            want.target.done()
            continue
        target = _Open(want, want.target.nbytes)
        start, stop = want.start, want.start + want.target.nbytes
        while start < stop:
            first = start // grain * grain
            if current is not None and not (
                first <= current.stop and start - current.start < segment_bytes
            ):
                yield current
                current = None
            if current is None:
                current = _Segment(read, first, first, [])
            limit = current.start + segment_bytes
            end = min(stop, limit)
            current.parts.append((target, start, end))
            reach = min(-(-end // grain) * grain, read.data_bytes)
            if reach > current.stop:
                current = _Segment(read, current.start, reach, current.parts)
            start = end
            if start >= limit:
                yield current
                current = None
    if current is not None:
        yield current


class _Reader:
    """What one thread owns: its memory for bytes that do not go straight to a target."""

    def __init__(
        self, segment_bytes: int, counts: list[int], advance: Callable[[int], None]
    ) -> None:
        self._segment_bytes = segment_bytes
        self._advance = advance
        self._counts = counts
        self._memory: memoryview | None = None

    def read(self, segment: _Segment) -> None:
        """Reads one segment, checks it, and hands it to its targets."""
        views, copies = self._layout(segment)
        read = segment.read
        position = segment.start
        for parts in chunks_of(views, _call_bytes(read.chunk_bytes)):
            length = sum(map(len, parts))
            got = read.file.read(read.data_start + position, parts)
            self._counts.append(got)
            if got != length:
                raise _cut_off(read, position + got, length - got)
            if read.chunks:
                _check(read, position, parts)
            position += length
        for out, data in copies:
            out[:] = data
        for target, start, stop in segment.parts:
            target.finish(stop - start)
        self._advance(segment.stop - segment.start)

    def _layout(
        self, segment: _Segment
    ) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
        """Returns the views to read into, in file order, and the copies to make afterwards."""
        views: list[memoryview] = []
        copies: list[tuple[memoryview, memoryview]] = []
        position = segment.start
        is_shared = _overlap(segment.parts)
        for target, start, stop in segment.parts:
            at = start - target.want.start
            out = target.memory()[at : at + stop - start]
            if is_shared or stop - start < _DIRECT_BYTES_MIN:
                copies.append((out, self._scratch(segment, start, stop)))
                continue
            if start > position:
                views.append(self._scratch(segment, position, start))
            views.append(out)
            position = stop
        if segment.stop > position:
            views.append(self._scratch(segment, position, segment.stop))
        return views, copies

    def _scratch(self, segment: _Segment, start: int, stop: int) -> memoryview:
        """Returns the worker's memory for a range of the segment."""
        size_bytes = segment.stop - segment.start
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = aligned(max(size_bytes, self._segment_bytes))
        return self._memory[start - segment.start : stop - segment.start]


def _overlap(parts: Sequence[tuple[_Open, int, int]]) -> bool:
    """Tells whether any byte is wanted twice."""
    return any(later[1] < earlier[2] for earlier, later in itertools.pairwise(parts))


def _call_bytes(chunk_bytes: int) -> int:
    """Returns the bytes of one call: whole chunks, few enough to be digested from the cache."""
    return max(1, _CACHED_BYTES // chunk_bytes) * chunk_bytes


def _cut_off(read: FileRead, position: int, lacking: int) -> CorruptionError:
    leaf = read.leaf_at(position)
    offset = read.data_start + position
    return CorruptionError(
        f"{read.name}: ends {lacking} bytes early, at {offset}{_of_leaf(leaf)}",
        file=read.name,
        leaf=leaf,
        offset=offset,
    )


def _check(read: FileRead, position: int, views: Sequence[memoryview]) -> None:
    size = read.algorithm.size_bytes
    chunk = position // read.chunk_bytes
    for parts in chunks_of(views, read.chunk_bytes):
        actual = (
            read.algorithm.one_shot(parts[0]) if len(parts) == 1 else read.algorithm.over(parts)
        )
        if actual != read.chunks[chunk * size : (chunk + 1) * size]:
            leaf = read.leaf_at(chunk * read.chunk_bytes)
            offset = read.data_start + chunk * read.chunk_bytes
            raise CorruptionError(
                f"{read.name}: bytes {offset} to {offset + sum(map(len, parts))} are not what was "
                f"saved{_of_leaf(leaf)}: the digest of the chunk does not fit",
                file=read.name,
                leaf=leaf,
                offset=offset,
            )
        chunk += 1


def _of_leaf(leaf: str | None) -> str:
    return f" (leaf {leaf})" if leaf else ""
