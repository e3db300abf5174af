"""Files on their way to a storage, digested while their bytes are in a core's cache.

Each worker carries one segment at a time: gather it into aligned memory, or leave it where it lies
if the storage does not ask for alignment; digest it chunk by chunk; write it. With several workers
some copy and digest while another waits for the disk. Extra memory: one segment for each worker.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from waypost import limits
from waypost.buffers import aligned
from waypost.core import workers
from waypost.core.plan import FilePlan, Stored
from waypost.format.digests import Algorithm
from waypost.format.documents import DataFile
from waypost.options import Settings
from waypost.storage import Location, WriteFile

_DIRECT_BYTES_MIN = 4 * limits.MIB
"""Below this, a file is written through the page cache: one call and one sync."""

_GATHER_BYTES_MAX = 64 * limits.KIB
"""Pieces up to this size are copied together; larger ones are written from where they lie."""


@dataclass(slots=True)
class _Progress:
    """A file being written: what is left, and the digests so far."""

    plan: FilePlan
    file: WriteFile
    remaining: int
    digests: list[bytes]
    guard: threading.Lock
    header_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Segment:
    progress: _Progress
    start: int
    stop: int
    first_piece: int


def write_files(
    folder: Location,
    plans: Sequence[FilePlan],
    algorithm: Algorithm,
    settings: Settings,
    advance: Callable[[int], None],
) -> list[DataFile]:
    """Writes all files and returns their records; if durable, every byte is on the medium.

    Args:
        folder: An existing folder.
        plans: The files.
        algorithm: For the digests.
        settings: Threads, segment size, direct I/O, durability.
        advance: Told of bytes written, from any thread; what it raises ends the writing.

    Raises:
        StorageError: A write or a sync failed; some files may be there in part.
    """
    begun: list[_Progress] = []
    total = sum(plan.data_bytes for plan in plans)
    threads = 1 if total <= settings.segment_bytes // 2 else settings.workers
    try:
        workers.run(
            _segments(folder, plans, settings, begun),
            lambda: _Writer(algorithm, settings, advance).write,
            threads=threads,
        )
    finally:
        for progress in begun:
            progress.file.close()
    return [_record(progress, algorithm) for progress in begun]


def _segments(
    folder: Location, plans: Sequence[FilePlan], settings: Settings, begun: list[_Progress]
) -> Iterator[_Segment]:
    for plan in plans:
        direct = settings.direct_io and plan.data_bytes >= _DIRECT_BYTES_MIN
        path = (folder / plan.name).path
        file = folder.storage.create(path, plan.nbytes, direct=direct)
        count = -(-plan.data_bytes // limits.CHUNK_BYTES)
        starts = range(0, plan.data_bytes, settings.segment_bytes) or range(1)
        progress = _Progress(plan, file, len(starts), [b""] * count, threading.Lock())
        begun.append(progress)
        piece = 0
        for start in starts:
            stop = min(start + settings.segment_bytes, plan.data_bytes)
            yield _Segment(progress, start, stop, piece)
            while piece < len(plan.pieces) and plan.pieces[piece].stop <= stop:
                piece += 1


class _Writer:
    """What one thread owns: its memory for one segment."""

    def __init__(
        self, algorithm: Algorithm, settings: Settings, advance: Callable[[int], None]
    ) -> None:
        self._algorithm = algorithm
        self._settings = settings
        self._advance = advance
        self._memory: memoryview | None = None

    def write(self, segment: _Segment) -> None:
        """Writes one segment; the last one of a file also finishes the file."""
        progress = segment.progress
        plan = progress.plan
        if segment.start == 0:
            self._write_header(progress)
        if segment.stop > segment.start:
            alignment = progress.file.alignment_bytes
            views = self._gather(segment) if alignment > 1 else self._collect(segment)
            self._digest(segment, views)
            padding = -(segment.stop - segment.start) % alignment
            if padding:
                views = [self._buffer()[: segment.stop - segment.start + padding]]
            progress.file.write(len(plan.header) + segment.start, views)
        self._advance(segment.stop - segment.start)
        with progress.guard:
            progress.remaining -= 1
            is_last = progress.remaining == 0
        if is_last:
            progress.file.finish(plan.nbytes, durable=self._settings.durable)
            progress.file.close()

    def _write_header(self, progress: _Progress) -> None:
        header = progress.plan.header
        progress.header_digest = self._algorithm.one_shot(header)
        if progress.file.alignment_bytes == 1:
            progress.file.write(0, [header])
            return
        buffer = self._buffer()
        for start in range(0, len(header), len(buffer)):
            piece = header[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            progress.file.write(start, [buffer[: len(piece)]])

    def _buffer(self) -> memoryview:
        if self._memory is None:
            self._memory = aligned(self._settings.segment_bytes)
        return self._memory

    def _gather(self, segment: _Segment) -> list[memoryview]:
        """Copies the segment into aligned memory."""
        buffer = self._buffer()
        for piece, start, stop in _parts(segment):
            at = piece.start + start - segment.start
            piece.source.copy(start, buffer[at : at + stop - start])
        return [buffer[: segment.stop - segment.start]]

    def _collect(self, segment: _Segment) -> list[memoryview]:
        """Returns the segment's bytes as views: large pieces in place, small ones together."""
        views: list[memoryview] = []
        used = flushed = 0
        for piece, start, stop in _parts(segment):
            whole = piece.source.view() if stop - start > _GATHER_BYTES_MAX else None
            if whole is not None:
                if used > flushed:
                    views.append(self._buffer()[flushed:used])
                    flushed = used
                views.append(whole[start:stop])
                continue
            piece.source.copy(start, self._buffer()[used : used + stop - start])
            used += stop - start
        if used > flushed:
            views.append(self._buffer()[flushed:used])
        return views

    def _digest(self, segment: _Segment, views: list[memoryview]) -> None:
        digests = segment.progress.digests
        chunk = segment.start // limits.CHUNK_BYTES
        for parts in chunks_of(views, limits.CHUNK_BYTES):
            digests[chunk] = (
                self._algorithm.one_shot(parts[0])
                if len(parts) == 1
                else self._algorithm.over(parts)
            )
            chunk += 1


def chunks_of(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Yields the parts of each chunk of the concatenated ``views``, without copying."""
    parts: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        position = 0
        while position < len(view):
            part = view[position : position + room]
            parts.append(part)
            position += len(part)
            room -= len(part)
            if not room:
                yield parts
                parts = []
                room = chunk_bytes
    if parts:
        yield parts


def _parts(segment: _Segment) -> Iterator[tuple[Stored, int, int]]:
    """Yields each piece in the segment with the range of its own bytes that lies there."""
    pieces = segment.progress.plan.pieces
    for number in range(segment.first_piece, len(pieces)):
        piece = pieces[number]
        if piece.start >= segment.stop:
            return
        start = max(piece.start, segment.start) - piece.start
        stop = min(piece.stop, segment.stop) - piece.start
        if stop > start:
            yield piece, start, stop


def _record(progress: _Progress, algorithm: Algorithm) -> DataFile:
    plan = progress.plan
    chunks = b"".join(progress.digests)
    return DataFile(
        name=plan.name,
        entry=plan.entry,
        bytes=plan.nbytes,
        data_start=len(plan.header),
        header=algorithm.text(progress.header_digest),
        chunks=base64.b64encode(chunks).decode("ascii"),
        digest=algorithm.text(algorithm.over([progress.header_digest, chunks])),
    )
