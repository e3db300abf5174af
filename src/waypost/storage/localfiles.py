"""Data files of a local file system, open for writing or reading at positions."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from waypost import limits
from waypost.storage import failures, posix

if TYPE_CHECKING:
    from typing_extensions import Buffer


class LocalWriteFile:
    """A new file. Direct I/O is used if the file system takes it, and given up if it does not.

    Args:
        path: An absolute path that nothing has.
        size_bytes: The final size, reserved at once.
        direct: Try direct I/O.
    """

    def __init__(self, path: str, size_bytes: int, *, direct: bool) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._direct = bool(direct and posix.DIRECT)
        self._descriptor = -1
        try:
            self._descriptor = self._open()
            if self._direct:
                posix.preallocate(self._descriptor, size_bytes)
        except OSError as error:
            self.close()
            self._fail(error, "create")

    def _open(self) -> int:
        if self._direct:
            try:
                return posix.open_new(self._path, posix.DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            self._direct = False
            if os.path.lexists(self._path):  # some systems create it before they refuse the flag
                os.unlink(self._path)
        return posix.open_new(self._path)

    @property
    def alignment_bytes(self) -> int:
        """4096 while direct I/O is in use, else 1."""
        return limits.DATA_ALIGNMENT_BYTES if self._direct else 1

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Writes all of ``buffers`` from ``offset`` on, however often the system writes short."""
        rest = [view for view in map(_bytes_of, buffers) if len(view)]
        try:
            while rest:
                written = self._write_some(rest[: limits.VECTOR_BUFFERS_MAX], offset)
                offset += written
                _consume(rest, written)
        except OSError as error:
            self._fail(error, "write")

    def _write_some(self, buffers: list[memoryview], offset: int) -> int:
        if self._direct and offset % limits.DATA_ALIGNMENT_BYTES:
            self._leave_direct()  # after a short write the rest is no longer aligned
        try:
            written = posix.write_at(self._descriptor, buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._leave_direct()
            written = posix.write_at(self._descriptor, buffers, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        return written

    def _leave_direct(self) -> None:
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~posix.DIRECT)
        self._direct = False

    def finish(self, size_bytes: int, *, durable: bool) -> None:
        """Cuts off the padding of the last aligned write, then syncs."""
        try:
            os.ftruncate(self._descriptor, size_bytes)
            if durable:
                posix.sync_data(self._descriptor)
        except OSError as error:
            self._fail(error, "sync" if durable else "finish")

    def close(self) -> None:
        """Closes the descriptor."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _fail(self, error: OSError, action: str) -> None:
        try:
            free_bytes = posix.free_bytes(os.path.dirname(self._path))
        except OSError:
            free_bytes = None
        failures.fail(
            error, action, self._path, needed_bytes=self._size_bytes, free_bytes=free_bytes
        )


class LocalReadFile:
    """A regular file, open for reading.

    Args:
        path: An absolute path; a link in the last place is refused.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        try:
            self._descriptor = posix.open_to_read(path)
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
        except OSError as error:
            self.close()
            if error.errno == errno.ENOTDIR:
                error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            failures.fail(error, "open", path)
        self._size_bytes = found.st_size

    @property
    def size_bytes(self) -> int:
        """The size when the file was opened."""
        return self._size_bytes

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills ``buffers``, however often the system reads short; fewer bytes at the end."""
        rest = [view for view in map(_bytes_of, buffers) if len(view)]
        total = 0
        try:
            while rest:
                got = posix.read_at(
                    self._descriptor, rest[: limits.VECTOR_BUFFERS_MAX], offset + total
                )
                if got == 0:
                    break
                total += got
                _consume(rest, got)
        except OSError as error:
            failures.fail(error, "read", self._path)
        return total

    def close(self) -> None:
        """Closes the descriptor."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _consume(buffers: list[memoryview], count: int) -> None:
    """Drops the first ``count`` bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]
