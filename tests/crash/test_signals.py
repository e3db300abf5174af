"""Signals: a flag in the handler, a save at the next step, `Preempted`; the second one leaves."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, die, in_child
from _kit.invariants import (
    advance,
    check_next_save,
    check_run,
    committed,
    put,
    read_state,
    sample_state,
    snapshot_url,
)

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever a test does, the handlers of the session come back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


def _preempt(run: str, number: int, **arguments: Any) -> waypost.Preempted:
    """Two steps, then the signal during the third; the Preempted that ends the run."""
    state = sample_state(0)
    try:
        with waypost.Checkpointer(run, state, **arguments) as checkpointer:
            for step in (1, 2, 3, 4):
                put(state, step)
                if step == 3:
                    os.kill(os.getpid(), number)
                    assert checkpointer.should_stop
                    assert 3 not in committed(run), "the handler itself must not save"
                checkpointer.step_done()
    except waypost.Preempted as preempted:
        return preempted
    raise AssertionError("the signal was not noticed")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_saves_at_the_next_step_and_ends(number: signal.Signals, tmp_path: Path) -> None:
    """The step under way is finished and saved; the exit code says which signal it was."""
    run = str(tmp_path / "run")
    preempted = _preempt(run, number)
    assert isinstance(preempted, (waypost.WaypostError, SystemExit))
    assert isinstance(preempted, SystemExit)
    assert preempted.code == 128 + number
    assert preempted.signal == number
    assert preempted.step == 3
    assert preempted.url == snapshot_url(run, 3)
    assert sorted(committed(run)) == [3]
    assert_same(read_state(snapshot_url(run, 3)), sample_state(3))


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_handlers_are_put_back(number: signal.Signals, tmp_path: Path) -> None:
    """After the with block the handlers are those from before it."""
    before = signal.getsignal(number)
    with waypost.Checkpointer(str(tmp_path / "run"), sample_state(0), save_on=("signal",)):
        assert signal.getsignal(number) is not before
    assert signal.getsignal(number) is before


def test_without_signal_in_save_on_handlers_are_not_touched(tmp_path: Path) -> None:
    """`save_on=("end",)` leaves all signals to the program."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with waypost.Checkpointer(str(tmp_path / "run"), sample_state(0), save_on=("end",)):
        assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_the_exit_code_reaches_the_shell(tmp_path: Path) -> None:
    """An unhandled Preempted ends the process with 128 + the signal's number."""
    outcome = in_child(lambda: _raise(_preempt(str(tmp_path / "run"), signal.SIGTERM)))
    assert outcome.exit_code == 128 + signal.SIGTERM


def _raise(error: BaseException) -> None:
    raise error


def test_a_signal_before_the_first_step_saves_after_it(tmp_path: Path) -> None:
    """A signal during start-up is not lost."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state) as checkpointer:
        os.kill(os.getpid(), signal.SIGTERM)
        put(state, 1)
        with pytest.raises(waypost.Preempted):
            checkpointer.step_done()
    assert sorted(committed(run)) == [1]


def test_a_step_that_was_saved_anyway_is_not_saved_twice(tmp_path: Path) -> None:
    """The interval and the signal meet at one step: one snapshot."""
    run = str(tmp_path / "run")
    preempted = _preempt(run, signal.SIGTERM, save_every=waypost.EverySteps(1))
    assert preempted.step == 3
    assert sorted(committed(run)) == [1, 2, 3]


def test_preempted_is_not_saved_again_as_an_exception(tmp_path: Path) -> None:
    """Leaving the with block by Preempted adds no snapshot with the reason "exception"."""
    run = str(tmp_path / "run")
    preempted = _preempt(run, signal.SIGUSR1, save_on=("end", "signal", "exception"))
    (record,) = waypost.snapshots(run)
    assert record.step == preempted.step
    assert "exception" not in record.reason


def test_a_swallowed_preemption_does_not_lose_the_state(tmp_path: Path) -> None:
    """A loop that catches everything: what was saved is whole, and the stop is still visible."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=("signal",)) as checkpointer:
        put(state, 1)
        os.kill(os.getpid(), signal.SIGUSR1)
        with contextlib.suppress(waypost.WaypostError):
            checkpointer.step_done()
        assert checkpointer.should_stop
    check_run(run, must={1}, may={1})


def test_a_second_signal_leaves_at_once_with_nothing_corrupt(tmp_path: Path) -> None:
    """The step never ends: the second signal ends the process; earlier snapshots are whole."""
    run = str(tmp_path / "run")
    advance(run, 2)

    def stuck() -> None:
        state = sample_state(0)
        with waypost.Checkpointer(run, state):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            die()

    outcome = in_child(stuck)
    assert not outcome.was_killed, "the second signal did not end the process"
    assert outcome.signal == signal.SIGTERM or outcome.exit_code == 128 + signal.SIGTERM
    check_run(run, must={2}, may={2})
    check_next_save(run, 5)


def test_a_second_keyboard_interrupt_leaves_at_once(tmp_path: Path) -> None:
    """Ctrl-C twice stops a hanging step."""
    run = str(tmp_path / "run")

    def stuck() -> None:
        state = sample_state(0)
        with waypost.Checkpointer(run, state):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            die()

    outcome = in_child(stuck)
    assert not outcome.was_killed
    assert outcome.exit_code != 0
    check_next_save(run, 5)


def test_should_stop_is_visible_between_steps(tmp_path: Path) -> None:
    """An evaluation loop can ask; without a signal the answer is no."""
    with waypost.Checkpointer(str(tmp_path / "run"), sample_state(0), save_on=("signal",)) as ckpt:
        assert not ckpt.should_stop
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.should_stop


def test_a_process_killed_right_after_preemption_resumes_exactly(tmp_path: Path) -> None:
    """Preempted by a child, resumed by another process: the step after the preempted one."""
    run = str(tmp_path / "run")
    in_child(lambda: _preempt(run, signal.SIGTERM).step).expect_result()
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        assert checkpointer.step == 3
    assert_same(state, sample_state(3))
