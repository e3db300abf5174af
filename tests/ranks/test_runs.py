"""A run on many ranks: one decision for all, about resuming, saving, keeping and giving up."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import new_place
from _kit.invariants import check_latest, committed
from _kit.invariants import snapshot_url as url_of
from _kit.ranks import (
    TIMEOUT_S,
    WORLD_SIZE,
    Blind,
    Garbled,
    Watched,
    assert_blames,
    assert_is,
    check_steps,
    flip,
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
from waypost.clock import ManualClock
from waypost.testing import run_ranks


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


EVERY_STEP = waypost.EverySteps(1)


def _run(steps: int, tmp_path: Path, place: str = "memory") -> str:
    """A run with a snapshot of each step."""
    run = new_place(place, tmp_path, "run")
    job(train(run, steps, save_every=EVERY_STEP))
    return run


# --- resuming ------------------------------------------------------------------------------------


def test_all_ranks_resume_from_the_newest(tmp_path: Path) -> None:
    """Each with its own part and its own state."""
    run = _run(3, tmp_path)
    assert job(start_only(run)) == [3] * WORLD_SIZE


def test_a_fresh_start_is_one_on_all_ranks(tmp_path: Path) -> None:
    """Nothing is there yet."""
    run = new_place("disk", tmp_path, "run")
    assert job(start_only(run)) == [0] * WORLD_SIZE


@pytest.mark.parametrize("blind", [0, 2, 3])
def test_a_stale_view_of_one_rank_makes_no_second_decision(blind: int, tmp_path: Path) -> None:
    """One looks, all follow: nobody resumes from another step than the others."""
    run = _run(3, tmp_path)

    def place(rank: int) -> Any:
        return seen_through(run, Blind, "LATEST") if rank == blind else run

    assert job(start_only(place, 3)) == [3] * WORLD_SIZE

    def stale(rank: int) -> Any:
        listing = seen_through(run, Blind, "step-000000003", ("list",))
        return listing if rank == blind else run

    steps = job(start_only(stale))
    assert len(set(steps)) == 1
    assert steps[0] == 3 or blind == 0


def test_the_newest_that_one_rank_cannot_see_is_not_passed_over(tmp_path: Path) -> None:
    """It is sound, and that rank's view lags: an error on all, from which a restart recovers."""
    run = _run(3, tmp_path)

    def place(rank: int) -> Any:
        return seen_through(run, Blind, "step-000000003") if rank == 2 else run

    outcomes = run_ranks(WORLD_SIZE, start_only(place))
    assert isinstance(outcomes[2].error, waypost.NotFoundError)
    for outcome in others(outcomes, 2):
        assert_blames(outcome.error, 2)
        assert outcome.waited_s < TIMEOUT_S
    assert set(committed(run)) == {1, 2, 3}
    assert job(start_only(run)) == [3] * WORLD_SIZE


@pytest.mark.parametrize("file", range(WORLD_SIZE))
def test_all_ranks_fall_back_over_damage(file: int, tmp_path: Path) -> None:
    """In the file of one rank, whichever."""
    run = _run(3, tmp_path, "disk")
    (path,) = Path(url_of(run, 3)).rglob(f"model.r{file:05d}-*.safetensors")
    flip(path)
    assert job(start_only(run)) == [2] * WORLD_SIZE


@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_fall_back_over_damage_that_one_sees(rank: int, tmp_path: Path) -> None:
    """The others have read the newest without an error, and take the earlier one all the same."""
    run = _run(3, tmp_path)

    def place(of: int) -> Any:
        return seen_through(run, Garbled, "step-000000003") if of == rank else run

    assert job(start_only(place)) == [2] * WORLD_SIZE


def test_nothing_usable_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    """Nobody starts from zero."""
    run = _run(2, tmp_path)

    def place(of: int) -> Any:
        return seen_through(run, Garbled, "step-") if of == 1 else run

    outcomes = run_ranks(WORLD_SIZE, start_only(place))
    for text in same_errors(outcomes, waypost.ResumeError):
        assert "step-000000001" in text
        assert "step-000000002" in text


@pytest.mark.parametrize(
    ("resume", "kind"),
    [
        ("must", waypost.NotFoundError),
        ("latest", waypost.NotFoundError),
        (7, waypost.NotFoundError),
    ],
)
def test_nothing_there_is_the_same_error_on_all_ranks(
    resume: Any, kind: type[BaseException], tmp_path: Path
) -> None:
    """Where a snapshot was asked for."""
    run = new_place("memory", tmp_path, "run")
    same_errors(run_ranks(WORLD_SIZE, start_only(run, resume=resume)), kind)


def test_a_fresh_start_in_a_run_with_snapshots_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """`resume=False`."""
    run = _run(1, tmp_path)
    same_errors(run_ranks(WORLD_SIZE, start_only(run, resume=False)), waypost.AlreadyExistsError)


def test_a_step_that_is_asked_for_is_resumed_from_on_all_ranks(tmp_path: Path) -> None:
    """By number."""
    run = _run(3, tmp_path)
    assert job(start_only(run, resume=2)) == [2] * WORLD_SIZE


@pytest.mark.parametrize("what", ["run", "resume", "save_every"])
def test_ranks_that_start_with_other_wishes_are_told(what: str, tmp_path: Path) -> None:
    """At construction, with both sides; nothing is made of the run."""
    run = _run(3, tmp_path)

    def body(group: Any) -> None:
        odd = group.rank == 2
        arguments: dict[str, Any] = {"resume": 2 if odd and what == "resume" else 3}
        arguments["save_every"] = waypost.EverySteps(13 if odd and what == "save_every" else 17)
        place = f"{run}-b" if odd and what == "run" else run
        with open_run(place, group, sample(group, 0), **arguments):
            raise AssertionError("started")

    texts = same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError)
    sides = {"run": (run, f"{run}-b"), "resume": ("2", "3"), "save_every": ("13", "17")}[what]
    for text in texts:
        assert sides[0] in text
        assert sides[1] in text


def test_a_state_that_does_not_fit_on_one_rank_is_not_fallen_back_over(tmp_path: Path) -> None:
    """The program has changed; nobody starts."""
    run = _run(2, tmp_path)

    def body(group: Any) -> None:
        state = sample(group, 0)
        if group.rank == 1:
            state["model"]["shared"] = torch.zeros(1)
        with open_run(run, group, state):
            raise AssertionError("started")

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[1].error, waypost.MismatchError)
    for outcome in outcomes:
        assert isinstance(outcome.error, (waypost.MismatchError, waypost.PeerError))
    assert set(committed(run)) == {1, 2}


def test_another_number_of_ranks_goes_on_with_a_function_for_what_each_has(tmp_path: Path) -> None:
    """`reshard=` at the Checkpointer; without it, the error is no reason to fall back."""
    run = _run(2, tmp_path)
    outcomes = run_ranks(3, start_only(run))
    for text in same_errors(outcomes, waypost.MismatchError):
        assert "reshard" in text

    def body(group: Any) -> int:
        state = sample(group, 0)
        reshard = {"own": lambda states, rank, world_size: states[rank]}
        with open_run(run, group, state, reshard=reshard) as checkpointer:
            assert_is(state, group, 2)
            put(state, group, 3)
            checkpointer.step_done()
            checkpointer.save()
            return checkpointer.step

    assert job(body, world_size=3) == [3, 3, 3]
    assert job(start_only(run, 3), world_size=3) == [3, 3, 3]


# --- saving --------------------------------------------------------------------------------------


def test_the_end_is_saved_once_by_all(tmp_path: Path) -> None:
    """`save_on=("end",)`."""
    run = new_place("memory", tmp_path, "run")
    job(train(run, 3, save_on=("end",)))
    check_steps(run, {3: 0})
    check_latest(run)


def test_time_leads_to_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    """Clocks that run at different speeds: one decides."""
    run = new_place("memory", tmp_path, "run")
    pace_s = [30.0, 20.0, 90.0, 1.0]
    in_step = threading.Barrier(WORLD_SIZE)  # as the collectives of a training keep ranks

    def body(group: Any) -> list[int]:
        clock = ManualClock()
        state = sample(group, 0)
        saved = []
        every = waypost.EveryMinutes(1)
        with open_run(run, group, state, save_every=every, clock=clock) as checkpointer:
            for step in range(1, 13):
                put(state, group, step)
                clock.sleep(pace_s[group.rank])
                in_step.wait(10)
                checkpointer.step_done()
                if checkpointer.last_saved == step:
                    saved.append(step)
        return saved

    saved = job(body)
    assert all(steps == saved[0] for steps in saved)
    assert saved[0]
    check_steps(run, dict.fromkeys(saved[0], 0))


def test_epochs_and_steps_lead_to_one_save(tmp_path: Path) -> None:
    """The interval and the epoch's end at one step."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> int:
        state = sample(group, 0)
        policy = waypost.EverySteps(2) | waypost.EveryEpochs(1)
        with open_run(run, group, state, save_every=policy) as checkpointer:
            for step in range(1, 5):
                put(state, group, step)
                checkpointer.step_done()
            checkpointer.epoch_done()
            return checkpointer.epoch

    assert job(body) == [1] * WORLD_SIZE
    check_steps(run, {2: 0, 4: 0})


# --- metrics -------------------------------------------------------------------------------------


def _train_with_metrics(run: str, metrics: Any, **arguments: Any) -> Any:
    arguments = {"save_every": EVERY_STEP, **arguments}

    def body(group: Any) -> None:
        state = sample(group, 0)
        with open_run(run, group, state, **arguments) as checkpointer:
            for step in range(1, 5):
                put(state, group, step)
                checkpointer.step_done(metrics=metrics(group.rank, step))

    return body


def test_the_metrics_of_rank_0_are_stored(tmp_path: Path) -> None:
    """Those of others differ in the last bits, which is no error."""
    run = new_place("memory", tmp_path, "run")
    job(_train_with_metrics(run, lambda rank, step: {"loss": 1.0 / step + 1e-9 * rank}))
    stored = {record.step: dict(record.metrics) for record in waypost.snapshots(run)}
    assert stored == {step: {"loss": 1.0 / step} for step in range(1, 5)}


@pytest.mark.parametrize("odd", [0, 2])
def test_other_names_of_metrics_on_one_rank_are_refused(odd: int, tmp_path: Path) -> None:
    """On all ranks, with both names; nothing is saved."""
    run = new_place("memory", tmp_path, "run")
    body = _train_with_metrics(run, lambda rank, step: {"accuracy" if rank == odd else "loss": 0.5})
    for text in same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError):
        assert "accuracy" in text
        assert "loss" in text
    assert committed(run) == {}


def test_metrics_on_one_rank_only_are_refused(tmp_path: Path) -> None:
    """Whether a rank gives some must not depend on the rank."""
    run = new_place("memory", tmp_path, "run")
    body = _train_with_metrics(run, lambda rank, step: {} if rank else {"loss": 0.5})
    same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError)


def test_the_best_is_the_best_of_rank_0(tmp_path: Path) -> None:
    """Retention by a metric on which the ranks do not agree."""
    run = new_place("memory", tmp_path, "run")
    values = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7}
    body = _train_with_metrics(
        run,
        lambda rank, step: {"loss": values[step] if rank == 0 else 1.0 - values[step]},
        keep=waypost.KeepBest(1, "loss", "min"),
    )
    job(body)
    check_steps(run, {2: 0, 4: 0})


# --- retention -----------------------------------------------------------------------------------


def test_one_rank_alone_removes_snapshots(tmp_path: Path) -> None:
    """No two of them ever remove the same manifest."""
    run = new_place("memory", tmp_path, "run")
    places = [seen_through(run, Watched) for _ in range(WORLD_SIZE)]
    job(train(lambda rank: places[rank], 6, save_every=EVERY_STEP, keep=waypost.KeepLast(2)))
    check_steps(run, {5: 0, 6: 0})
    removed = [
        [path for op, path in place.storage.paths if op == "remove" and "manifest" in path]
        for place in places
    ]
    assert sum(bool(paths) for paths in removed) == 1
    assert sorted(len(paths) for paths in removed) == [0, 0, 0, 4]


@pytest.mark.slow
def test_fifty_saves_with_retention_leave_what_is_kept(tmp_path: Path) -> None:
    """No rank stumbles over what another removes."""
    run = new_place("memory", tmp_path, "run")
    job(train(run, 50, save_every=EVERY_STEP, keep=waypost.KeepLast(1)))
    check_steps(run, {50: 0})


@pytest.mark.parametrize("late", [0, 2])
def test_a_flag_that_is_raised_at_the_very_end_holds_nobody_up(late: int, tmp_path: Path) -> None:
    """Rank 0 wants to save after its last step, when another rank is behind, or far ahead."""
    run = new_place("memory", tmp_path, "run")
    turn = [threading.Event(), threading.Event()]

    def body(group: Any) -> int | None:
        clock = ManualClock()
        state = sample(group, 0)
        every = waypost.EveryMinutes(1)
        with open_run(run, group, state, save_every=every, clock=clock) as checkpointer:
            for step in range(1, 6):
                put(state, group, step)
                if group.rank == late and step == 2:
                    turn[0].wait(10)
                if step == 5 and group.rank == 0:
                    clock.sleep(90.0)
                checkpointer.step_done()
                if step == 5 and group.rank == (1 if late == 0 else 0):
                    turn[0].set()
        return checkpointer.last_saved

    assert len(set(job(body))) == 1


def test_a_flag_meets_ranks_that_wait_in_a_scheduled_save(tmp_path: Path) -> None:
    """Rank 0 is far behind when it wants to save: the others wait for it, and it for them."""
    run = new_place("memory", tmp_path, "run")
    ahead = threading.Barrier(WORLD_SIZE)

    def body(group: Any) -> list[int]:
        clock = ManualClock()
        state = sample(group, 0)
        saved = []
        every = waypost.EverySteps(8) | waypost.EveryMinutes(1)
        with open_run(run, group, state, save_every=every, clock=clock) as checkpointer:
            for step in range(1, 13):
                put(state, group, step)
                if step == (2 if group.rank == 0 else 8):
                    ahead.wait(10)
                if step == 3 and group.rank == 0:
                    clock.sleep(90.0)
                checkpointer.step_done()
                if checkpointer.last_saved == step:
                    saved.append(step)
        return saved

    outcomes = run_ranks(WORLD_SIZE, body)
    saved = [outcome.value for outcome in outcomes]
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert all(steps == saved[0] for steps in saved)
    assert 8 in saved[0]
    assert all(outcome.waited_s < 10 for outcome in outcomes)
