"""What to keep: small values that name the snapshots to keep and why; everything else may go.

Policies see committed snapshots only. What must never go, whatever a policy says, is added by
:func:`decide`, which feeds the dry run and the deletion alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from waypost.audit.catalog import Record, committed


class Keeping(ABC):
    """Base of what may be given as ``keep``."""

    @abstractmethod
    def kept(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Returns the names to keep, each with the reason.

        Args:
            records: Committed snapshots, newest first.
        """

    def __or__(self, other: Keeping) -> Keeping:
        """Returns a policy that keeps what either keeps."""
        return _Union((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class KeepLast(Keeping):
    """Keeps the newest ``count`` snapshots."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"count must be an integer from 1 on, not {self.count!r}")

    def kept(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Returns the names to keep, each with the reason."""
        return {record.name: f"one of the last {self.count}" for record in records[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepBest(Keeping):
    """Keeps the ``count`` snapshots with the best value of a metric.

    Values are those stored with the snapshots, at full precision. NaN and a missing value rank
    last, and never displace a number; of equal values the newer snapshot is better.

    Args:
        count: How many to keep.
        metric: Name of the metric, such as ``"val/loss"``.
        mode: ``"min"`` or ``"max"``: which values are better. Never guessed.
    """

    count: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"count must be an integer from 1 on, not {self.count!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")

    def kept(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Returns the names to keep, each with the reason."""
        ranked = [
            (value if self.mode == "min" else -value, age, record)
            for age, record in enumerate(records)
            if (value := record.metrics.get(self.metric)) is not None and not math.isnan(value)
        ]
        ranked.sort(key=lambda row: row[:2])
        return {
            record.name: f"best {self.metric} ({self.mode}): {record.metrics[self.metric]:g}"
            for _, _, record in ranked[: self.count]
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(Keeping):
    """Keeps, for ever, every snapshot whose step is a multiple, or one in each span of time.

    Args:
        steps: Keep steps that are multiples of this.
        minutes: Keep the oldest snapshot in each span of this length, counted from the epoch.
    """

    steps: int | None = None
    minutes: float | None = None

    def __repr__(self) -> str:
        chosen = "steps" if self.steps is not None else "minutes"
        return f"KeepEvery({chosen}={getattr(self, chosen)})"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give either steps or minutes")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ValueError(f"steps must be an integer from 1 on, not {self.steps!r}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, not {self.minutes!r}")

    def kept(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Returns the names to keep, each with the reason."""
        if self.steps is not None:
            return {
                record.name: f"every {self.steps} steps"
                for record in records
                if record.step % self.steps == 0
            }
        oldest: dict[int, str] = {}
        for record in records:
            if record.created is not None and self.minutes is not None:
                oldest[int(record.created.timestamp() // (self.minutes * 60))] = record.name
        return dict.fromkeys(oldest.values(), f"every {self.minutes:g} minutes")


@dataclass(frozen=True, slots=True)
class _Union(Keeping):
    policies: tuple[Keeping, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def kept(self, records: Sequence[Record]) -> Mapping[str, str]:
        reasons: dict[str, list[str]] = {}
        for policy in self.policies:
            for name, reason in policy.kept(records).items():
                reasons.setdefault(name, []).append(reason)
        return {name: ", ".join(found) for name, found in reasons.items()}


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one snapshot, and why."""

    record: Record
    keep: bool
    reason: str


def decide(
    records: Iterable[Record], policy: Keeping | None, protected: Mapping[str, str]
) -> list[Decision]:
    """Returns a decision for each committed record, newest first.

    Args:
        records: All that is known of a run.
        policy: None keeps everything.
        protected: Names that must stay, with the reason, such as the snapshot resumed from.
    """
    usable = committed(records)
    kept = (
        dict.fromkeys((record.name for record in usable), "no policy")
        if policy is None
        else (policy.kept(usable))
    )
    decisions: list[Decision] = []
    for record in usable:
        reasons = [
            reason
            for reason in (
                kept.get(record.name),
                "the newest" if record is usable[0] and record.name not in kept else None,
                protected.get(record.name),
            )
            if reason
        ]
        decisions.append(
            Decision(record, bool(reasons), ", ".join(reasons) or f"not kept by {policy}")
        )
    return decisions


def _parts(policy: Keeping) -> tuple[Keeping, ...]:
    return policy.policies if isinstance(policy, _Union) else (policy,)
