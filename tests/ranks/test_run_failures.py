"""A run of many ranks that fails, is killed, or is started twice: bounded, told, never mixed."""

import logging
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import new_place
from _kit.invariants import check_latest, committed
from _kit.ranks import (
    TIMEOUT_S,
    WORLD_SIZE,
    Unlocked,
    assert_blames,
    check_steps,
    job,
    open_run,
    others,
    put,
    same_errors,
    sample,
    seen_through,
    start_only,
    train,
)
from waypost.testing import RankFault, run_ranks

EVERY_STEP = waypost.EverySteps(1)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


# --- giving up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("save_on", [(), ("end",), ("exception",), ("end", "exception")], ids=str)
@pytest.mark.parametrize("faulty", [0, 2])
def test_an_exception_of_one_rank_ends_all_with_the_cause(
    faulty: int, save_on: tuple[str, ...], tmp_path: Path
) -> None:
    """The others hear of it at their next save, not at a time-out."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(run, group, state, save_every=EVERY_STEP, save_on=save_on) as checkpointer:
            for step in range(1, 6):
                put(state, group, step)
                if step == 3 and group.rank == faulty:
                    raise ValueError("bad batch 17")
                checkpointer.step_done()

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[faulty].error, ValueError)
    assert not isinstance(outcomes[faulty].error, waypost.WaypostError)
    for outcome in others(outcomes, faulty):
        assert isinstance(outcome.error, waypost.PeerError)
        assert_blames(outcome.error, faulty)
        assert "bad batch 17" in outcome.error.errors[faulty]
        assert "ValueError" in outcome.error.errors[faulty]
        assert outcome.waited_s < TIMEOUT_S
    check_steps(run, {1: 0, 2: 0})
    assert job(start_only(run)) == [2] * WORLD_SIZE


def test_an_exception_of_one_rank_is_heard_of_at_the_end(tmp_path: Path) -> None:
    """No save is due before: the end of the others is not taken for a success."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(run, group, state, save_on=("end",)) as checkpointer:
            for step in range(1, 6):
                if step == 3 and group.rank == 1:
                    raise ValueError("bad batch 17")
                put(state, group, step)
                checkpointer.step_done()

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[1].error, ValueError)
    for outcome in others(outcomes, 1):
        assert isinstance(outcome.error, waypost.PeerError)
        assert "bad batch 17" in str(outcome.error)
    assert committed(run) == {}


def test_an_exception_of_all_ranks_stays_their_own(tmp_path: Path) -> None:
    """All fail at the same step: each sees its own error, in bounded time, and no half snapshot."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(run, group, state, save_every=EVERY_STEP, save_on=("exception",)) as ckpt:
            for step in (1, 2):
                put(state, group, step)
                ckpt.step_done()
            put(state, group, 3)
            raise ValueError(f"the loss is NaN on {group.rank}")

    outcomes = run_ranks(WORLD_SIZE, body)
    for rank, text in enumerate(same_errors(outcomes, ValueError)):
        assert f"NaN on {rank}" in text
        assert outcomes[rank].waited_s <= TIMEOUT_S
    assert set(committed(run)) == {1, 2}


@pytest.mark.parametrize("action", ["raise", "kill", "late"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_faulty_rank_ends_the_run_and_a_restart_goes_on(
    rank: int, action: str, tmp_path: Path
) -> None:
    """Step 3 is not there; the restarted job goes on from step 2 and does it again."""
    run = new_place("memory", tmp_path, "run")
    fault = RankFault(rank=rank, phase="write", action=action, occurrence=3)

    def body(group: Any) -> None:
        place = seen_through(run, Unlocked)  # a dead thread holds its locks, unlike a process
        state = sample(group, 0)
        with open_run(place, group, state, save_every=EVERY_STEP) as checkpointer:
            for step in range(1, 6):
                put(state, group, step)
                checkpointer.step_done()

    outcomes = run_ranks(WORLD_SIZE, body, faults=[fault])
    for outcome in others(outcomes, rank):
        assert_blames(outcome.error, rank)
    check_steps(run, {1: 0, 2: 0})
    restarted = seen_through(run, Unlocked)
    job(train(restarted, 4, salt=1, save_every=EVERY_STEP))
    check_steps(run, {1: 0, 2: 0, 3: 1, 4: 1})


# --- two jobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_second_job_in_the_run_is_refused_on_all_its_ranks(place: str, tmp_path: Path) -> None:
    """The first one trains on."""
    run = new_place(place, tmp_path, "run")
    second: list[Any] = []

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(run, group, state, save_every=EVERY_STEP) as checkpointer:
            put(state, group, 1)
            checkpointer.step_done()
            if group.rank == 0:
                second.extend(run_ranks(WORLD_SIZE, start_only(run)))
            put(state, group, 2)
            checkpointer.step_done()

    job(body)
    same_errors(second, waypost.AlreadyOwnedError)
    check_steps(run, {1: 0, 2: 0})
    assert job(start_only(run)) == [2] * WORLD_SIZE


@pytest.mark.parametrize("witness", [0, 2])
def test_a_job_that_was_replaced_is_fenced_on_all_its_ranks(witness: int, tmp_path: Path) -> None:
    """Locks do not reach the other machine, where it was started again; the old one is told."""
    run = new_place("memory", tmp_path, "run")
    place = seen_through(run, Unlocked)

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(place, group, state, save_every=EVERY_STEP) as checkpointer:
            put(state, group, 1)
            checkpointer.step_done()
            if group.rank == witness:
                job(train(place, 2, salt=1, save_every=EVERY_STEP))
            put(state, group, 2)
            checkpointer.step_done()

    same_errors(run_ranks(WORLD_SIZE, body), waypost.FencedError)
    check_steps(run, {1: 0, 2: 1})


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("phase", ["write", "commit"])
def test_a_late_rank_of_a_replaced_job_commits_nothing(
    phase: str, rank: int, tmp_path: Path
) -> None:
    """It wakes up when the new job has done the same step."""
    run = new_place("memory", tmp_path, "run")
    place = seen_through(run, Unlocked)

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(place, group, state, save_every=EVERY_STEP) as checkpointer:
            for step in (1, 2, 3):
                put(state, group, step)
                try:
                    checkpointer.step_done()
                except waypost.WaypostError:
                    if group.rank == 1:
                        job(train(place, 3, salt=1, save_every=EVERY_STEP))
                    raise

    fault = RankFault(rank=rank, phase=phase, action="late", occurrence=2)
    outcomes = run_ranks(WORLD_SIZE, body, faults=[fault])
    assert all(isinstance(outcome.error, waypost.WaypostError) for outcome in outcomes)
    check_steps(run, {1: 0, 2: 1, 3: 1})
    check_latest(run)
