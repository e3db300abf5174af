"""Which snapshots a run goes on from: an error is no damage, and a choice is not taken back."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import assert_same, new_place
from _kit.faults import at, calls_of
from _kit.invariants import (
    advance,
    committed,
    put,
    read_state,
    sample_state,
    save_step,
    snapshot_url,
)
from waypost.testing import Fault, faulty


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


def _run(steps: int, place: str = "memory", tmp_path: Path = Path(), salt: int = 0) -> str:
    """A run with a snapshot of each step; `salt` tells the states of two runs apart."""
    run = new_place(place, tmp_path, "run")
    _train(run, steps, salt)
    return run


def _train(run: Any, to: int, salt: int = 0, **arguments: Any) -> waypost.Checkpointer:
    arguments = {"save_every": waypost.EverySteps(1), "save_on": (), **arguments}
    state = sample_state(0)
    with waypost.Checkpointer(run, state, **arguments) as checkpointer:
        while checkpointer.step < to:
            put(state, checkpointer.step + 1 + salt)
            checkpointer.step_done()
    return checkpointer


def _start(run: Any, **arguments: Any) -> tuple[int, dict[str, Any]]:
    """Where a start that does nothing begins, and with which state."""
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=(), **arguments) as checkpointer:
        return checkpointer.step, state


def _damage(run: str, step: int) -> Path:
    (file,) = Path(snapshot_url(run, step)).rglob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def _mend(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


START_CALLS = len(calls_of(_run(3), _start))


@pytest.mark.parametrize("call", range(1, START_CALLS + 1))
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE], ids=["EIO", "EMFILE"])
def test_one_failing_call_at_start_costs_no_snapshot(call: int, number: int) -> None:
    """The start is an error or goes on from the newest; so does every later start."""
    run = _run(3)
    try:
        step, _ = _start(faulty(run, at(call, number=number)))
    except waypost.WaypostError:
        pass
    else:
        assert step == 3
    step, state = _start(run)
    assert step == 3
    assert_same(state, sample_state(3))


@pytest.mark.parametrize("op", ["open", "read_at"])
@pytest.mark.parametrize("resume", ["auto", "must", "latest"])
def test_a_newest_snapshot_that_cannot_be_read_is_an_error(op: str, resume: str) -> None:
    """It may be sound: the message names it, and no older one is taken for it."""
    run = _run(3)
    place = faulty(run, Fault(op=op, call=1, errno=errno.EIO))
    with pytest.raises(waypost.StorageError, match="step-000000003"):
        _start(place, resume=resume)
    assert _start(run)[0] == 3


@pytest.mark.parametrize("op", ["open", "read_at"])
def test_a_storage_that_fails_for_good_does_not_empty_the_run(op: str) -> None:
    """Not one of the snapshots can be read: an error, and all are there afterwards."""
    run = _run(3)
    with pytest.raises(waypost.StorageError):
        _start(faulty(run, Fault(op=op, call=1, errno=errno.EIO, and_later=True)))
    assert sorted(committed(run)) == [1, 2, 3]
    assert _start(run)[0] == 3


def test_falling_back_over_damage_gives_nothing_up_yet(tmp_path: Path) -> None:
    """A start that saves nothing: once mended, the newest is the newest again."""
    run = _run(3, "disk", tmp_path)
    file = _damage(run, 3)
    assert _start(run)[0] == 2
    _mend(file)
    step, state = _start(run)
    assert step == 3
    assert_same(state, sample_state(3))


def test_training_on_after_damage_gives_the_passed_over_up(tmp_path: Path) -> None:
    """With the first commit the new line is the run; a mended later snapshot is of the old one."""
    run = _run(4, "disk", tmp_path)
    files = [_damage(run, step) for step in (3, 4)]
    _train(run, 3, salt=100)
    _mend(files[1])
    step, state = _start(run)
    assert step == 3
    assert_same(state["model"], sample_state(103)["model"])
    newest = {record.step: record for record in waypost.snapshots(run)}
    assert newest[4].is_superseded
    assert not newest[3].is_superseded


def test_what_is_trained_from_another_run_goes_on() -> None:
    """Started from a snapshot of another run: the run's own older line does not come back."""
    other, run = _run(5, salt=100), _run(6)
    _train(run, 4, salt=100, resume=f"{other}@2")
    step, state = _start(run)
    assert step == 4
    assert_same(state["model"], sample_state(104)["model"])
    superseded = {record.step for record in waypost.snapshots(run) if record.is_superseded}
    assert superseded >= {5, 6}
    latest = waypost.latest(run)
    assert latest is not None
    assert latest.endswith("step-000000004")


def test_the_other_run_is_not_changed() -> None:
    """Neither its snapshots nor where it goes on from."""
    other, run = _run(5), _run(6, salt=100)
    _train(run, 4, resume=f"{other}@2")
    assert sorted(committed(other)) == [1, 2, 3, 4, 5]
    assert _start(other)[0] == 5


def test_retention_after_a_start_from_another_run_keeps_the_new_line() -> None:
    """KeepLast(1): the snapshot just saved, not the newest number of a line given up."""
    other, run = _run(5, salt=100), _run(6)
    state = sample_state(0)
    with waypost.Checkpointer(
        run, state, resume=f"{other}@2", keep=waypost.KeepLast(1), save_on=()
    ) as checkpointer:
        put(state, 103)
        checkpointer.step_done()
        receipt = checkpointer.save()
        assert checkpointer.last_saved == 3
        assert receipt.url == committed(run)[3]
    step, state = _start(run)
    assert step == 3
    assert_same(state["model"], sample_state(103)["model"])


@pytest.mark.parametrize("resume", [2, "url"])
def test_a_chosen_step_of_the_run_itself_is_gone_on_from(resume: Any) -> None:
    """By number or by URL, with retention."""
    run = _run(6)
    resume = resume if resume == 2 else snapshot_url(run, 2)
    _train(run, 3, salt=100, resume=resume, keep=waypost.KeepLast(1))
    step, state = _start(run)
    assert step == 3
    assert_same(state["model"], sample_state(103)["model"])


def test_a_snapshot_saved_by_hand_does_not_push_out_the_runs_own(tmp_path: Path) -> None:
    """KeepLast(1) in a run that holds a plain snapshot of a later step."""
    run = new_place("disk", tmp_path, "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, keep=waypost.KeepLast(1), save_on=()) as checkpointer:
        save_step(run, 100)
        for step in (1, 2):
            put(state, step)
            checkpointer.step_done()
            checkpointer.save()
            assert step in committed(run)
            assert_same(read_state(snapshot_url(run, step)), sample_state(step))
    assert sorted(committed(run)) == [2, 100]


def test_a_copied_snapshot_of_another_run_does_not_push_out_the_runs_own(tmp_path: Path) -> None:
    """Nor is it counted, nor removed."""
    other, run = _run(9, "disk", tmp_path), new_place("disk", tmp_path, "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, keep=waypost.KeepLast(2), save_on=()) as checkpointer:
        shutil.copytree(snapshot_url(other, 9), snapshot_url(run, 9))
        for step in (1, 2, 3):
            put(state, step)
            checkpointer.step_done()
            checkpointer.save()
            assert step in committed(run)
    assert sorted(committed(run)) == [2, 3, 9]


def test_prune_counts_the_runs_own_snapshots(tmp_path: Path) -> None:
    """The command by hand decides as the run does."""
    other, run = _run(9, "disk", tmp_path), _run(3, "disk", tmp_path)
    shutil.copytree(snapshot_url(other, 9), snapshot_url(run, 9))
    waypost.prune(run, waypost.KeepLast(1), dry_run=False)
    assert sorted(committed(run)) == [3, 9]


def _calls_of_last_save(steps: int, **arguments: Any) -> list[str]:
    """The storage calls of the save at `steps`, in a run with all steps before it."""
    place = faulty(new_place("memory", Path(), "run"))
    state = sample_state(0)
    with waypost.Checkpointer(place, state, save_on=(), **arguments) as checkpointer:
        for step in range(1, steps + 1):
            put(state, step)
            checkpointer.step_done()
            before = len(place.calls)
            checkpointer.save()
    return place.calls[before:]


def test_a_save_costs_the_same_however_many_snapshots_there_are() -> None:
    """Where everything is kept, no save looks at the others."""
    assert len(_calls_of_last_save(30)) == len(_calls_of_last_save(5))


def test_a_save_reads_each_snapshot_at_most_once_to_decide_what_to_keep() -> None:
    """Where retention has to know them."""
    keep = waypost.KeepLast(100)
    few = _calls_of_last_save(5, keep=keep)
    many = _calls_of_last_save(30, keep=keep)
    for op in {*few, *many}:
        assert many.count(op) - few.count(op) <= 25, op
    assert many.count("read") - few.count("read") <= 25


def test_the_save_after_a_fallback_is_the_newest(tmp_path: Path) -> None:
    """Fallen back from 3 to 2, trained to 4: 4 is the newest, with the state of the new line."""
    run = _run(3, "disk", tmp_path)
    _damage(run, 3)
    advance(run, 4)
    step, state = _start(run)
    assert step == 4
    assert_same(state, sample_state(4))
