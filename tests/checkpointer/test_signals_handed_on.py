"""A signal is never swallowed: it ends in `Preempted`, in the program's own handler, or both."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import assert_same, die, in_child
from _kit.invariants import committed, put, read_state, sample_state, save_step, snapshot_url

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever a test does, the handlers of the session come back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def _mine(number: int) -> list[int]:
    """Installs a handler of the program's own; returns the signals that reached it."""
    got: list[int] = []
    signal.signal(number, lambda received, frame: got.append(received))
    return got


def _run(tmp_path: Path, name: str = "run") -> str:
    return str(tmp_path / name)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_before_the_end_of_the_block_ends_in_preempted(
    number: signal.Signals, tmp_path: Path
) -> None:
    """No boundary comes any more: saved, then the exit code of the signal."""
    run = _run(tmp_path)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(run, state) as ckpt:
            put(state, 1)
            ckpt.step_done()
            _send(number)

    with pytest.raises(waypost.Preempted) as caught:
        program()
    assert caught.value.signal == number
    assert caught.value.code == 128 + number
    assert caught.value.step == 1
    assert caught.value.url == snapshot_url(run, 1)
    assert_same(read_state(snapshot_url(run, 1)), sample_state(1))


@pytest.mark.parametrize("saved", [True, False])
def test_preempted_at_the_end_also_when_nothing_is_left_to_save(
    saved: bool, tmp_path: Path
) -> None:
    """The last step was saved already, or the end saves nothing of its own."""
    run = _run(tmp_path)
    state = sample_state(0)
    save_on = ("signal", "end") if saved else ("signal",)

    def program() -> None:
        with waypost.Checkpointer(run, state, save_on=save_on) as checkpointer:
            put(state, 1)
            checkpointer.step_done()
            if saved:
                checkpointer.save()
            _send(signal.SIGTERM)

    with pytest.raises(waypost.Preempted) as caught:
        program()
    assert sorted(committed(run)) == [1]
    assert caught.value.url == snapshot_url(run, 1)


def test_handlers_are_back_after_preempted_at_the_end(tmp_path: Path) -> None:
    """The run is given up, too."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(waypost.Preempted), waypost.Checkpointer(_run(tmp_path), sample_state(0)):
        _send(signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    with waypost.Checkpointer(_run(tmp_path), sample_state(0), save_on=()):
        pass


def test_the_trainings_own_error_is_the_one_seen(tmp_path: Path) -> None:
    """A signal and then an exception: the exception leaves the block, and the state is saved."""
    run = _run(tmp_path)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(run, state) as ckpt:
            put(state, 1)
            ckpt.step_done()
            _send(signal.SIGTERM)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        program()
    assert sorted(committed(run)) == [1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_handler_of_the_program_is_called_too(number: signal.Signals, tmp_path: Path) -> None:
    """Once, with the signal; and the run stops as ever."""
    got = _mine(number)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(_run(tmp_path), state) as ckpt:
            _send(number)
            assert got == [number]
            ckpt.step_done()

    with pytest.raises(waypost.Preempted):
        program()
    assert got == [number]


def test_an_ignored_signal_is_still_a_signal_for_the_run(tmp_path: Path) -> None:
    """Under nohup or a launcher that ignores it: the Checkpointer watches, nothing is called."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(_run(tmp_path), state) as ckpt:
            _send(signal.SIGUSR1)
            ckpt.step_done()

    with pytest.raises(waypost.Preempted):
        program()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_ctrl_c_does_not_break_the_step_in_progress(tmp_path: Path) -> None:
    """Python's own handler, which raises KeyboardInterrupt, is not called for the first one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = _run(tmp_path)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(run, state) as checkpointer:
            _send(signal.SIGINT)
            put(state, 1)
            checkpointer.step_done()

    with pytest.raises(waypost.Preempted):
        program()
    assert sorted(committed(run)) == [1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_closed_in_any_order_leave_the_programs_handler(
    number: signal.Signals, order: tuple[int, int], tmp_path: Path
) -> None:
    """A signal after both reaches the program, and only it."""
    got = _mine(number)
    both = [waypost.Checkpointer(_run(tmp_path, name), sample_state(0)) for name in "ab"]
    for index in order:
        both[index].close()
    _send(number)
    assert got == [number]
    assert not any(checkpointer.should_stop for checkpointer in both)


def test_one_of_two_closed_leaves_the_other_watching(tmp_path: Path) -> None:
    """The one that is still open notices; the program's handler is called too."""
    got = _mine(signal.SIGUSR1)
    first = waypost.Checkpointer(_run(tmp_path, "a"), sample_state(0))
    second = waypost.Checkpointer(_run(tmp_path, "b"), sample_state(0))
    first.close()
    _send(signal.SIGUSR1)
    assert second.should_stop
    assert got == [signal.SIGUSR1]
    second.close()


def test_both_of_two_notice_one_signal(tmp_path: Path) -> None:
    """Two runs in one program stop together."""
    got = _mine(signal.SIGUSR1)
    both = [waypost.Checkpointer(_run(tmp_path, name), sample_state(0)) for name in "ab"]
    _send(signal.SIGUSR1)
    assert all(checkpointer.should_stop for checkpointer in both)
    assert got == [signal.SIGUSR1]
    for checkpointer in both:
        checkpointer.close()


def test_one_that_was_dropped_hands_signals_on(tmp_path: Path) -> None:
    """Without close, out of reach: the program's handler gets the signal."""
    got = _mine(signal.SIGTERM)
    checkpointer: Any = waypost.Checkpointer(_run(tmp_path), sample_state(0))
    del checkpointer
    gc.collect()
    _send(signal.SIGTERM)
    assert got == [signal.SIGTERM]


@pytest.mark.parametrize("how", ["closed out of order", "dropped"])
@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
def test_without_a_handler_the_process_ends_by_the_signal(
    number: signal.Signals, how: str, tmp_path: Path
) -> None:
    """The default action of the system, at the first signal."""

    def program() -> None:
        signal.signal(number, signal.SIG_DFL)
        first: Any = waypost.Checkpointer(_run(tmp_path, "a"), sample_state(0))
        if how == "dropped":
            del first
            gc.collect()
        else:
            second = waypost.Checkpointer(_run(tmp_path, "b"), sample_state(0))
            first.close()
            second.close()
        _send(number)
        die()

    assert in_child(program).signal == number


def test_a_dropped_one_does_not_swallow_a_keyboard_interrupt(tmp_path: Path) -> None:
    """Ctrl-C is an exception again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    checkpointer: Any = waypost.Checkpointer(_run(tmp_path), sample_state(0))
    del checkpointer
    gc.collect()
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)


@pytest.mark.parametrize("boundary", ["step", "epoch", "end"])
def test_preempted_names_a_snapshot_that_is_there(boundary: str, tmp_path: Path) -> None:
    """Also when the run was started from a snapshot of another one and did nothing yet."""
    other, run = _run(tmp_path, "other"), _run(tmp_path)
    save_step(other, 2)
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(run, state, resume=f"{other}@2") as checkpointer:
            _send(signal.SIGTERM)
            if boundary == "step":
                checkpointer.step_done()
            elif boundary == "epoch":
                checkpointer.epoch_done()

    with pytest.raises(waypost.Preempted) as caught:
        program()
    snapshot = waypost.open(caught.value.url)
    assert snapshot.step == caught.value.step == (3 if boundary == "step" else 2)
    assert snapshot.verify().ok
