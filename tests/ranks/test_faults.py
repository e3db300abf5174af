"""One rank fails, dies or is late, at every phase: all others know who and why, in bounded time.

Nothing is published, what was there stays, and a restarted job does the same step again.
"""

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import files_under, new_place
from _kit.invariants import check_debris, committed
from _kit.invariants import snapshot_url as url_of
from _kit.ranks import (
    LOAD_PHASES,
    SAVE_PHASES,
    TIMEOUT_S,
    WORLD_SIZE,
    assert_blames,
    assert_is,
    blamed,
    check_load,
    check_snapshot,
    check_steps,
    job,
    load,
    options,
    others,
    plain,
    same_errors,
    sample,
    save,
    save_job,
    seen_through,
)
from waypost.testing import FaultyStorage, RankFault, run_ranks

ACTIONS = ("raise", "kill", "late")
FAULTY_RANKS = (0, 1, WORLD_SIZE - 1)
SAMPLE_SIZE = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """Which rank fails, where and how."""

    phase: str
    action: str
    rank: int

    @property
    def fault(self) -> RankFault:
        """What the harness does."""
        return RankFault(rank=self.rank, phase=self.phase, action=self.action)

    @property
    def may_publish(self) -> bool:
        """Whether the fault may come after the commit."""
        return self.phase == "depart" or (self.phase == "commit" and self.rank == 0)

    def __str__(self) -> str:
        return f"{self.phase}-{self.action}-{self.rank}"


def _cases(phases: tuple[str, ...]) -> list[Case]:
    return [
        Case(phase, action, rank) for phase in phases for action in ACTIONS for rank in FAULTY_RANKS
    ]


SAVE_CASES = _cases(SAVE_PHASES)
LOAD_CASES = _cases(LOAD_PHASES)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


def _check_outcomes(outcomes: list[Any], case: Case) -> None:
    """The faulty rank has its own error; all others name it and why, within the time-out."""
    faulty = outcomes[case.rank]
    assert faulty.is_killed == (case.action == "kill")
    if case.action == "raise":
        assert isinstance(faulty.error, OSError)
    if case.action == "late" and case.phase != "depart":
        assert isinstance(faulty.error, (waypost.PeerError, waypost.CoordinationTimeoutError)), (
            repr(faulty.error)
        )
    for outcome in others(outcomes, case.rank):
        assert_blames(outcome.error, case.rank)
        assert outcome.waited_s <= TIMEOUT_S
        if case.action == "raise":
            assert isinstance(outcome.error, waypost.PeerError)
            cause = faulty.error.strerror or str(faulty.error)
            assert cause in outcome.error.errors[case.rank]
            assert cause in str(outcome.error)
            assert outcome.waited_s < TIMEOUT_S, "an error that is known was waited for"
        else:
            assert isinstance(outcome.error, waypost.CoordinationTimeoutError)
            assert any(phase in str(outcome.error) for phase in SAVE_PHASES + LOAD_PHASES)


def _check_save(run: str, case: Case) -> None:
    """A save of step 2 with the fault, then the restarted job."""
    save_job(url_of(run, 1), 1)
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(url_of(run, 2), group, 2), faults=[case.fault]
    )
    _check_outcomes(outcomes, case)
    is_published = 2 in committed(run)
    assert case.may_publish or not is_published
    if case.phase == "depart":
        assert is_published
        for outcome in others(outcomes, case.rank):
            assert "committed" in str(outcome.error)
    check_steps(run, {1: 0, 2: 0} if is_published else {1: 0})
    save_job(url_of(run, 2), 2, salt=1, overwrite=is_published)
    check_steps(run, {1: 0, 2: 1})
    check_load(url_of(run, 1), 1)
    check_load(url_of(run, 2), 2, salt=1)


def _check_load(url: str, case: Case) -> None:
    """A load with the fault, then the restarted job."""
    save_job(url, 1)
    states: dict[int, Any] = {}

    def body(group: Any) -> None:
        state = states[group.rank] = sample(group, 0)
        waypost.load(url, state, process_group=group, options=options())

    outcomes = run_ranks(WORLD_SIZE, body, faults=[case.fault])
    _check_outcomes(outcomes, case)
    if case.phase in ("describe", "plan"):
        job(lambda group: assert_is(states[group.rank], group, 0))
    check_snapshot(url, 1)
    check_load(url, 1)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_save_with_a_faulty_rank_is_an_error_on_all(
    place: str, seed: int, tmp_path: Path
) -> None:
    """A sample of all phases, actions and ranks."""
    for case in random.Random(seed).sample(SAVE_CASES, SAMPLE_SIZE):
        print(case)
        _check_save(new_place(place, tmp_path, "run"), case)


@pytest.mark.slow
def test_a_load_with_a_faulty_rank_is_an_error_on_all(seed: int, tmp_path: Path) -> None:
    """A sample of all phases, actions and ranks."""
    for case in random.Random(seed).sample(LOAD_CASES, SAMPLE_SIZE):
        print(case)
        _check_load(new_place("memory", tmp_path), case)


@pytest.mark.torture
@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("case", SAVE_CASES, ids=str)
def test_a_save_with_any_faulty_rank_is_an_error_on_all(
    case: Case, place: str, tmp_path: Path
) -> None:
    """All of them."""
    _check_save(new_place(place, tmp_path, "run"), case)


@pytest.mark.torture
@pytest.mark.parametrize("case", LOAD_CASES, ids=str)
def test_a_load_with_any_faulty_rank_is_an_error_on_all(case: Case, tmp_path: Path) -> None:
    """All of them."""
    _check_load(new_place("memory", tmp_path), case)


@pytest.mark.parametrize("phase", SAVE_PHASES[:-1])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_failed_save_leaves_no_data(phase: str, rank: int, tmp_path: Path) -> None:
    """Every rank removes what it wrote, when it knows that the save failed."""
    url = new_place("disk", tmp_path)
    fault = RankFault(rank=rank, phase=phase, action="raise")
    run_ranks(WORLD_SIZE, lambda group: save(url, group, 1), faults=[fault])
    assert files_under(url) == []


@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_faulty_rank_left_is_debris(action: str, tmp_path: Path) -> None:
    """The restarted job's snapshot and one command leave nothing else."""
    run = new_place("disk", tmp_path, "run")
    fault = RankFault(rank=1, phase="write", action=action)
    run_ranks(WORLD_SIZE, lambda group: save(url_of(run, 1), group, 1), faults=[fault])
    save_job(url_of(run, 1), 1, salt=1)
    check_debris(run)
    check_steps(run, {1: 1})


@pytest.mark.parametrize("action", ACTIONS)
def test_a_fault_in_a_later_save_leaves_the_earlier_ones(action: str, tmp_path: Path) -> None:
    """Of the same job: the first and second are whole, the third is not there."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        for step in (1, 2, 3):
            save(url_of(run, step), group, step)

    fault = RankFault(rank=2, phase="write", action=action, occurrence=3)
    outcomes = run_ranks(WORLD_SIZE, body, faults=[fault])
    _check_outcomes(outcomes, Case("write", action, 2))
    check_steps(run, {1: 0, 2: 0})


def test_two_failing_ranks_are_both_to_blame(tmp_path: Path) -> None:
    """Nobody else is."""
    url = new_place("memory", tmp_path)
    faults = [RankFault(rank=rank, phase="write", action="raise") for rank in (1, 3)]
    outcomes = run_ranks(WORLD_SIZE, lambda group: save(url, group, 1), faults=faults)
    for outcome in others(outcomes, 1, 3):
        assert isinstance(outcome.error, waypost.PeerError)
        assert blamed(outcome.error) <= {1, 3}
    assert all(outcome.error is not None for outcome in outcomes)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


def test_two_dead_ranks_are_both_missing(tmp_path: Path) -> None:
    """One time-out, not one for each."""
    url = new_place("memory", tmp_path)
    faults = [RankFault(rank=rank, phase="describe", action="kill") for rank in (1, 3)]
    outcomes = run_ranks(WORLD_SIZE, lambda group: save(url, group, 1), faults=faults)
    for outcome in others(outcomes, 1, 3):
        assert isinstance(outcome.error, waypost.CoordinationTimeoutError)
        assert set(outcome.error.missing) == {1, 3}
        assert outcome.waited_s <= TIMEOUT_S


@pytest.mark.parametrize("phase", SAVE_PHASES[:-1])
@pytest.mark.parametrize("rank", [0, 3])
def test_the_same_job_saves_again_after_an_error(phase: str, rank: int, tmp_path: Path) -> None:
    """An error that every rank has caught ends nothing."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        with pytest.raises((waypost.PeerError, OSError)):
            save(url_of(run, 1), group, 1)
        save(url_of(run, 2), group, 2)
        assert_is(load(url_of(run, 2), group), group, 2)

    job(body, faults=[RankFault(rank=rank, phase=phase, action="raise")])
    check_steps(run, {2: 0})


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("phase", SAVE_PHASES[:-1])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_late_rank_of_an_old_job_changes_nothing_of_the_new_one(
    rank: int, phase: str, overwrite: bool, tmp_path: Path
) -> None:
    """It goes on after the restarted job has saved the same step: an error, and no mixture."""
    url = new_place("disk", tmp_path)
    if overwrite:
        save_job(url, 2, salt=5)

    def body(group: Any) -> None:
        try:
            save(url, group, 2, overwrite=overwrite)
        except waypost.WaypostError:
            if group.rank == 1:
                save_job(url, 2, salt=1, overwrite=overwrite)
            raise

    fault = RankFault(rank=rank, phase=phase, action="late")
    outcomes = run_ranks(WORLD_SIZE, body, faults=[fault])
    assert isinstance(outcomes[rank].error, waypost.WaypostError)
    for outcome in others(outcomes, rank):
        assert_blames(outcome.error, rank)
    check_snapshot(url, 2, salt=1)
    check_load(url, 2, salt=1)


class _Interrupted(FaultyStorage):
    """Does something else before the first call of a kind on a path with this ending."""

    def __init__(self, inner: Any, op: str, ending: str, action: Callable[[], Any]) -> None:
        super().__init__(inner)
        self._chosen = (op, ending)
        self._action: Callable[[], Any] | None = action

    def call(self, op: str, path: str, action: Any, half: Any = None) -> Any:
        chosen = self._action
        if chosen is not None and op == self._chosen[0] and path.endswith(self._chosen[1]):
            self._action = None
            chosen()
        return super().call(op, path, action, half)


@pytest.mark.parametrize(
    ("op", "ending", "rank"),
    [
        ("publish", "manifest.json", 0),
        ("create", ".safetensors", 0),
        ("create", ".safetensors", 3),
        ("write", ".safetensors", 3),
    ],
)
def test_of_two_jobs_at_one_step_the_first_to_commit_stays(
    op: str, ending: str, rank: int, tmp_path: Path
) -> None:
    """A whole job runs while the other is in the middle of its save; all of that one are told."""
    url = new_place("disk", tmp_path)
    place = seen_through(url, _Interrupted, op, ending, lambda: save_job(url, 2, salt=1))
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(place if group.rank == rank else url, group, 2)
    )
    same_errors(outcomes, waypost.AlreadyExistsError)
    check_snapshot(url, 2, salt=1)
    attempts = {path.parent.name for path in files_under(url) if path.name.endswith("safetensors")}
    assert len(attempts) == 1


def _keys_after(url: str, saves: int, failing: tuple[int, ...] = ()) -> list[Any]:
    """Which keys a job's store has when the job has ended."""

    def body(group: Any) -> Any:
        for step in range(1, saves + 1):
            try:
                save(url_of(url, step), group, step)
            except (waypost.PeerError, OSError):
                assert step in failing
        return group

    faults = [RankFault(rank=1, phase="write", action="raise", occurrence=step) for step in failing]
    group = job(body, faults=faults)[0]
    return list(group.store_keys())


@pytest.mark.slow
def test_keys_are_removed_after_a_save(tmp_path: Path) -> None:
    """Twenty saves leave no more of them than two."""
    few = _keys_after(new_place("memory", tmp_path, "run"), 2)
    many = _keys_after(new_place("memory", tmp_path, "run"), 20)
    assert len(many) <= len(few), many


@pytest.mark.slow
def test_keys_are_removed_after_a_failed_save(tmp_path: Path) -> None:
    """Ten failures among twenty saves leave no more than one among two."""
    few = _keys_after(new_place("memory", tmp_path, "run"), 2, failing=(1,))
    many = _keys_after(new_place("memory", tmp_path, "run"), 20, failing=tuple(range(1, 20, 2)))
    assert len(many) <= len(few), many


def test_keys_are_removed_after_a_load(tmp_path: Path) -> None:
    """As after a save."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)

    def loads(count: int) -> int:
        def body(group: Any) -> Any:
            for _ in range(count):
                load(url, group)
            return group

        return len(job(body)[0].store_keys())

    assert loads(10) <= loads(2)


def test_a_failed_load_says_that_a_target_is_half_filled(tmp_path: Path) -> None:
    """On every rank whose tensors may hold a mixture; the others have what they had."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    states: dict[int, Any] = {}

    def body(group: Any) -> None:
        state = states[group.rank] = sample(group, 0)
        waypost.load(url, state, process_group=group, options=options())

    fault = RankFault(rank=2, phase="place", action="raise")
    outcomes = run_ranks(WORLD_SIZE, body, faults=[fault])

    def check(group: Any) -> None:
        if plain(states[group.rank]["model"])["shared"].equal(sample(group, 0)["model"]["shared"]):
            return
        error = outcomes[group.rank].error
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        assert "mixture" in text or "filled" in text, text

    job(check)
