"""The interface that every storage implements, and a location in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class Name:
    """One name in a folder."""

    name: str
    is_folder: bool


class WriteFile(Protocol):
    """A new data file; positions may be written in any order and from several threads.

    Attributes:
        alignment_bytes: Every offset, length and address given to :meth:`write` must be a multiple
            of this; 1 when anything goes. May fall to 1 while writing.
    """

    @property
    def alignment_bytes(self) -> int:
        """The alignment that :meth:`write` asks for, in bytes."""
        ...

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Writes all of ``buffers``, one after the other, from byte ``offset`` on."""
        ...

    def finish(self, size_bytes: int, *, durable: bool) -> None:
        """Sets the final size and, if ``durable``, returns only once every byte is on the medium.

        A failure is final: the file's content is unknown and must not be used.
        """
        ...

    def close(self) -> None:
        """Releases the file; what was written stays. May be called twice."""
        ...


class ReadFile(Protocol):
    """A file open for reading at positions, from several threads."""

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        ...

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills ``buffers`` from byte ``offset`` on; returns the bytes read, fewer at the end."""
        ...

    def close(self) -> None:
        """Releases the file. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Lock(Protocol):
    """A held lock; it also ends with the process that holds it."""

    def release(self) -> None:
        """Gives the lock up. May be called twice."""
        ...


class Storage(Protocol):
    """A tree of files. Paths are relative, with ``/``; the empty path is the root.

    All methods may be called from any thread. They raise
    :class:`~waypost.errors.NotFoundError`, :class:`~waypost.errors.AlreadyExistsError`,
    :class:`~waypost.errors.StorageFullError` or :class:`~waypost.errors.StorageError`.
    """

    def url(self, path: str) -> str:
        """Returns the URL of ``path``, for people and for :func:`waypost.storage.resolve`."""
        ...

    def make_folder(self, path: str, *, durable: bool) -> None:
        """Makes the folder and its parents; what is there already stays."""
        ...

    def create(self, path: str, size_bytes: int, *, direct: bool) -> WriteFile:
        """Returns a new data file that will hold ``size_bytes``; its folder must exist.

        Args:
            path: A path that nothing has.
            size_bytes: The final size, for preallocation.
            direct: Bypass the page cache where the storage can.
        """
        ...

    def settle(self, path: str) -> None:
        """Returns once the names in the folder are on the medium."""
        ...

    def publish(self, path: str, data: bytes, *, replace: bool, durable: bool) -> None:
        """Makes a small file appear whole or not at all.

        Args:
            path: Where. Its folder must exist.
            data: The content.
            replace: Replace what is there; otherwise what is there stays and
                :class:`~waypost.errors.AlreadyExistsError` is raised.
            durable: Return only once content and name are on the medium.

        Raises:
            CommitUnknownError: It could not be found out whether the file appeared.
        """
        ...

    def open(self, path: str) -> ReadFile:
        """Returns the file for reading."""
        ...

    def read(self, path: str, bytes_max: int) -> bytes:
        """Returns at most ``bytes_max`` + 1 bytes of a small file."""
        ...

    def size(self, path: str) -> int | None:
        """Returns the size of a file in bytes, or None when there is no file."""
        ...

    def list(self, path: str) -> list[Name]:
        """Returns the names in a folder, sorted; empty when there is no folder."""
        ...

    def remove(self, path: str) -> bool:
        """Removes a file; returns False when there was none."""
        ...

    def remove_folder(self, path: str) -> bool:
        """Removes an empty folder; returns False when it is gone already or not empty."""
        ...

    def free_bytes(self, path: str) -> int | None:
        """Returns the bytes that may still be written, or None when that is not known."""
        ...

    def lock(self, path: str) -> Lock | None:
        """Takes the lock of a folder or file, or returns None while it is held, by whomever.

        A file is made if it is not there. The lock ends with the process.
        """
        ...


@dataclass(frozen=True, slots=True)
class Location:
    """A path in a storage. Accepted wherever a URL is."""

    storage: Storage
    path: str = ""

    def __truediv__(self, piece: str) -> Location:
        """Returns the location of ``piece`` below this one."""
        return Location(self.storage, f"{self.path}/{piece}" if self.path else piece)

    @property
    def url(self) -> str:
        """The location's URL."""
        return self.storage.url(self.path)

    @property
    def name(self) -> str:
        """The last part of the path or URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The location of the folder that holds this one; within the storage only."""
        return Location(self.storage, self.path.rpartition("/")[0])
