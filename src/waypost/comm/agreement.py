"""How ranks agree: rounds of value-or-error, decided by rank 0, in bounded time.

A collective call is a series of rounds. In each, every rank does its own part and says what came of
it, a value or an error; rank 0 collects what was said and decides; everybody learns the decision.
So all ranks leave with the same outcome, and each knows which ranks failed and why. No rank waits
longer than the time-out without a sign of progress, and no collective of torch is used, so that a
call that only some ranks make ends with an error that names the others.

Calls are numbered. Every rank counts those whose begin it has seen; one that finds that rank 0 gave
up a call, and has begun another, goes on to that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from waypost import limits
from waypost.comm import failures
from waypost.comm.failures import Failure
from waypost.comm.group import Group
from waypost.comm.life import Beats, Patience
from waypost.errors import (
    CoordinationTimeoutError,
    Difference,
    MismatchError,
    PeerError,
    WaypostError,
)

_Value = TypeVar("_Value")
_Decision = TypeVar("_Decision")

_LEADER_SHARE = 0.75
"""Part of the time-out after which rank 0 gives missing ranks up; the rest is for the others to
learn that, so that they name the rank that is missing and not rank 0."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a call is about, which all ranks must say alike.

    Attributes:
        call: ``save`` or ``load``, or what else ranks do together.
        facts: Names to texts: URL, step, options, names of entries.
    """

    call: str
    facts: dict[str, str]


def names_text(named: object) -> str:
    """Returns the names in a mapping as a fact that ranks can compare, whatever it is."""
    return ", ".join(sorted(map(str, named))) if isinstance(named, Mapping) else repr(named)[:200]


class _Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's message of a round."""

    value: Any = None
    failure: Failure | None = None
    subject: Subject | None = None


class _Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rank 0's message of a round; ``ranks`` are those whose own part failed."""

    value: Any = None
    failure: Failure | None = None
    failed: dict[int, Failure] = {}
    missing: list[int] = []
    subject: Subject | None = None


class _Opened(msgspec.Struct, frozen=True):
    """The call that rank 0 began last."""

    number: int
    subject: Subject


class Agreement:
    """One collective call: :meth:`share` for each round, :meth:`close` after the last.

    Args:
        group: The ranks.
        subject: What the call is about.
        timeout_s: Longest wait for one another without progress.
        watch: Returns ranks that are known to have failed outside of this call, with what they
            said; looked at while waiting.

    Not thread-safe, except :meth:`progress`.
    """

    def __init__(
        self,
        group: Group,
        subject: Subject,
        timeout_s: float,
        watch: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        self._watch = watch
        self._group = group
        self._channel = group.channel
        self._subject = subject
        self._timeout_s = timeout_s
        self._round = 0
        self._number = group.opened
        self._is_over = False
        self._cause: BaseException | None = None
        self._beats: Beats | None = None
        if group.world_size > 1:
            self._beats = Beats(self._channel, lambda: self._key_of_beat(group.rank), timeout_s / 8)
        if self.is_leader and group.world_size > 1:
            self._channel.set("leader", msgspec.msgpack.encode(_Opened(self._number, subject)))

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides."""
        return self._group.rank == 0

    @property
    def name(self) -> str:
        """A name for this call that no other call of the group has."""
        return f"call-{self._number}"

    def progress(self, count: int = 1) -> None:
        """Tells the others, now and then, that this rank is getting on; from any thread."""
        if self._beats is not None:
            self._beats.add(count)

    def share(
        self,
        phase: str,
        part: Callable[[], _Value],
        decide: Callable[[dict[int, _Value]], _Decision],
        *,
        kind: Any = Any,
    ) -> _Decision:
        """Does one round; returns what rank 0 decided.

        Args:
            phase: Its name, for messages.
            part: What this rank does; returns plain values.
            decide: What rank 0 does with what every rank returned, by rank.
            kind: Type of the decision, to be restored from plain values.

        Raises:
            Exception: What ``part`` raised here, or what ``decide`` raised, on all ranks alike.
            PeerError: The part of another rank failed.
            CoordinationTimeoutError: Ranks did not answer.
        """
        said, own = self._try(phase, part)
        if self._group.world_size == 1:
            if own is not None:
                raise own
            return decide({0: said.value})
        if self._round == 0:
            said = msgspec.structs.replace(said, subject=self._subject)
        try:
            decided = (
                self._lead(phase, said, decide)
                if self.is_leader
                else self._follow(phase, said, is_interrupted=_is_interrupt(own))
            )
        except WaypostError as error:
            self._end()
            raise own or error from error
        self._round += 1
        self._raise(phase, decided, own)
        value: _Decision = (
            decided.value if kind is Any else msgspec.convert(decided.value, kind, strict=False)
        )
        return value

    def close(self) -> None:
        """Removes the keys of a call that all ranks have come through; the last to leave does it.

        Keys of earlier calls that failed go too: everybody has left those by now.
        """
        if self._group.world_size == 1 or self._is_over:
            return
        self._is_over = True
        last, left = self._key(self._round - 1, "all"), self._key(0, "left")
        if self.is_leader:
            beats = [self._key_of_beat(rank) for rank in range(self._group.world_size)]
            self._channel.delete([*self._group.leftovers, *beats])
            self._group.leftovers[:] = [last, left]
        if self._channel.add(left, 1) == self._group.world_size:
            self._channel.delete([last, left])

    def _try(self, phase: str, part: Callable[[], Any]) -> tuple[_Said, BaseException | None]:
        try:
            self._group.reach(phase)
            return _Said(value=part()), None
        except BaseException as error:  # noqa: BLE001 - rank boundary: raised when others know it
            return _Said(failure=failures.describe(error)), error

    def _lead(self, phase: str, own: _Said, decide: Callable[[dict[int, Any]], Any]) -> _Decided:
        if self._round == 0:
            self._group.opened = self._number + 1
        said = {0: own}
        missing: tuple[int, ...] = ()
        if own.failure is not None and own.failure.may_be_consequence:
            causes = {rank: one for rank, one in self._heard().items() if _has_failed(one)}
            said = causes or said
        elif not _has_failed(own):
            received, missing = self._collect(phase)
            said |= received
        failed = {rank: one.failure for rank, one in said.items() if one.failure is not None}
        gone = self._given_up() if _has_failed(own) else ()
        if gone:
            decided = _Decided(missing=list(gone))
        elif any(failure.is_own for failure in failed.values()) or (failed and not missing):
            decided = _Decided(failed=failed)
        elif missing:
            decided = _Decided(missing=list(missing))
        else:
            decided = self._decide(said, decide)
        decided = msgspec.structs.replace(decided, subject=self._subject)
        data = msgspec.msgpack.encode(decided)
        self._channel.set(self._key(self._round, "all"), data)
        if self._round and len(said) == self._group.world_size:
            self._channel.delete([self._key(self._round - 1, "all")])
        return msgspec.msgpack.decode(data, type=_Decided)

    def _heard(self) -> dict[int, _Said]:
        """Returns what the other ranks have said so far in this round."""
        keys = {self._key(self._round, rank): rank for rank in self._others}
        return {
            keys[key]: msgspec.msgpack.decode(data, type=_Said)
            for key, data in self._channel.wait(list(keys), 0.0).items()
        }

    def _decide(
        self, said: Mapping[int, _Said], decide: Callable[[dict[int, Any]], Any]
    ) -> _Decided:
        try:
            if self._round == 0:
                _compare_subjects({rank: one.subject for rank, one in said.items()})
            return _Decided(value=decide({rank: one.value for rank, one in said.items()}))
        except BaseException as error:  # noqa: BLE001 - rank boundary: raised on all ranks
            self._cause = error
            return _Decided(failure=failures.describe(error))

    def _collect(self, phase: str) -> tuple[dict[int, _Said], tuple[int, ...]]:
        """Returns what the other ranks said, and those that said nothing in time.

        Returns early when one says that it failed by itself: there is nothing to wait for then.
        """
        wanted = {self._key(self._round, rank): rank for rank in self._others}
        said: dict[int, _Said] = {}
        patience = self._patience(self._others, self._timeout_s * _LEADER_SHARE)
        while wanted:
            found = self._channel.wait(list(wanted), patience.slice_s())
            for key, data in found.items():
                said[wanted.pop(key)] = msgspec.msgpack.decode(data, type=_Said)
            self._channel.delete(list(found))
            if any(map(_has_failed, said.values())):
                break
            for rank, text in self._gone(wanted.values()).items():
                said[rank] = _Said(failure=Failure(kind="", text=text))
            if any(map(_has_failed, said.values())):
                break
            missing = tuple(sorted(wanted.values()))
            if missing and patience.look(missing):
                self.progress()
            if missing and patience.is_over:
                return said, missing
        return said, ()

    def _patience(self, ranks: tuple[int, ...], timeout_s: float) -> Patience:
        slice_max_s = max(timeout_s / 4, limits.BEAT_S)
        if self._watch is not None:
            slice_max_s = min(slice_max_s, limits.WATCH_S)
        keys = {rank: self._key_of_beat(rank) for rank in ranks}
        return Patience(self._channel, keys, timeout_s, slice_max_s)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(range(1, self._group.world_size))

    def _follow(self, phase: str, said: _Said, *, is_interrupted: bool) -> _Decided:
        data = msgspec.msgpack.encode(said)
        own = self._key(self._round, self._group.rank)
        if self._group.leftovers:
            self._channel.delete(self._group.leftovers)
            self._group.leftovers.clear()
        self._channel.set(own, data)
        patience = self._patience((0,), self._timeout_s)
        while True:
            key = self._key(self._round, "all")
            found = self._channel.wait([key], 0.0 if is_interrupted else patience.slice_s())
            if key in found:
                decided = msgspec.msgpack.decode(found[key], type=_Decided)
                if self._round == 0 and self._is_past(decided):
                    self._channel.delete([own])
                    self._number += 1
                    patience = self._patience((0,), self._timeout_s)
                    own = self._key(0, self._group.rank)
                    self._channel.set(own, data)
                    continue
                if self._round == 0:
                    self._group.opened = self._number + 1
                return decided
            patience.look((0,))
            gone = self._gone(range(self._group.world_size))
            if gone and not self._channel.wait([key], 0.0):
                self._channel.delete([own])
                failed = {rank: Failure(kind="", text=text) for rank, text in gone.items()}
                raise failures.peers(failed, f"{_title(self._subject)}, in the phase {phase!r}")
            if is_interrupted:
                raise _timeout(self._subject, phase, (0,), self._timeout_s)
            if patience.is_over:
                # A rank 0 that comes late must not count on this one, and is told so.
                self._channel.delete([own])
                self._channel.set(self._key_of_giving_up(self._group.rank), b"")
                self._group.leftovers.append(self._key_of_giving_up(self._group.rank))
                raise _timeout(self._subject, phase, (0,), self._timeout_s)

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns those of ``ranks`` that failed outside of this call, with what they said."""
        known = self._watch() if self._watch is not None else {}
        return {rank: known[rank] for rank in ranks if rank in known}

    def _is_past(self, decided: _Decided) -> bool:
        """Tells whether a decision is about a call that rank 0 gave up before this rank came.

        It is, if this rank was not heard, unless it is this very call and rank 0 has not begun it
        once more.
        """
        if self._group.rank not in decided.missing and not decided.failed:
            return False
        if decided.subject != self._subject:
            return True
        data = self._channel.wait(["leader"], 0.0).get("leader")
        if data is None:
            return False
        opened = msgspec.msgpack.decode(data, type=_Opened)
        return opened.number > self._number and opened.subject == self._subject

    def _raise(self, phase: str, decided: _Decided, own: BaseException | None) -> None:
        """Raises what the round came to, if it failed."""
        if not (own or decided.failed or decided.missing or decided.failure):
            return
        self._end()
        if own is not None and not self._is_consequence(own, decided):
            failures.note_failed(own, decided.failed)
            raise own
        if decided.failed:
            what = f"{_title(self._subject)}, in the phase {phase!r}"
            raise failures.peers(decided.failed, what) from own
        if decided.missing:
            raise _timeout(self._subject, phase, tuple(decided.missing), self._timeout_s)
        if self._cause is not None:
            raise self._cause
        if decided.failure is not None:
            raise failures.restore(decided.failure)

    def _is_consequence(self, own: BaseException, decided: _Decided) -> bool:
        """Tells whether this rank failed only because others had."""
        if isinstance(own, (PeerError, CoordinationTimeoutError)):
            is_explained = any(failure.is_own for failure in decided.failed.values())
            return is_explained or bool(decided.missing)
        is_heard = self._group.rank in decided.failed
        is_alone = not (decided.failed or decided.missing)
        # What the storage says may come of others' clearing up.
        return isinstance(own, OSError) and not (is_heard or is_alone)

    def _end(self) -> None:
        """Leaves a call that failed; its keys are removed when all ranks are known to have left."""
        self._is_over = True
        if self.is_leader:
            rounds = range(self._round + 1)
            whos: list[int | str] = ["all", *self._others]
            self._group.leftovers += [self._key(number, who) for number in rounds for who in whos]
            for rank in (0, *self._others):
                self._group.leftovers += [self._key_of_beat(rank), self._key_of_giving_up(rank)]

    def _key(self, number: int, who: int | str) -> str:
        return f"{self._number}/{number}/{who}"

    def _given_up(self) -> tuple[int, ...]:
        """Returns the ranks that have stopped waiting for this one, rank 0."""
        keys = {self._key_of_giving_up(rank): rank for rank in self._others}
        return tuple(sorted(keys[key] for key in self._channel.wait(list(keys), 0.0)))

    def _key_of_giving_up(self, rank: int) -> str:
        return f"{self._number}/gone/{rank}"

    def _key_of_beat(self, rank: int) -> str:
        return f"{self._number}/beat/{rank}"


def _compare_subjects(said: Mapping[int, Subject | None]) -> None:
    """Makes sure that all ranks speak of the same call.

    Raises:
        MismatchError: They do not; shows both sides.
    """
    leader = said[0]
    differences: list[Difference] = []
    for rank, subject in sorted(said.items()):
        if subject is None or leader is None or subject == leader:
            continue
        if subject.call != leader.call:
            differences.append(_difference("call", 0, leader.call, rank, subject.call))
        for name in {**leader.facts, **subject.facts}:
            mine, theirs = leader.facts.get(name, "-"), subject.facts.get(name, "-")
            if mine != theirs:
                differences.append(_difference(name, 0, mine, rank, theirs))
    if differences:
        call = "" if leader is None else f"{_title(leader)}: "
        raise MismatchError(
            f"{call}ranks do not ask for the same; nothing was done", tuple(differences)
        )


def _difference(name: str, rank: int, mine: str, other: int, theirs: str) -> Difference:
    return Difference(
        kind="ranks",
        path=name,
        expected=f"rank {rank} says {mine[:500]}",
        actual=f"rank {other} says {theirs[:500]}",
    )


def _timeout(
    subject: Subject, phase: str, missing: tuple[int, ...], timeout_s: float
) -> CoordinationTimeoutError:
    who = failures.ranks_text(missing)
    return CoordinationTimeoutError(
        f"{_title(subject)}: {who} did not take part in the phase {phase!r} in time (timeout_s "
        f"is {timeout_s:g} s); every rank of the group must make this call. A rank that is gone "
        f"cannot come back into this group: restart the job",
        missing,
    )


def _title(subject: Subject) -> str:
    url = subject.facts.get("url")
    return f"{subject.call} {url}" if url else subject.call


def _has_failed(said: _Said) -> bool:
    return said.failure is not None and said.failure.is_own


def _is_interrupt(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Exception)
