"""The trainer as a process: started by one command, watched from outside, ended by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from waypost.demo.watch import StepLog

PATIENCE_S = 120.0  # a start takes 3 to 10 s; a machine under load may take several times that
TAIL_LINES = 15  # of the trainer's own output, when it failed


class TrainerError(Exception):
    """The trainer did something else than it was expected to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One training run of the demo: its command and its places on disk."""

    directory: Path
    steps: int
    seed: int
    save_every: int
    forget: str | None = None

    @property
    def run(self) -> Path:
        """The run directory, which belongs to Waypost."""
        return self.directory / "run"

    @property
    def log(self) -> Path:
        """The trainer's step log."""
        return self.directory / "steps.log"

    @property
    def output(self) -> Path:
        """What the trainer printed, all incarnations together."""
        return self.directory / "output.log"

    @property
    def command(self) -> list[str]:
        """The command of the first start and of every restart."""
        arguments = {
            "--run": self.run,
            "--log": self.log,
            "--steps": self.steps,
            "--seed": self.seed,
            "--save-every": self.save_every,
        }
        if self.forget:
            arguments["--forget"] = self.forget
        words = [str(word) for pair in arguments.items() for word in pair]
        return [sys.executable, "-m", "waypost.demo.train", *words]


class Trainer:
    """A running trainer with a process group of its own; leaving the context ends all of it."""

    def __init__(self, course: Course) -> None:
        self.log = StepLog(course.log)
        self.log.read_on()
        self._course = course
        self._earlier_starts = len(self.log.incarnations)
        self._started_s = time.monotonic()
        with open(course.output, "ab") as output:
            self._process = subprocess.Popen(
                course.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Trainer:
        """Returns the trainer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the trainer and its data workers if they still run."""
        self.kill()

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started_s

    @property
    def is_training(self) -> bool:
        """True once this incarnation has logged that it starts to train."""
        return len(self.log.incarnations) > self._earlier_starts

    def wait_until(self, condition: Callable[[], bool], *, what: str, poll_s: float) -> None:
        """Returns once the condition holds.

        Raises:
            TrainerError: the trainer ended first, or did not get there within ``PATIENCE_S``.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            code = self._process.poll()
            if code is not None:
                raise TrainerError(f"the trainer ended with {code} before {what}\n{self._tail()}")
            if time.monotonic() > deadline_s:
                raise TrainerError(f"no {what} within {PATIENCE_S:.0f} s\n{self._tail()}")
            time.sleep(poll_s)
            self.log.read_on()

    def wait_for_start(self) -> None:
        """Returns once this incarnation has restored its state."""
        self.wait_until(lambda: self.is_training, what="training began", poll_s=0.005)

    def wait_for_end(self) -> int:
        """Returns the exit code, once the trainer has ended by itself."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise TrainerError(f"no end within {PATIENCE_S:.0f} s\n{self._tail()}") from error
        self.log.read_on()
        return code

    def wait_for_success(self) -> None:
        """Returns once the trainer has ended with 0.

        Raises:
            TrainerError: it ended with another code.
        """
        code = self.wait_for_end()
        if code != 0:
            raise TrainerError(f"the trainer ended with {code}\n{self._tail()}")

    def kill(self) -> None:
        """Ends the trainer and its data workers at once, by SIGKILL; nothing if it has ended."""
        if self._process.poll() is None:
            # The group outlives its leader until the leader is waited for, so its id is still ours.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.log.read_on()

    def terminate(self) -> None:
        """Sends SIGTERM to the trainer only, as ``kill`` and most schedulers do."""
        self._process.terminate()

    def _tail(self) -> str:
        lines = self._course.output.read_text(errors="replace").splitlines()
        return "\n".join(["its last lines:", *lines[-TAIL_LINES:]])
