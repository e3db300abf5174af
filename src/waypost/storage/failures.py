"""Operating system errors, turned into the library's own."""

from __future__ import annotations

import errno
from typing import NoReturn

from waypost.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    StorageFullError,
)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
RETRYABLE = frozenset(
    {errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EIO}
)


def fail(
    error: OSError, action: str, path: str, *, needed_bytes: int = 0, free_bytes: int | None = None
) -> NoReturn:
    """Raises the library's error for ``error``.

    Args:
        error: What the system said.
        action: What was being done, such as ``"write"``.
        path: Where.
        needed_bytes: Bytes that were to be written, for errors about space.
        free_bytes: Bytes that are free, if known.
    """
    number = error.errno or errno.EIO
    reason = error.strerror or str(error)
    message = f"cannot {action} {path}: {reason} ({errno.errorcode.get(number, number)})"
    if number == errno.ENOENT:
        raise NotFoundError(message) from error
    if number == errno.EEXIST:
        raise AlreadyExistsError(message) from error
    if number in FULL:
        raise full(
            message, path, needed_bytes=needed_bytes, free_bytes=free_bytes, number=number
        ) from error
    raise StorageError(message, number=number, retryable=number in RETRYABLE, path=path) from error


def full(
    message: str,
    path: str,
    *,
    needed_bytes: int,
    free_bytes: int | None,
    number: int = errno.ENOSPC,
) -> StorageFullError:
    """Returns the error for a storage without room, with the figures and what to do."""
    free = "unknown" if free_bytes is None else f"{free_bytes:,} bytes"
    return StorageFullError(
        f"{message}. Needed {needed_bytes:,} bytes, free {free}. Earlier snapshots are untouched; "
        f"free some space or keep fewer snapshots, then save again",
        number=number,
        path=path,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
    )
