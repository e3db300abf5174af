"""A storage in this process's memory, for tests, notebooks and the fastest tier."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from waypost.errors import AlreadyExistsError, ClosedError, NotFoundError
from waypost.storage.base import Lock, Name, ReadFile, WriteFile

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryStorage:
    """A tree of files in memory, with the same behaviour as one on disk.

    Args:
        name: The part of the URL after ``memory://``.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._guard = threading.RLock()
        self._files: dict[str, bytearray] = {}
        self._folders: set[str] = {""}
        self._locks: set[str] = set()

    def __repr__(self) -> str:
        return f"MemoryStorage({self._name!r})"

    def url(self, path: str) -> str:
        """Returns ``memory://name/path``."""
        return f"memory://{self._name}/{path}" if path else f"memory://{self._name}"

    def make_folder(self, path: str, *, durable: bool) -> None:
        """Makes the folder and its parents."""
        pieces = path.split("/") if path else []
        with self._guard:
            for depth in range(1, len(pieces) + 1):
                folder = "/".join(pieces[:depth])
                if folder in self._files:
                    raise AlreadyExistsError(
                        f"cannot make the folder {self.url(folder)}: a file is there"
                    )
                self._folders.add(folder)

    def create(self, path: str, size_bytes: int, *, direct: bool) -> WriteFile:
        """Returns a new file of ``size_bytes`` zeros."""
        with self._guard:
            self._check_new(path)
            content = self._files[path] = bytearray(size_bytes)
        return MemoryWriteFile(content)

    def settle(self, path: str) -> None:
        """Does nothing: memory is never more durable than its process."""

    def publish(self, path: str, data: bytes, *, replace: bool, durable: bool) -> None:
        """Makes the file appear whole."""
        with self._guard:
            if not replace or path not in self._files:
                self._check_new(path)
            self._files[path] = bytearray(data)

    def open(self, path: str) -> ReadFile:
        """Returns the file for reading."""
        with self._guard:
            content = self._files.get(path)
        if content is None:
            raise NotFoundError(f"cannot open {self.url(path)}: no such file")
        return MemoryReadFile(content)

    def read(self, path: str, bytes_max: int) -> bytes:
        """Returns a copy of a small file."""
        with self._guard:
            content = self._files.get(path)
            if content is None:
                raise NotFoundError(f"cannot open {self.url(path)}: no such file")
            return bytes(content[: bytes_max + 1])

    def size(self, path: str) -> int | None:
        """Returns the file's size."""
        with self._guard:
            content = self._files.get(path)
            return None if content is None else len(content)

    def list(self, path: str) -> list[Name]:
        """Returns the names directly below ``path``."""
        prefix = f"{path}/" if path else ""
        found: dict[str, bool] = {}
        with self._guard:
            for names, is_folder in ((self._folders, True), (self._files, False)):
                below = (name[len(prefix) :] for name in names if name.startswith(prefix))
                found |= {rest: is_folder for rest in below if rest and "/" not in rest}
        return [Name(name, is_folder) for name, is_folder in sorted(found.items())]

    def remove(self, path: str) -> bool:
        """Removes a file."""
        with self._guard:
            return self._files.pop(path, None) is not None

    def remove_folder(self, path: str) -> bool:
        """Removes an empty folder."""
        with self._guard:
            if path not in self._folders or not path or self.list(path):
                return False
            self._folders.remove(path)
            return True

    def free_bytes(self, path: str) -> int | None:
        """Returns None: the system's memory is not counted."""
        return None

    def lock(self, path: str) -> Lock | None:
        """Takes the lock, unless it is held."""
        with self._guard:
            if path in self._locks:
                return None
            self._locks.add(path)
        return MemoryLock(self._locks, path)

    def _check_new(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            raise NotFoundError(f"cannot create {self.url(path)}: its folder does not exist")
        if path in self._files or path in self._folders:
            raise AlreadyExistsError(f"cannot create {self.url(path)}: it exists")


class MemoryLock:
    """A name in the storage's table of locks."""

    def __init__(self, table: set[str], path: str) -> None:
        self._table = table
        self._path: str | None = path

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Takes the name out of the table."""
        if self._path is not None:
            self._table.discard(self._path)
            self._path = None


class MemoryWriteFile:
    """A file in memory, open for writing."""

    def __init__(self, content: bytearray) -> None:
        self._content: bytearray | None = content

    @property
    def alignment_bytes(self) -> int:
        """1: anything goes."""
        return 1

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Copies ``buffers`` to ``offset``."""
        if self._content is None:
            raise ClosedError("write to a closed file")
        with memoryview(self._content) as content:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                content[offset : offset + len(view)] = view
                offset += len(view)

    def finish(self, size_bytes: int, *, durable: bool) -> None:
        """Sets the size."""
        if self._content is None:
            raise ClosedError("finish of a closed file")
        del self._content[size_bytes:]

    def close(self) -> None:
        """Releases the file."""
        self._content = None


class MemoryReadFile:
    """A file in memory, open for reading."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    @property
    def size_bytes(self) -> int:
        """The file's size."""
        return len(self._content)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Copies bytes into ``buffers``."""
        total = 0
        for buffer in buffers:
            view = buffer.cast("B") if buffer.ndim != 1 or buffer.format != "B" else buffer
            piece = self._content[offset + total : offset + total + len(view)]
            view[: len(piece)] = piece
            total += len(piece)
        return total

    def close(self) -> None:
        """Does nothing; the content stays in the storage."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
