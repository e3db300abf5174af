"""How ranks come to act at the same step, without waiting for one another at every step.

A rank that wants something (a signal has come, time has passed) raises a flag. Every rank looks for
flags at each of its boundaries, says the first step at which it saw one, goes on for one more step,
and waits there if it must. Whoever is the last to say so names the step for all: one after the last
at which any rank saw the flag, which no rank can have passed.

So nobody depends on a certain rank coming to a boundary. Ranks that run in step through collectives
of their training have all seen a flag by the boundary at which the first of them waits. Ranks that
run freely do not run away, and those that wait in a save or at the end look for flags there.
"""

from __future__ import annotations

import msgspec

from waypost import limits
from waypost.comm import Group
from waypost.comm.failures import ranks_text
from waypost.errors import CoordinationTimeoutError, PeerError

_AHEAD_STEPS = 1
"""Steps that a rank goes on after it has seen a flag, before it waits for the decision."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wants all ranks to do.

    Attributes:
        reason: Why to save.
        signal: The signal that asks the job to stop after that; 0 to go on.
    """

    reason: str
    signal: int = 0


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank left the block of its training.

    Attributes:
        step: Steps done.
        error: What its training raised; empty when it left because of another rank.
    """

    step: int
    error: str = ""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The step after which a rank saw a flag, and what it wanted itself by then."""

    step: int
    request: Request | None = None


class _Decided(msgspec.Struct, frozen=True, kw_only=True):
    """At which step all do what was asked."""

    step: int
    request: Request


class Boundary:
    """The flags of one run of training, on one rank.

    Args:
        group: The ranks.
        name: Unique to this training.
        timeout_s: Longest wait for the other ranks.
    """

    def __init__(self, group: Group, name: str, timeout_s: float) -> None:
        self._group = group
        self._channel = group.channel
        self._name = name
        self._timeout_s = timeout_s
        self._step = 0
        self._number = 0
        self._news = 0
        self._asked: Request | None = None
        self._seen: int | None = None
        self._decided: _Decided | None = None

    @property
    def stop_signal(self) -> int:
        """The signal by which the job was asked to stop, as far as this rank knows; 0 if none."""
        return self._decided.request.signal if self._decided is not None else 0

    def reach(self, step: int, wanted: Request | None, *, may_wait: bool) -> Request | None:
        """Returns what all ranks do now, after ``step``, if anything.

        Args:
            step: Steps done.
            wanted: What this rank wants; given again at each boundary until it is done.
            may_wait: Whether to wait for the others, if it comes to that; not when all ranks are
                about to meet at this step anyway.

        Raises:
            PeerError: The training of another rank has failed.
            CoordinationTimeoutError: Other ranks did not come to a boundary in time.
        """
        self._step = step
        if wanted is not None and self._asked is None and self._seen is None:
            self._asked = wanted
            self._channel.set(self._key("ask"), b"")
            self._channel.add(self._key_of_news, 1)
        self._look()
        if self._seen is not None and self._decided is None:
            is_late = may_wait and step >= self._seen + _AHEAD_STEPS
            self._learn(self._timeout_s if is_late else 0.0)
        if self._decided is None or step < self._decided.step:
            return None
        request = self._decided.request
        self._next()
        return request

    def end(self, step: int) -> None:
        """Tells the others that this rank does not come to another boundary."""
        self._step = step
        if self._seen is None:
            self._note_seen()

    def attend(self) -> dict[int, str]:
        """Answers flags while this rank waits in a save or at the end; returns as :meth:`failed`.

        A rank that is behind may wait at its boundary for an answer, and this one for that rank.
        """
        if self._seen is None and self._channel.wait([self._key("ask")], 0.0):
            self._note_seen()
        return self.failed()

    def leave(self, departure: Departure) -> None:
        """Tells the others that this rank's training has ended by an error."""
        key = f"{self._name}/left/{self._group.rank}"
        self._channel.set(key, msgspec.msgpack.encode(departure))
        self._channel.add(self._key_of_news, 1)

    def all_left_alike(self, departure: Departure, grace_s: float) -> bool:
        """Tells whether the training of every rank has failed after the same step."""
        keys = [f"{self._name}/left/{rank}" for rank in range(self._group.world_size)]
        found = self._channel.wait(keys, min(grace_s, self._timeout_s))
        others = [msgspec.msgpack.decode(data, type=Departure) for data in found.values()]
        is_alike = all(other.error and other.step == departure.step for other in others)
        return len(found) == len(keys) and is_alike

    def close(self) -> None:
        """Removes the keys, when all ranks are known to have come to the end."""
        if self._group.rank == 0:
            earlier = self._keys(self._number - 1) if self._number else []
            self._channel.delete([*earlier, *self._keys(self._number), self._key_of_news])

    def _look(self) -> None:
        """Looks whether there is anything new: one message to the store at each boundary."""
        news = self._channel.add(self._key_of_news, 0)
        if news == self._news and self._seen is None:
            return
        self._news = news
        self._raise_departures()
        if self._seen is None and self._channel.wait([self._key("ask")], 0.0):
            self._note_seen()

    def _note_seen(self) -> None:
        """Says after which step this rank saw a flag; the last to do so decides for all."""
        self._seen = self._step
        seen = _Seen(step=self._step, request=self._asked)
        self._channel.set(self._key(f"seen/{self._group.rank}"), msgspec.msgpack.encode(seen))
        if self._channel.add(self._key("count"), 1) == self._group.world_size:
            self._decide()

    def failed(self) -> dict[int, str]:
        """Returns the other ranks whose training has failed, with what it raised."""
        others = [rank for rank in range(self._group.world_size) if rank != self._group.rank]
        found = self._channel.wait([f"{self._name}/left/{rank}" for rank in others], 0.0)
        errors: dict[int, str] = {}
        for key, data in found.items():
            departure = msgspec.msgpack.decode(data, type=Departure)
            if departure.error:
                errors[int(key.rpartition("/")[2])] = departure.error
        return errors

    def _raise_departures(self) -> None:
        errors = self.failed()
        if errors:
            said = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(errors.items()))
            raise PeerError(
                f"the training of {ranks_text(tuple(sorted(errors)))} has failed, and so this "
                f"rank's ends too\n{said}",
                errors,
            )

    def _decide(self) -> None:
        """Names the step for all, if anything was asked for; a signal comes before the rest."""
        seen = self._all_seen().values()
        requests = [one.request for one in seen if one.request is not None]
        if not requests:
            return  # all have come to their end, and nobody wanted anything
        request = next((request for request in requests if request.signal), requests[0])
        decided = _Decided(step=max(one.step for one in seen) + _AHEAD_STEPS, request=request)
        self._channel.set(self._key("at"), msgspec.msgpack.encode(decided))

    def _all_seen(self) -> dict[int, _Seen]:
        """Returns what ranks have said so far."""
        keys = {self._key(f"seen/{rank}"): rank for rank in range(self._group.world_size)}
        return {
            keys[key]: msgspec.msgpack.decode(data, type=_Seen)
            for key, data in self._channel.wait(list(keys), 0.0).items()
        }

    def _learn(self, timeout_s: float) -> None:
        """Learns the step at which all act, waiting for it up to ``timeout_s``."""
        key = self._key("at")
        deadline_s = self._channel.now() + timeout_s
        while True:
            remaining_s = deadline_s - self._channel.now()
            found = self._channel.wait([key], max(0.0, min(remaining_s, limits.WATCH_S)))
            if found:
                self._decided = msgspec.msgpack.decode(found[key], type=_Decided)
                return
            if not timeout_s:
                return
            self._raise_departures()
            if remaining_s <= 0:
                known = self._all_seen()
                self._give_up(
                    tuple(rank for rank in range(self._group.world_size) if rank not in known)
                )

    def _give_up(self, missing: tuple[int, ...]) -> None:
        raise CoordinationTimeoutError(
            f"{ranks_text(missing)} did not come to the end of a step within "
            f"{self._timeout_s:g} s (timeout_s), while the others waited to save",
            missing,
        )

    def _next(self) -> None:
        """Is ready for the next request; removes the keys of the one before this one."""
        if self._group.rank == 0 and self._number:
            self._channel.delete(self._keys(self._number - 1))
        self._number += 1
        self._news = -1  # what was asked for meanwhile has been counted, but not looked at
        self._asked = self._seen = self._decided = None

    def _keys(self, number: int) -> list[str]:
        whats = ["ask", "at", "count", *(f"seen/{rank}" for rank in range(self._group.world_size))]
        return [f"{self._name}/{number}/{what}" for what in whats]

    def _key(self, what: str) -> str:
        return f"{self._name}/{self._number}/{what}"

    @property
    def _key_of_news(self) -> str:
        return f"{self._name}/news"
