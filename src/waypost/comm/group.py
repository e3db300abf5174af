"""The group of ranks that save and load together, as the rest of Waypost sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from waypost.format.shardings import Ranks


class Channel(Protocol):
    """Small messages between ranks under names that are used once; safe to call from any thread."""

    def now(self) -> float:
        """Returns seconds on the clock that the waits of this channel go by."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Makes ``value`` visible to all ranks."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """Returns the values of ``keys`` once all are there, or of those that are in time."""
        ...

    def add(self, key: str, count: int) -> int:
        """Adds to a counter, which starts at 0, and returns what it is then."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys; those that are not there are no error."""
        ...


class Exchange(Protocol):
    """Bulk bytes between pairs of ranks, in the order in which both sides ask for them."""

    def send(self, data: memoryview, rank: int) -> None:
        """Returns once ``rank`` has ``data``, or is sure to get it."""
        ...

    def receive(self, data: memoryview, rank: int) -> None:
        """Fills ``data`` with the next message from ``rank``, which has the same length."""
        ...


class Group(Protocol):
    """Who takes part in a save or load.

    Attributes:
        ranks: This process among them.
        channel: For small messages.
        opened: How many collective calls this process has seen begin; kept here, because it must
            outlive each of them.
        leftovers: Keys of calls that failed. Rank 0 removes them after the next that succeeds,
            another rank removes its own when it begins another.
    """

    ranks: Ranks
    channel: Channel
    opened: int
    leftovers: list[str]

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes take part."""
        ...

    def local_size(self) -> int:
        """Returns how many of the ranks are on this machine, once all have begun a call."""
        ...

    def reach(self, phase: str) -> None:
        """Called at the begin of each phase of a collective call; tests put faults here."""
        ...

    @property
    def exchange_name(self) -> str:
        """The exchange that is open from an earlier call; empty if none."""
        ...

    def exchange(self, name: str, timeout_s: float) -> Exchange:
        """Returns a way to exchange bulk bytes; collective.

        Args:
            name: Of the one that is open on all ranks, or unique to this call.
            timeout_s: Longest wait for one message.
        """
        ...

    def drop_exchange(self) -> None:
        """Closes the exchange that is open: a call has failed, and messages may be left in it."""
        ...


class Solo:
    """A process on its own, which agrees with itself."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.channel: Channel = _NoChannel()
        self.opened = 0
        self.leftovers: list[str] = []

    @property
    def rank(self) -> int:
        """Zero."""
        return 0

    @property
    def world_size(self) -> int:
        """One."""
        return 1

    def local_size(self) -> int:
        """Returns one."""
        return 1

    def reach(self, phase: str) -> None:
        """Does nothing."""

    @property
    def exchange_name(self) -> str:
        """None is open."""
        return ""

    def exchange(self, name: str, timeout_s: float) -> Exchange:
        """Is never called: there is nobody to exchange with."""
        raise AssertionError(f"an exchange {name!r} of one process")

    def drop_exchange(self) -> None:
        """Does nothing."""


class _NoChannel:
    """The channel of a process on its own, which nothing is ever sent through."""

    def now(self) -> float:
        raise AssertionError("a process on its own waits for nobody")

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(f"a message {key!r} of one process")

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        raise AssertionError(f"a wait for {keys!r} of one process")

    def add(self, key: str, count: int) -> int:
        raise AssertionError(f"a counter {key!r} of one process")

    def delete(self, keys: Sequence[str]) -> None:
        raise AssertionError(f"keys {keys!r} of one process")
