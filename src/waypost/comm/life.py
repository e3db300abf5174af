"""Signs of life: how long a rank waits for others that may be busy, or gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from waypost import limits
from waypost.comm.group import Channel


class Patience:
    """How long to go on waiting for ranks, by the last sign of life of each.

    Args:
        channel: By whose clock.
        keys: Where each rank's signs of life are found.
        timeout_s: Longest time without one.
        slice_max_s: Longest wait before looking for them.
    """

    def __init__(
        self, channel: Channel, keys: dict[int, str], timeout_s: float, slice_max_s: float
    ) -> None:
        self._channel = channel
        self._keys = keys
        self._timeout_s = timeout_s
        self._slice_max_s = slice_max_s
        now = channel.now()
        self._seen_s = dict.fromkeys(keys, now)
        self._beats: dict[int, bytes] = {}

    def slice_s(self) -> float:
        """Returns how long to wait before looking for signs of life."""
        earliest = min(self._seen_s.values()) + self._timeout_s - self._channel.now()
        return max(0.0, min(earliest, self._slice_max_s))

    def look(self, missing: tuple[int, ...]) -> bool:
        """Looks for signs of life of ``missing``; tells whether there are new ones."""
        now = self._channel.now()
        keys = {self._keys[rank]: rank for rank in missing}
        is_new = False
        for key, beat in self._channel.wait(list(keys), 0.0).items():
            rank = keys[key]
            if self._beats.get(rank) != beat:
                self._beats[rank] = beat
                self._seen_s[rank] = now
                is_new = True
        self._seen_s = {rank: self._seen_s[rank] for rank in missing}
        return is_new

    @property
    def is_over(self) -> bool:
        """Whether one of the ranks has shown no sign of life for too long."""
        now = self._channel.now()
        return any(now - seen >= self._timeout_s - 1e-6 for seen in self._seen_s.values())


class Beats:
    """This rank's signs of life, told to the others from time to time; from any thread.

    Args:
        channel: Through which.
        key: Returns where they are found, which may change.
        interval_s: Shortest time between two.
    """

    def __init__(self, channel: Channel, key: Callable[[], str], interval_s: float) -> None:
        self._channel = channel
        self._key = key
        self._interval_s = min(limits.BEAT_S, interval_s)
        self._guard = threading.Lock()
        self._count = 0
        self._told_s = channel.now()

    def add(self, count: int) -> None:
        """Counts progress; tells it if the last time is long enough ago."""
        with self._guard:
            self._count += count
            now = self._channel.now()
            if now - self._told_s < self._interval_s:
                return
            self._told_s = now
            self._channel.set(self._key(), str(self._count).encode())
