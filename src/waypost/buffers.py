"""Bytes in motion: where they come from, where they go, and aligned memory to carry them."""

from __future__ import annotations

import mmap
from typing import Protocol


class Source(Protocol):
    """Bytes to be saved, in the order in which they are stored."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        ...

    def view(self) -> memoryview | None:
        """Returns all bytes where they lie, or None when they must be copied out."""
        ...

    def copy(self, start: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``start`` on."""
        ...


class Target(Protocol):
    """A place to be filled by a load."""

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        ...

    def view(self) -> memoryview:
        """Returns the memory to fill; the same at each call until :meth:`done`."""
        ...

    def done(self) -> None:
        """Called once, after every byte was filled and checked."""
        ...


class BytesSource:
    """Bytes that exist already.

    Args:
        data: A contiguous buffer of bytes; not copied.
    """

    def __init__(self, data: memoryview | bytes) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        """The buffer's length."""
        return len(self._view)

    def view(self) -> memoryview:
        """Returns the buffer."""
        return self._view

    def copy(self, start: int, out: memoryview) -> None:
        """Copies from the buffer."""
        out[:] = self._view[start : start + len(out)]


def aligned(size_bytes: int) -> memoryview:
    """Returns writable memory that starts at a page boundary and is freed with its last view."""
    return memoryview(mmap.mmap(-1, size_bytes))
