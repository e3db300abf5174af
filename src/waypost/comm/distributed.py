"""Ranks of ``torch.distributed``: messages through its store, bulk bytes through gloo of our own.

No process group of the program is used, so nothing here can meet a collective of the training. The
store is the one that the process group was made with; keys live below a prefix of their own.
"""

from __future__ import annotations

import contextlib
import platform
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from waypost import limits
from waypost.comm.group import Channel, Exchange
from waypost.errors import CoordinationTimeoutError, PeerError
from waypost.format.shardings import Ranks

_ABSENT: Final = "\x01absent"
"""What a store answers, when asked to replace this by itself, for a name that it does not have."""


def is_running() -> bool:
    """Tells whether the program has a default process group."""
    return dist.is_available() and dist.is_initialized()


class DistributedGroup:
    """The ranks of a process group; see :class:`waypost.comm.group.Group`.

    Args:
        process_group: Of ``torch.distributed``; this process must belong to it.
    """

    def __init__(self, process_group: Any) -> None:
        members = dist.get_process_group_ranks(process_group)
        is_all = members == list(range(len(members)))
        self.ranks = Ranks(
            rank=dist.get_rank(process_group),
            world_size=len(members),
            members=None if is_all else tuple(members),
        )
        self._store = _store_of(process_group)
        self.channel: Channel = StoreChannel(self._store)
        self.opened = 0
        self.leftovers: list[str] = []
        self._exchange: _GlooExchange | None = None
        self.channel.add(self._key_of_machine, 1)

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes the group has."""
        return self.ranks.world_size

    def local_size(self) -> int:
        """Returns how many of the ranks are on this machine; each counts itself when it begins."""
        return self.channel.add(self._key_of_machine, 0)

    @property
    def _key_of_machine(self) -> str:
        return f"machine/{platform.node()}"

    def reach(self, phase: str) -> None:
        """Does nothing."""

    @property
    def exchange_name(self) -> str:
        """The connections that are open; they are kept, since gloo does not give them back."""
        return "" if self._exchange is None else self._exchange.name

    def exchange(self, name: str, timeout_s: float) -> Exchange:
        """Returns bulk exchange over TCP."""
        if self._exchange is None or self._exchange.name != name:
            self.drop_exchange()
            self._exchange = _GlooExchange(self._store, name, self.ranks, timeout_s)
        return self._exchange

    def drop_exchange(self) -> None:
        """Shuts the connections down."""
        if self._exchange is not None:
            self._exchange.shut_down()
            self._exchange = None


_GROUPS: weakref.WeakKeyDictionary[Any, DistributedGroup] = weakref.WeakKeyDictionary()
"""One group for each process group, since it counts the calls that all its ranks have made."""


def group_for(process_group: Any = None) -> DistributedGroup:
    """Returns the group for a process group; the default one if None."""
    chosen = dist.group.WORLD if process_group is None else process_group
    if chosen not in _GROUPS:
        _GROUPS[chosen] = DistributedGroup(chosen)
    return _GROUPS[chosen]


class StoreChannel:
    """A channel through a store of ``torch.distributed``.

    Args:
        store: Shared by all ranks.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def now(self) -> float:
        """Returns the system's monotonic time."""
        return time.monotonic()

    def set(self, key: str, value: bytes) -> None:
        """Stores the value."""
        with _connection():
            self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """Looks until all are there; see :class:`waypost.comm.group.Channel`."""
        names = list(keys)
        with _connection():
            self._wait_for_all(names, timeout_s)
            found = {name: self._look(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def add(self, key: str, count: int) -> int:
        """Adds to the store's counter."""
        with _connection():
            return int(self._store.add(key, count))

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys from the store."""
        with _connection():
            for key in keys:
                self._store.delete_key(key)

    def _look(self, name: str) -> bytes | None:
        """Returns a value without ever waiting for it: another rank may just have removed it."""
        found = bytes(self._store.compare_set(name, _ABSENT, _ABSENT))
        return None if found == _ABSENT.encode() else found

    def _wait_for_all(self, names: list[str], timeout_s: float) -> None:
        # Looked at again and again, and not waited for in the store: that would keep every other
        # thread from the connection, and has its time-outs printed.
        deadline_s = time.monotonic() + timeout_s
        pause_s = limits.POLL_S
        while timeout_s > 0 and not self._store.check(names):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, limits.POLL_S_MAX)


class _GlooExchange:
    """Pairwise bulk messages through a gloo group that nobody else uses."""

    def __init__(self, store: Any, name: str, ranks: Ranks, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        with _connection():
            self._gloo: Any = dist.ProcessGroupGloo(
                PrefixStore(f"{name}/exchange", store),
                ranks.rank,
                ranks.world_size,
                timedelta(seconds=timeout_s),
            )

    def send(self, data: memoryview, rank: int) -> None:
        """Sends to one rank."""
        self._do(self._gloo.send, data, rank)

    def receive(self, data: memoryview, rank: int) -> None:
        """Receives from one rank."""
        self._do(self._gloo.recv, data, rank)

    def shut_down(self) -> None:
        """Drops the connections."""
        with contextlib.suppress(RuntimeError, AttributeError):
            self._gloo.shutdown()

    def _do(self, act: Any, data: memoryview, rank: int) -> None:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        try:
            act([tensor], rank, 0).wait()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if "imed out" in text:
                raise CoordinationTimeoutError(
                    f"rank {rank} did not exchange data within {self._timeout_s:g} s (timeout_s)",
                    (rank,),
                ) from error
            raise PeerError(
                f"rank {rank} is gone: the connection to it broke ({text})",
                {rank: f"ConnectionError: {text}"},
            ) from error


class _connection:  # noqa: N801 - reads as a block of code that needs the connection
    """Turns a broken connection to the store into the error that says what it means."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (dist.DistError, ConnectionError)):
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerError(
                f"the store of the process group cannot be reached ({text}); the process that "
                f"holds it, rank 0 or the launcher, is gone",
                {0: f"{type(error).__name__}: {text}"},
            ) from error


def _store_of(process_group: Any) -> Any:
    """Returns the store that the ranks of a process group share, below a prefix of its own."""
    _, store = dist.distributed_c10d._world.pg_map[process_group]
    return PrefixStore("waypost", store)
