"""A storage that behaves, until the call that was chosen.

Wrap any URL with :func:`faulty`, count its calls once, then run the same action again for each of
them: with an error, a torn write, a lost answer, or the end of the process.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from waypost.storage import Location, Name, ReadFile, Storage, WriteFile, failures, resolve
from waypost.storage.base import Lock
from waypost.storage.urls import Url

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        call: The number of the call, from 1, among those of kind ``op``.
        op: The kind of call (``"make_folder"``, ``"create"``, ``"write"``, ``"finish"``,
            ``"settle"``, ``"publish"``, ``"open"``, ``"read"``, ``"read_at"``, ``"size"``,
            ``"list"``, ``"remove"``, ``"remove_folder"``, ``"free_bytes"``, ``"lock"``); any if
            None. ``"sync"`` stands for ``finish`` and ``settle``.
        action: ``"error"`` instead of the call, ``"after"`` it, ``"short"`` after half of a write,
            or ``"kill"`` the process instead of the call.
        errno: The system's error number.
        and_later: All later calls of the kind fail too.
    """

    call: int
    op: str | None = None
    action: Literal["error", "after", "short", "kill"] = "error"
    errno: int = errno.EIO
    and_later: bool = False


class FaultyStorage:
    """A storage that counts calls and, at one of them, does what a fault says.

    Args:
        inner: The storage that does the work.
        fault: None only counts.
    """

    def __init__(self, inner: Storage, fault: Fault | None = None) -> None:
        self._inner = inner
        self._fault = fault
        self._guard = threading.Lock()
        self._matching = 0
        self.calls: list[str] = []

    def url(self, path: str) -> str:
        return self._inner.url(path)

    def make_folder(self, path: str, *, durable: bool) -> None:
        self.call("make_folder", path, lambda: self._inner.make_folder(path, durable=durable))

    def create(self, path: str, size_bytes: int, *, direct: bool) -> WriteFile:
        def create() -> WriteFile:
            return self._inner.create(path, size_bytes, direct=direct)

        return _FaultyWriteFile(self, path, self.call("create", path, create))

    def settle(self, path: str) -> None:
        self.call("settle", path, lambda: self._inner.settle(path))

    def publish(self, path: str, data: bytes, *, replace: bool, durable: bool) -> None:
        self.call(
            "publish",
            path,
            lambda: self._inner.publish(path, data, replace=replace, durable=durable),
        )

    def open(self, path: str) -> ReadFile:
        return _FaultyReadFile(self, path, self.call("open", path, lambda: self._inner.open(path)))

    def read(self, path: str, bytes_max: int) -> bytes:
        return self.call("read", path, lambda: self._inner.read(path, bytes_max))

    def size(self, path: str) -> int | None:
        return self.call("size", path, lambda: self._inner.size(path))

    def list(self, path: str) -> list[Name]:
        return self.call("list", path, lambda: self._inner.list(path))

    def remove(self, path: str) -> bool:
        return self.call("remove", path, lambda: self._inner.remove(path))

    def remove_folder(self, path: str) -> bool:
        return self.call("remove_folder", path, lambda: self._inner.remove_folder(path))

    def free_bytes(self, path: str) -> int | None:
        return self.call("free_bytes", path, lambda: self._inner.free_bytes(path))

    def lock(self, path: str) -> Lock | None:
        return self.call("lock", path, lambda: self._inner.lock(path))

    def call(
        self,
        op: str,
        path: str,
        action: Callable[[], _Result],
        half: Callable[[], object] | None = None,
    ) -> _Result:
        """Counts a call and carries it out, or not."""
        fault = self._fault
        if not self._is_hit(op) or fault is None:
            return action()
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "after":
            action()
        if fault.action == "short" and half is not None:
            half()
        error = OSError(fault.errno, os.strerror(fault.errno))
        failures.fail(error, op, self._inner.url(path), needed_bytes=1, free_bytes=0)

    def _is_hit(self, op: str) -> bool:
        with self._guard:
            self.calls.append(op)
            fault = self._fault
            if fault is None or not _is_of_kind(op, fault.op):
                return False
            self._matching += 1
            return self._matching == fault.call or (fault.and_later and self._matching > fault.call)


@dataclass(frozen=True)
class FaultyLocation(Location):
    """A location in a :class:`FaultyStorage`; usable as a context manager."""

    @property
    def calls(self) -> list[str]:
        """The kinds of all calls so far."""
        storage = self.storage
        if not isinstance(storage, FaultyStorage):
            raise TypeError("not a location in a FaultyStorage")
        return storage.calls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Does nothing."""


def faulty(url: Url, fault: Fault | None = None) -> FaultyLocation:
    """Returns a location for ``url``, accepted wherever a URL is, where ``fault`` will happen."""
    location = resolve(url)
    return FaultyLocation(FaultyStorage(location.storage, fault), location.path)


def _is_of_kind(op: str, kind: str | None) -> bool:
    return kind is None or op == kind or (kind == "sync" and op in ("finish", "settle"))


class _FaultyWriteFile:
    def __init__(self, storage: FaultyStorage, path: str, inner: WriteFile) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @property
    def alignment_bytes(self) -> int:
        return self._inner.alignment_bytes

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        def half() -> None:
            whole = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
            if self._inner.alignment_bytes == 1:
                self._inner.write(offset, [whole[: len(whole) // 2]])

        self._storage.call("write", self._path, lambda: self._inner.write(offset, buffers), half)

    def finish(self, size_bytes: int, *, durable: bool) -> None:
        self._storage.call(
            "finish", self._path, lambda: self._inner.finish(size_bytes, durable=durable)
        )

    def close(self) -> None:
        self._inner.close()


class _FaultyReadFile:
    def __init__(self, storage: FaultyStorage, path: str, inner: ReadFile) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        return self._storage.call("read_at", self._path, lambda: self._inner.read(offset, buffers))

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
