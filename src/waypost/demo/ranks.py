"""``waypost demo --ranks N``: a sharded job, killed rank by rank, and moved to other numbers.

Three trainings with the same seed: one undisturbed; one of which a rank is killed again and again,
each time another one; and one that goes on, in the middle, on other numbers of ranks. On the same
number of ranks every loss, every random draw of every rank and the last snapshot are the same bit
for bit. On another number sums over the ranks are taken in another order, so losses agree within a
tolerance only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import waypost
from waypost.demo.compare import Check, first_difference, flatten
from waypost.demo.trainer import TrainerError

PATIENCE_S: Final = 180.0
POLL_S: Final = 0.005
LOSS_TOLERANCE: Final = 1e-5
"""Largest difference of a loss on another number of ranks. Float32 sums in another order differ in
the 7th digit of losses of about 2, that is 2e-7; what training makes of that was below 1e-6."""


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a rank: steps done before it, the number of ranks, and what it logged."""

    pid: int
    steps_done: int
    world_size: int
    steps: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: who, when, and where the job went on."""

    rank: int
    step: int
    resumed_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCourse:
    """One training of the demo: its folder and its arguments."""

    folder: Path
    seed: int
    save_every: int = 5

    @property
    def run(self) -> Path:
        """The run directory, which belongs to Waypost."""
        return self.folder / "run"

    def lives(self, rank: int) -> list[Life]:
        """Returns the starts of a rank, in order, as its log tells."""
        path = self.folder / f"rank-{rank}.log"
        found: list[Life] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            words = line.split()
            if words[:1] == ["start"] and len(words) == 4:
                found.append(Life(int(words[1]), int(words[2]), int(words[3])))
            elif words[:1] == ["step"] and len(words) == 4:
                found[-1].steps[int(words[1])] = words[2], words[3]
        return found

    def last_step(self, rank: int = 0) -> int:
        """Returns the last step that a rank has logged."""
        return max((step for life in self.lives(rank) for step in life.steps), default=0)


class Job:
    """A running job of several ranks, under ``torchrun``; leaving the context ends all of it."""

    def __init__(self, course: RanksCourse, ranks: int, steps: int) -> None:
        self._course = course
        self._starts = len(course.lives(0))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "waypost.demo.ranks_train"),
            *("--folder", str(course.folder), "--steps", str(steps)),
            *("--seed", str(course.seed), "--save-every", str(course.save_every)),
        ]
        with open(course.folder / "output.txt", "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        """Returns the job itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_for_step(self, step: int) -> None:
        """Returns once rank 0 of this start has logged ``step``."""
        self._wait(lambda: self._has_started() and self._course.last_step() >= step, f"step {step}")

    def kill(self, rank: int) -> None:
        """Kills one rank and returns when the launcher has ended the others."""
        os.kill(self._course.lives(rank)[-1].pid, signal.SIGKILL)
        self._wait_for_end()

    def finish(self) -> None:
        """Returns when the training has ended by itself.

        Raises:
            TrainerError: It failed.
        """
        code = self._wait_for_end()
        if code:
            raise TrainerError(f"the job ended with {code}\n{self._tail()}")

    def _has_started(self) -> bool:
        return len(self._course.lives(0)) > self._starts

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if self._process.poll() is not None:
                raise TrainerError(f"the job ended before {what}\n{self._tail()}")
            if time.monotonic() > deadline_s:
                raise TrainerError(f"no {what} within {PATIENCE_S:.0f} s\n{self._tail()}")
            time.sleep(POLL_S)

    def _wait_for_end(self) -> int:
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise TrainerError(f"no end within {PATIENCE_S:.0f} s\n{self._tail()}") from error

    def _tail(self) -> str:
        lines = (self._course.folder / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join(["its last lines:", *lines[-30:]])


def train_undisturbed(course: RanksCourse, ranks: int, steps: int) -> None:
    """Trains from the first step to the last in one go."""
    with Job(course, ranks, steps) as job:
        job.finish()


def train_killed(
    course: RanksCourse, ranks: int, steps: int, kills: int, tell: Callable[[Kill], None]
) -> list[Kill]:
    """Trains to the last step, with a rank killed now and then, each time the next one."""
    found: list[Kill] = []
    for number in range(kills):
        victim = number % ranks
        with Job(course, ranks, steps) as job:
            job.wait_for_step(steps * (number + 1) // (kills + 1))
            job.kill(victim)
        newest = waypost.latest(str(course.run))
        resumed = 0 if newest is None else waypost.open(newest).step or 0
        found.append(Kill(rank=victim, step=course.last_step(), resumed_from=resumed))
        tell(found[-1])
    train_undisturbed(course, ranks, steps)
    return found


def train_moved(course: RanksCourse, counts: Sequence[int], steps: int) -> None:
    """Trains to the last step, each part on another number of ranks."""
    for number, ranks in enumerate(counts):
        train_undisturbed(course, ranks, steps * (number + 1) // len(counts))


def compare(left: RanksCourse, right: RanksCourse, ranks: int, steps: int) -> list[Check]:
    """Compares, bit for bit, two courses on the same number of ranks."""
    problem = None
    for rank in range(ranks):
        ours, theirs = _all_steps(left, rank), _all_steps(right, rank)
        for step in range(1, steps + 1):
            found = {*ours.get(step, []), *theirs.get(step, [])}
            if len(found) != 1:
                problem = problem or f"rank {rank}, step {step}: {sorted(found)[:3]}"
    checks = [
        Check(title="losses and draws", extent=f"{steps} steps × {ranks} ranks", problem=problem)
    ]
    first, second = (waypost.open(f"{course.run}@latest") for course in (left, right))
    for entry in ("model", "optimizer", "progress"):
        states = [opened.state_dict(entry) for opened in (first, second)]
        checks.append(_compared(entry, *states))
    for rank in range(ranks):
        states = [opened.state_dict("rng", rank=rank) for opened in (first, second)]
        checks.append(_compared(f"random streams of rank {rank}", *states))
    return [*checks, _verified(left), _verified(right)]


def compare_moved(left: RanksCourse, moved: RanksCourse, counts: Sequence[int]) -> Check:
    """Compares the losses of a course that was moved with those of one that was not."""
    ours, theirs = _all_steps(left, 0), _all_steps(moved, 0)
    gaps = {
        step: abs(float.fromhex(next(iter(ours[step]))[0]) - float.fromhex(next(iter(found))[0]))
        for step, found in theirs.items()
    }
    largest = max(gaps.values())
    is_complete = set(theirs) == set(ours)
    problem = None if largest <= LOSS_TOLERANCE and is_complete else f"differ by {largest:.1e}"
    return Check(
        title="losses on " + " → ".join(map(str, counts)) + " ranks",
        extent=f"{len(theirs)} steps",
        problem=problem,
        verdict=f"within {largest:.0e}, of {LOSS_TOLERANCE:.0e} allowed: sums in another order",
    )


def _compared(title: str, left: object, right: object) -> Check:
    one, other = list(flatten(left, title)), list(flatten(right, title))
    return Check(title=title, extent=f"{len(one)} leaves", problem=first_difference(one, other))


def _all_steps(course: RanksCourse, rank: int) -> dict[int, set[tuple[str, str]]]:
    """Returns what a rank has logged of each step, in all of its lives."""
    found: dict[int, set[tuple[str, str]]] = {}
    for life in course.lives(rank):
        for step, said in life.steps.items():
            found.setdefault(step, set()).add(said)
    return found


def _verified(course: RanksCourse) -> Check:
    report = waypost.open(f"{course.run}@latest").verify()
    problem = str(report.problems[0]) if report.problems else None
    return Check(title=f"every byte of {course.folder.name}", extent="verified", problem=problem)
