"""An epoch that was counted is never repeated, whichever save it falls together with."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import new_place
from _kit.invariants import committed


def _counters(run: str, **arguments: Any) -> tuple[int, int]:
    """Step and epoch that the next start goes on from."""
    progress = waypost.Progress()
    with waypost.Checkpointer(
        run, {"progress": progress, "n": {"k": 0}}, save_on=(), **arguments
    ) as checkpointer:
        return checkpointer.step, checkpointer.epoch


def _epoch(checkpointer: waypost.Checkpointer, steps: int = 4) -> None:
    for _ in range(steps):
        checkpointer.step_done()
    checkpointer.epoch_done()


def _state() -> dict[str, Any]:
    return {"progress": waypost.Progress(), "n": {"k": 0}}


POLICIES: dict[str, Any] = {
    "none": lambda: None,
    "every step": lambda: waypost.EverySteps(1),
    "the epoch's steps": lambda: waypost.EverySteps(4),
    "another interval": lambda: waypost.EverySteps(3),
    "every epoch": lambda: waypost.EveryEpochs(1),
    "every second epoch": lambda: waypost.EveryEpochs(2),
    "both": lambda: waypost.EverySteps(4) | waypost.EveryEpochs(1),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_end_after_an_epoch_keeps_the_epoch(policy: Any, epochs: int) -> None:
    """Also when its last step was saved before the epoch was counted."""
    run = new_place("memory", Path(), "run")
    with waypost.Checkpointer(run, _state(), save_every=policy()) as checkpointer:
        for _ in range(epochs):
            _epoch(checkpointer)
    assert _counters(run) == (4 * epochs, epochs)
    assert max(committed(run)) == 4 * epochs


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_signal_before_an_epoch_is_counted_keeps_the_epoch(policy: Any, tmp_path: Path) -> None:
    """The step was saved already; what `Preempted` says is saved has the epoch in it."""
    run = str(tmp_path / "run")

    def program() -> None:
        with waypost.Checkpointer(run, _state(), save_every=policy()) as checkpointer:
            for _ in range(4):
                checkpointer.step_done()
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.epoch_done()

    with pytest.raises(waypost.Preempted) as caught:
        program()
    assert _counters(run) == (4, 1)
    assert waypost.open(caught.value.url).step == 4


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_exception_after_an_epoch_keeps_the_epoch(policy: Any, tmp_path: Path) -> None:
    """As the end does."""
    run = str(tmp_path / "run")

    def program() -> None:
        with waypost.Checkpointer(run, _state(), save_every=policy()) as checkpointer:
            _epoch(checkpointer)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        program()
    assert _counters(run) == (4, 1)


def test_what_changed_between_the_last_step_and_the_epoch_is_saved(tmp_path: Path) -> None:
    """A scheduler that steps once an epoch, after the save of the epoch's last step."""
    run = str(tmp_path / "run")
    state = _state()
    with waypost.Checkpointer(run, state, save_every=waypost.EverySteps(4)) as checkpointer:
        for _ in range(4):
            checkpointer.step_done()
        state["n"]["k"] = 5
        checkpointer.epoch_done()
    assert waypost.open(f"{run}@latest").state_dict("n") == {"k": 5}


def test_epochs_count_on_after_a_resume(tmp_path: Path) -> None:
    """Three runs of one epoch are three epochs."""
    run = str(tmp_path / "run")
    for epoch in (1, 2, 3):
        with waypost.Checkpointer(run, _state(), save_every=waypost.EverySteps(4)) as checkpointer:
            assert checkpointer.epoch == epoch - 1
            _epoch(checkpointer)
    assert _counters(run) == (12, 3)


def test_an_epoch_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    """Nothing was counted since: the end adds no save."""
    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, _state(), save_every=waypost.EveryEpochs(1)) as checkpointer:
        _epoch(checkpointer)
        (saved,) = waypost.snapshots(run)
    (record,) = waypost.snapshots(run)
    assert record.attempt == saved.attempt


def test_epochs_without_steps_are_kept(tmp_path: Path) -> None:
    """A loop that counts only epochs."""
    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, _state()) as checkpointer:
        for _ in range(3):
            checkpointer.epoch_done()
    assert _counters(run) == (0, 3)
