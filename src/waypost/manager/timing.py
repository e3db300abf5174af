"""When to save: small values with one pure method, combined with ``|``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A boundary at which a save may be due.

    Attributes:
        step: Steps done.
        epoch: Epochs done, when an epoch just ended; else None.
        since_save_s: Seconds since the last save, or since the start.
    """

    step: int
    epoch: int | None = None
    since_save_s: float = 0.0


class Trigger(ABC):
    """Base of what may be given as ``save_every``."""

    @abstractmethod
    def due(self, moment: Moment) -> str | None:
        """Returns why a save is due at ``moment``, or None."""

    def __or__(self, other: Trigger) -> Trigger:
        """Returns a trigger that is due when either is."""
        return _Any((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class EverySteps(Trigger):
    """Due at every ``steps``-th optimizer step."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)

    def due(self, moment: Moment) -> str | None:
        """Returns why a save is due at ``moment``, or None."""
        is_due = moment.epoch is None and moment.step > 0 and moment.step % self.steps == 0
        return f"every {self.steps} steps" if is_due else None


@dataclass(frozen=True, slots=True)
class EveryEpochs(Trigger):
    """Due at the end of every ``epochs``-th epoch, as told by ``Checkpointer.epoch_done``."""

    epochs: int

    def __post_init__(self) -> None:
        _check_count("epochs", self.epochs)

    def due(self, moment: Moment) -> str | None:
        """Returns why a save is due at ``moment``, or None."""
        is_due = moment.epoch is not None and moment.epoch % self.epochs == 0
        return f"every {self.epochs} epochs" if is_due else None


@dataclass(frozen=True, slots=True)
class EveryMinutes(Trigger):
    """Due at the first boundary that is ``minutes`` after the last save."""

    minutes: float

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, not {self.minutes!r}")

    def due(self, moment: Moment) -> str | None:
        """Returns why a save is due at ``moment``, or None."""
        is_due = moment.since_save_s >= self.minutes * 60
        return f"every {self.minutes:g} minutes" if is_due else None


@dataclass(frozen=True, slots=True)
class AtSteps(Trigger):
    """Due at each of the given steps."""

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", frozenset(steps))

    def due(self, moment: Moment) -> str | None:
        """Returns why a save is due at ``moment``, or None."""
        is_due = moment.epoch is None and moment.step in self.steps
        return f"at step {moment.step}" if is_due else None


@dataclass(frozen=True, slots=True)
class _Any(Trigger):
    triggers: tuple[Trigger, ...]

    def due(self, moment: Moment) -> str | None:
        reasons = [reason for trigger in self.triggers if (reason := trigger.due(moment))]
        return ", ".join(reasons) or None


def _parts(trigger: Trigger) -> tuple[Trigger, ...]:
    return trigger.triggers if isinstance(trigger, _Any) else (trigger,)


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer from 1 on, not {value!r}")
