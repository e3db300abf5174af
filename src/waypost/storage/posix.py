"""System calls that ``os`` lacks or that need a fallback where a platform has none."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import weakref
from collections.abc import Sequence
from typing import Final

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]  # tested for None before use

DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_NO_FOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)
_CLOSE_ON_EXEC: Final[int] = getattr(os, "O_CLOEXEC", 0)
_NO_WAIT: Final[int] = getattr(os, "O_NONBLOCK", 0)
"""A pipe where a file should be must not block the open."""
_BINARY: Final[int] = getattr(os, "O_BINARY", 0)
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
"""What file systems without locks answer, and network ones about folders; nobody is kept out."""
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)


def open_new(path: str, flags: int = 0) -> int:
    """Returns a descriptor of a new file, for writing; its mode follows the umask."""
    return os.open(
        path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _CLOSE_ON_EXEC | _BINARY | flags, 0o666
    )


def open_to_read(path: str) -> int:
    """Returns a descriptor for reading; a link in the last place is refused."""
    return os.open(path, os.O_RDONLY | _NO_FOLLOW | _NO_WAIT | _CLOSE_ON_EXEC | _BINARY)


def write_new(path: str, data: bytes, *, mode: int | None, sync: bool) -> None:
    """Writes a new file whole; gives it ``mode`` if that is not None."""
    descriptor = open_new(path)
    try:
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_new(source: str, target: str) -> None:
    """Gives ``source`` the name ``target``; fails with EEXIST if that is there.

    Where hard links do not exist, ``renameat2`` without replacement is used, and where that does
    not either, a look before an ordinary rename.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(source, target)


def _rename_new(source: str, target: str) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):
            failed = libc.renameat2(
                _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
            )
            number = ctypes.get_errno() if failed else 0
            if not number:
                return
            if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise OSError(number, os.strerror(number), target)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)


def sync_folder(folder: str) -> None:
    """Syncs the names in ``folder``, where the platform can."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOSE_ON_EXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def sync_data(descriptor: int) -> None:
    """Returns once the file's data and size are on the medium."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # pragma: no cover - macOS, Windows
        os.fsync(descriptor)


def preallocate(descriptor: int, size_bytes: int) -> None:
    """Reserves room for ``size_bytes`` where the file system can do that cheaply.

    Raises:
        OSError: There is no room.
    """
    if not hasattr(os, "posix_fallocate") or not size_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
            raise


def write_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Writes some of ``buffers`` at ``offset``; returns the bytes written, perhaps fewer."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, buffers, offset)
    return os.pwrite(descriptor, buffers[0], offset)  # pragma: no cover


def read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Reads into ``buffers`` from ``offset``; returns the bytes read, perhaps fewer."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    data = os.pread(descriptor, len(buffers[0]), offset)  # pragma: no cover
    buffers[0][: len(data)] = data  # pragma: no cover
    return len(data)  # pragma: no cover


def free_bytes(path: str) -> int:
    """Returns the bytes that the file system of ``path`` has left for this user."""
    if hasattr(os, "statvfs"):
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
    return shutil.disk_usage(path).free  # pragma: no cover


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
"""Locks that this process holds, to be let go of in a forked child."""


class FileLock:
    """A lock of an open file description: gone when the process is gone.

    A forked child would hold it too, so it closes its copy of the descriptor as it starts.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _locks.add(self)

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Gives the lock up; in a forked child, which does not have it, does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                os.close(descriptor)


def lock(path: str) -> FileLock | None:
    """Takes the lock of a folder, or of a file, which is made if it is not there.

    Returns None while anybody holds it.
    """
    if os.path.isdir(path):
        descriptor = os.open(path, os.O_RDONLY | _CLOSE_ON_EXEC | _NO_FOLLOW)
    else:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _CLOSE_ON_EXEC | _NO_FOLLOW, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        if error.errno in _NO_LOCKS:
            return FileLock(-1)
        raise
    return FileLock(descriptor)


def _let_go_in_child() -> None:
    for held in list(_locks):
        held.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
