"""Time, as one small seam that tests can replace.

Durations use the monotonic clock; dates use UTC. Nothing in Waypost orders snapshots by time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> datetime:
        """Returns the date and time in UTC."""
        ...

    def monotonic(self) -> float:
        """Returns seconds that never go back, from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Returns after ``seconds``."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Returns the date and time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Returns seconds that never go back, from an arbitrary start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns after ``seconds``."""
        time.sleep(seconds)


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to; sleeping moves it."""

    start: datetime = datetime(2030, 1, 1, tzinfo=UTC)
    elapsed_s: float = field(default=0.0)

    def now(self) -> datetime:
        """Returns the start plus what has elapsed, in UTC."""
        return datetime.fromtimestamp(self.start.timestamp() + self.elapsed_s, UTC)

    def monotonic(self) -> float:
        """Returns the elapsed seconds."""
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        """Moves the clock by ``seconds`` and returns at once."""
        self.elapsed_s += seconds


SYSTEM_CLOCK = SystemClock()


def timestamp(moment: datetime) -> str:
    """Returns ``moment`` as RFC 3339 text in UTC with microseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_timestamp(text: str) -> datetime:
    """Returns the moment that :func:`timestamp` wrote.

    Raises:
        ValueError: ``text`` is not such a timestamp.
    """
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
