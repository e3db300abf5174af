"""What can be seen of a training run from outside: its step log and its run directory.

Reads only. Nothing here asks the trainer or the library, so that what it says also holds for a
process that has just been killed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One line of the step log; two are equal when loss and batch agree to the last bit."""

    number: int
    loss: str
    batch: str


@dataclass(slots=True, kw_only=True)
class Incarnation:
    """One life of the trainer: where it went on from and the steps that it logged."""

    steps_done: int
    steps: list[LoggedStep] = field(default_factory=list)


class StepLog:
    """A step log that is read while the trainer still writes it."""

    def __init__(self, path: Path) -> None:
        self.incarnations: list[Incarnation] = []
        self._path = path
        self._offset_bytes = 0

    @property
    def last_step(self) -> int:
        """The newest step of the newest incarnation; 0 before the first."""
        if not self.incarnations:
            return 0
        newest = self.incarnations[-1]
        return newest.steps[-1].number if newest.steps else newest.steps_done

    def read_on(self) -> None:
        """Takes in the lines that were completed since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset_bytes)
                text = file.read()
        except FileNotFoundError:
            return
        complete = text[: text.rfind(b"\n") + 1]
        self._offset_bytes += len(complete)
        for line in complete.decode().splitlines():
            kind, *rest = line.split()
            if kind == "start":
                self.incarnations.append(Incarnation(steps_done=int(rest[1])))
            else:
                step = LoggedStep(number=int(rest[0]), loss=rest[1], batch=rest[2])
                self.incarnations[-1].steps.append(step)


def read_log(path: Path) -> list[Incarnation]:
    """Returns all incarnations of a trainer that no longer runs."""
    log = StepLog(path)
    log.read_on()
    return log.incarnations


def open_attempts(run: Path) -> frozenset[str]:
    """Returns the data directories of attempts whose snapshot has no manifest."""
    return frozenset(
        attempt
        for snapshot in _directories(run, "step-")
        if not os.path.exists(os.path.join(snapshot, "manifest.json"))
        for attempt in _directories(os.path.join(snapshot, "data"), "")
    )


def newest_committed(run: Path) -> int:
    """Returns the step of the newest snapshot that has a manifest; 0 when there is none."""
    steps = [
        int(snapshot.rpartition("-")[2])
        for snapshot in _directories(run, "step-")
        if os.path.exists(os.path.join(snapshot, "manifest.json"))
    ]
    return max(steps, default=0)


def _directories(parent: str | Path, prefix: str) -> list[str]:
    # A directory may vanish under the reader when the trainer removes an old snapshot.
    try:
        with os.scandir(parent) as items:
            return [item.path for item in items if item.name.startswith(prefix) and item.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
