"""Ranks as threads of one process, with faults at chosen places and a clock that nobody waits for.

Each rank runs the same function in a thread of its own and passes its group as ``process_group``.
When every rank that is still alive waits for others, time jumps to the next moment at which one of
them gives up; so a time-out of minutes costs nothing, and a run is the same every time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from waypost.comm.group import Channel, Exchange
from waypost.errors import CoordinationTimeoutError
from waypost.format.shardings import Ranks

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """What goes wrong on one rank, and when.

    Attributes:
        rank: Where.
        phase: On entering which phase of a save (``describe``, ``plan``, ``stage``, ``write``,
            ``commit``, ``depart``) or of a load (``describe``, ``plan``, ``read``, ``place``,
            ``depart``).
        action: ``"raise"`` an OSError; ``"kill"``: nothing is heard of the rank again; ``"late"``:
            it stands still until all others have ended, and then goes on.
        occurrence: In which of the rank's passes through that phase, from 1.
    """

    rank: int
    phase: str
    action: Literal["raise", "kill", "late"] = "raise"
    occurrence: int = 1


@dataclass(slots=True)
class Outcome(Generic[_Result]):
    """What became of one rank.

    Attributes:
        rank: Which.
        value: What its function returned.
        error: What it raised, or None.
        is_killed: Whether a fault ended it.
        waited_s: Seconds of the common clock that it spent waiting for others.
    """

    rank: int
    value: _Result | None = None
    error: BaseException | None = None
    is_killed: bool = False
    waited_s: float = 0.0


class RankKilled(BaseException):
    """Ends the thread of a rank that a fault killed, when all others have ended."""


@dataclass(slots=True)
class _World:
    """What the ranks share: messages, and who is waiting until when."""

    size: int
    guard: threading.Condition = field(default_factory=threading.Condition)
    values: dict[str, bytes] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    mail: dict[tuple[str, int, int], deque[memoryview]] = field(default_factory=dict)
    now_s: float = 0.0
    waiting: dict[int, tuple[float, Callable[[], bool]]] = field(default_factory=dict)
    standing: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def wait(self, rank: int, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Waits, on the common clock, until ``is_there``; the guard is held."""
        deadline = self.now_s + timeout_s
        while not is_there():
            if self.now_s >= deadline:
                return False
            self.waiting[rank] = deadline, is_there
            self._pass_time()
            if self.now_s < deadline:
                self.guard.wait()
            del self.waiting[rank]
        return True

    def stand(self, rank: int) -> None:
        """Stands still until all other ranks have ended or stand still too."""
        with self.guard:
            self.standing.add(rank)
            self._pass_time()
            self.guard.notify_all()
            while len(self.standing | self.ended) < self.size:
                self.guard.wait()
            self.standing.discard(rank)

    def end(self, rank: int) -> None:
        """Notes that a rank's function has returned."""
        with self.guard:
            self.ended.add(rank)
            self._pass_time()
            self.guard.notify_all()

    def _pass_time(self) -> None:
        """Lets time jump to the next deadline if nothing else can happen."""
        stuck = {
            rank: deadline
            for rank, (deadline, is_there) in self.waiting.items()
            if deadline > self.now_s and not is_there()
        }
        if stuck and len(set(stuck) | self.standing | self.ended) == self.size:
            self.now_s = min(stuck.values())
            self.guard.notify_all()


class RankGroup:
    """One rank's view of the others; pass it as ``process_group``."""

    def __init__(self, world: _World, rank: int, faults: Sequence[RankFault]) -> None:
        self.ranks = Ranks(rank, world.size)
        self.channel: Channel = _ThreadChannel(self)
        self.opened = 0
        self.leftovers: list[str] = []
        self.is_dead = False
        self.waited_s = 0.0
        self._world = world
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._passes: Counter[str] = Counter()

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world_size

    def local_size(self) -> int:
        """Returns one: each rank has the threads that it asks for."""
        return 1

    def reach(self, phase: str) -> None:
        """Does what a fault says about this pass through ``phase``."""
        self._passes[phase] += 1
        for fault in self._faults:
            if fault.phase != phase or fault.occurrence != self._passes[phase]:
                continue
            if fault.action == "raise":
                raise OSError(f"fault on rank {self.rank} in {phase}")
            self.is_dead = fault.action == "kill"
            self._world.stand(self.rank)
            self.check_alive()

    @property
    def exchange_name(self) -> str:
        """None is kept open."""
        return ""

    def exchange(self, name: str, timeout_s: float) -> Exchange:
        """Returns an exchange through the memory of the process."""
        return _ThreadExchange(self, name, timeout_s)

    def drop_exchange(self) -> None:
        """Does nothing."""

    def store_keys(self) -> list[str]:
        """Returns the keys that all ranks have left in their common store."""
        with self._world.guard:
            return sorted([*self._world.values, *self._world.counters])

    def check_alive(self) -> None:
        """Ends the thread of a rank that is dead."""
        if self.is_dead:
            raise RankKilled(f"rank {self.rank}")


class _ThreadChannel:
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def now(self) -> float:
        return self._group._world.now_s

    def set(self, key: str, value: bytes) -> None:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            world.values[key] = value
            world.guard.notify_all()

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            began_s = world.now_s
            world.wait(
                self._group.rank, lambda: all(key in world.values for key in keys), timeout_s
            )
            self._group.waited_s += world.now_s - began_s
            return {key: world.values[key] for key in keys if key in world.values}

    def add(self, key: str, count: int) -> int:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            world.counters[key] += count
            return world.counters[key]

    def delete(self, keys: Sequence[str]) -> None:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            for key in keys:
                world.values.pop(key, None)
                world.counters.pop(key, None)


class _ThreadExchange:
    def __init__(self, group: RankGroup, name: str, timeout_s: float) -> None:
        self._group = group
        self._name = name
        self._timeout_s = timeout_s

    def send(self, data: memoryview, rank: int) -> None:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            box = self._box(self._group.rank, rank)
            box.append(data)
            world.guard.notify_all()
            self._wait(lambda: not box, rank)

    def receive(self, data: memoryview, rank: int) -> None:
        self._group.check_alive()
        world = self._group._world
        with world.guard:
            box = self._box(rank, self._group.rank)
            self._wait(lambda: bool(box), rank)
            data[:] = box.popleft()
            world.guard.notify_all()

    def _wait(self, is_there: Callable[[], bool], rank: int) -> None:
        if not self._group._world.wait(self._group.rank, is_there, self._timeout_s):
            raise CoordinationTimeoutError(
                f"rank {rank} did not exchange data within {self._timeout_s:g} s", (rank,)
            )

    def _box(self, source: int, target: int) -> deque[memoryview]:
        return self._group._world.mail.setdefault((self._name, source, target), deque())


def run_ranks(
    world_size: int,
    body: Callable[[RankGroup], _Result],
    *,
    faults: Sequence[RankFault] = (),
) -> list[Outcome[_Result]]:
    """Runs ``body`` once for each rank, in threads of this process; returns what became of each.

    Args:
        world_size: Ranks.
        body: Given the rank's group, to be passed on as ``process_group``.
        faults: What goes wrong.
    """
    world = _World(world_size)
    groups = [RankGroup(world, rank, faults) for rank in range(world_size)]
    outcomes: list[Outcome[_Result]] = [Outcome(rank) for rank in range(world_size)]

    def run(group: RankGroup, outcome: Outcome[_Result]) -> None:
        try:
            outcome.value = body(group)
        except RankKilled:
            outcome.is_killed = True
        except BaseException as error:  # noqa: BLE001 - thread boundary: the caller looks at it
            outcome.error = error
        finally:
            outcome.is_killed = outcome.is_killed or group.is_dead
            outcome.waited_s = group.waited_s
            world.end(group.rank)

    threads = [
        threading.Thread(target=run, args=(group, outcome), name=f"rank-{group.rank}", daemon=True)
        for group, outcome in zip(groups, outcomes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def values(outcomes: Sequence[Outcome[Any]]) -> list[Any]:
    """Returns what each rank returned; raises the first error of any.

    Raises:
        BaseException: What a rank raised, noted with its number.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            outcome.error.add_note(f"on rank {outcome.rank}")
            raise outcome.error
    return [outcome.value for outcome in outcomes]
