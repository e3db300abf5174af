"""Kills a trainer again and again, starts it again by the same command, and keeps account.

The plan of disturbances is drawn from a seed before the first start. Whether a kill hit a save is
not assumed from the plan but seen on disk after death: the attempt's data directory is there and
the manifest, which a save writes last, is not.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from waypost.demo.trainer import Course, Trainer, TrainerError
from waypost.demo.watch import newest_committed, open_attempts

FAST_POLL_S = 0.0002  # a save of the demo takes some ten milliseconds
SLOW_POLL_S = 0.002
AFTER_STEP_S = 0.040  # a few steps
AFTER_ATTEMPT_S = 0.004  # the writing part of a small save
EXTRA_KILLS = 8  # until enough kills have hit a save


class Moment(Enum):
    """When a disturbance is meant to strike."""

    STARTING = "while starting"
    TRAINING = "any time"
    SAVING = "during a save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A signal that is meant to strike at a moment, not before a step, after a random delay."""

    signal: signal.Signals
    moment: Moment
    not_before_step: int
    delay: float  # a share, 0 to 1, of the longest delay at that moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a disturbance did, as seen from outside after the trainer's death."""

    signal: signal.Signals
    age_s: float  # of the process that was struck
    step: int  # the last that it logged
    is_in_save: bool
    is_in_start: bool
    newest_step: int  # of the newest complete snapshot that it left
    exit_code: int
    resumed_from: int | None = None  # where the next incarnation went on

    @property
    def moment(self) -> str:
        """What the trainer was doing, in words."""
        if self.exit_code > 0:
            return f"saved, exit code {self.exit_code}"
        if self.is_in_start:
            return "while starting"
        return "inside a save" if self.is_in_save else "between saves"


def plan_disturbances(*, seed: int, kills: int, steps: int) -> list[Disturbance]:
    """Returns that many kills and one SIGTERM, in order, spread over the whole training."""
    draw = random.Random(seed)
    saving = (kills + 1) // 2
    starting = kills // 6
    moments = [Moment.SAVING] * saving + [Moment.STARTING] * starting
    moments += [Moment.TRAINING] * (kills - len(moments))
    later = moments[1:]  # the first stays: only a later start is known to take how long
    draw.shuffle(later)
    kinds = [(signal.SIGKILL, moment) for moment in moments[:1] + later]
    kinds.insert(draw.randint(min(1, kills), kills), (signal.SIGTERM, Moment.TRAINING))
    spacing = 0.75 * steps / len(kinds)
    return [
        Disturbance(
            signal=which,
            moment=moment,
            not_before_step=int((index + draw.uniform(0.1, 0.7)) * spacing) + 1,
            delay=draw.random(),
        )
        for index, (which, moment) in enumerate(kinds)
    ]


def required_hits(kills: int) -> int:
    """Returns how many of the kills must land inside a save."""
    return min(3, kills // 3)


def train_undisturbed(course: Course) -> None:
    """Trains from the first step to the last in one process."""
    with Trainer(course) as trainer:
        trainer.wait_for_success()


def train_disturbed(
    course: Course, plan: list[Disturbance], *, seed: int, on_strike: Callable[[Strike], None]
) -> list[Strike]:
    """Trains to the last step, across every disturbance of the plan.

    When too few kills of the plan hit a save, more are aimed at saves, ``EXTRA_KILLS`` at most.

    Args:
        course: The run and its command.
        plan: The disturbances, in order.
        seed: For the delays of the extra kills.
        on_strike: Called after each death.

    Returns:
        What each disturbance did.

    Raises:
        TrainerError: The trainer ended by itself where it should not have, or got stuck.
    """
    strikes: list[Strike] = []
    start_s = 0.0
    for disturbance in _with_extra_kills(plan, strikes, seed):
        attempts_before = open_attempts(course.run)
        with Trainer(course) as trainer:
            if disturbance.moment is Moment.STARTING:
                # The first half of a start is the import of torch.
                age_s = (1 + disturbance.delay) / 2 * start_s
                _wait_for_age(trainer, age_s)
            else:
                trainer.wait_for_start()
                start_s = max(start_s, trainer.age_s)
                _note_resumption(strikes, trainer)
                _wait_for_moment(trainer, disturbance, course, attempts_before)
            age_s = trainer.age_s
            exit_code = _strike(trainer, disturbance)
            strike = Strike(
                signal=disturbance.signal,
                age_s=age_s,
                step=trainer.log.last_step,
                is_in_save=bool(open_attempts(course.run) - attempts_before),
                is_in_start=not trainer.is_training,
                newest_step=newest_committed(course.run),
                exit_code=exit_code,
            )
        _note_resumption(strikes, trainer)
        strikes.append(strike)
        on_strike(strike)
    with Trainer(course) as trainer:
        trainer.wait_for_start()
        _note_resumption(strikes, trainer)
        trainer.wait_for_success()
    return strikes


def _with_extra_kills(
    plan: list[Disturbance], strikes: list[Strike], seed: int
) -> Iterator[Disturbance]:
    yield from plan
    draw = random.Random(seed + 1)
    wanted = required_hits(sum(item.signal is signal.SIGKILL for item in plan))
    for _ in range(EXTRA_KILLS):
        if sum(strike.is_in_save for strike in strikes) >= wanted:
            return
        yield Disturbance(
            signal=signal.SIGKILL,
            moment=Moment.SAVING,
            not_before_step=1,
            delay=draw.random(),
        )


def _note_resumption(strikes: list[Strike], trainer: Trainer) -> None:
    # A kill that struck during a start is followed by another start from the same place.
    if not trainer.is_training:
        return
    steps_done = trainer.log.incarnations[-1].steps_done
    for index, strike in enumerate(strikes):
        if strike.resumed_from is None:
            strikes[index] = dataclasses.replace(strike, resumed_from=steps_done)


def _wait_for_age(trainer: Trainer, age_s: float) -> None:
    trainer.wait_until(lambda: trainer.age_s >= age_s, what="the kill", poll_s=SLOW_POLL_S)


def _wait_for_moment(
    trainer: Trainer, disturbance: Disturbance, course: Course, attempts_before: frozenset[str]
) -> None:
    step = disturbance.not_before_step
    trainer.wait_until(
        lambda: trainer.log.last_step >= step, what=f"step {step}", poll_s=SLOW_POLL_S
    )
    if disturbance.moment is Moment.TRAINING:
        time.sleep(disturbance.delay * AFTER_STEP_S)
        return
    trainer.wait_until(
        lambda: bool(open_attempts(course.run) - attempts_before),
        what="a save began",
        poll_s=FAST_POLL_S,
    )
    time.sleep(disturbance.delay * AFTER_ATTEMPT_S)


def _strike(trainer: Trainer, disturbance: Disturbance) -> int:
    if disturbance.signal is signal.SIGKILL:
        trainer.kill()
        code, expected = trainer.wait_for_end(), -signal.SIGKILL
    else:
        trainer.terminate()
        code, expected = trainer.wait_for_end(), 128 + signal.SIGTERM
    if code != expected:
        name = disturbance.signal.name
        raise TrainerError(f"at {name} the trainer ended with {code}, not with {expected}")
    return code
