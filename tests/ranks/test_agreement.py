"""Ranks that want different things, or fail alone: one outcome on all, and both sides shown."""

import errno
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, new_place
from _kit.faults import never
from _kit.invariants import committed
from _kit.invariants import snapshot_url as url_of
from _kit.ranks import (
    PER_RANK,
    TIMEOUT_S,
    WORLD_SIZE,
    Full,
    Garbled,
    assert_blames,
    assert_is,
    blamed,
    check_load,
    check_snapshot,
    check_steps,
    flip,
    full_model,
    job,
    load,
    options,
    others,
    same_errors,
    sample,
    save,
    save_job,
    seen_through,
)
from waypost.testing import Fault, faulty, run_ranks


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


# --- different wishes ----------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 2])
def test_another_url_on_one_rank_is_an_error_that_shows_both(odd: int, tmp_path: Path) -> None:
    """Neither place gets a snapshot."""
    run = new_place("memory", tmp_path, "run")
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(f"{run}/{'ab'[group.rank == odd]}", group, 1)
    )
    for text in same_errors(outcomes, waypost.MismatchError):
        assert f"{run}/a" in text
        assert f"{run}/b" in text
    for name in "ab":
        with pytest.raises(waypost.NotFoundError):
            waypost.open(f"{run}/{name}")


@pytest.mark.parametrize("odd", [0, 2])
def test_another_step_on_one_rank_is_an_error_that_shows_both(odd: int, tmp_path: Path) -> None:
    """The ranks would otherwise store a mixture of two steps."""
    url = new_place("memory", tmp_path)
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(url, group, 17 if group.rank == odd else 23)
    )
    for text in same_errors(outcomes, waypost.MismatchError):
        assert "17" in text
        assert "23" in text
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "durable": ({"options": options(durable=True)}, {"options": options(durable=False)}, "durable"),
    "check_replicas": (
        {"options": options(check_replicas=True)},
        {"options": options(check_replicas=False)},
        "check_replicas",
    ),
    "overwrite": ({"overwrite": True}, {"overwrite": False}, "overwrite"),
    "per_rank": ({"per_rank": PER_RANK}, {"per_rank": (*PER_RANK, "progress")}, "per_rank"),
    "replicated": ({"replicated": ()}, {"replicated": ("model/shared",)}, "replicated"),
}


@pytest.mark.parametrize(("most", "one", "word"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_options_on_one_rank_are_an_error_that_names_them(
    most: dict[str, Any], one: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """All ranks hear of it, and nothing is written."""
    url = new_place("memory", tmp_path)
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(url, group, 1, **(one if group.rank == 3 else most))
    )
    for text in same_errors(outcomes, waypost.MismatchError):
        assert word in text
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


def test_other_entry_names_on_one_rank_are_an_error_that_shows_both(tmp_path: Path) -> None:
    """One rank has an entry less, and another one that nobody else has."""
    url = new_place("memory", tmp_path)

    def body(group: Any) -> None:
        state = sample(group, 1)
        if group.rank == 1:
            state["optimiser"] = state.pop("progress")
        waypost.save(url, state, per_rank=PER_RANK, process_group=group, options=options())

    for text in same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError):
        assert "progress" in text
        assert "optimiser" in text


@pytest.mark.parametrize("odd", [0, 3])
def test_one_rank_loads_while_the_others_save(odd: int, tmp_path: Path) -> None:
    """Both kinds of call are in the error; the snapshot that was there is as it was."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)

    def body(group: Any) -> None:
        if group.rank == odd:
            load(url, group)
        else:
            save(url, group, 1, salt=1, overwrite=True)

    for text in same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError):
        assert "save" in text
        assert "load" in text
    check_snapshot(url, 1)


def test_ranks_that_load_from_different_places_are_told(tmp_path: Path) -> None:
    """The targets keep what they had."""
    run = new_place("memory", tmp_path, "run")
    for step in (1, 2):
        save_job(url_of(run, step), step)
    states: dict[int, Any] = {}

    def body(group: Any) -> None:
        state = states[group.rank] = sample(group, 0)
        url = url_of(run, 2 if group.rank == 1 else 1)
        waypost.load(url, state, process_group=group, options=options())

    for text in same_errors(run_ranks(WORLD_SIZE, body), waypost.MismatchError):
        assert url_of(run, 1) in text
        assert url_of(run, 2) in text
    job(lambda group: assert_is(states[group.rank], group, 0))


@pytest.mark.parametrize(
    "arguments", [{"include": "model/**"}, {"strict": False}, {"exclude": "own/**"}], ids=str
)
def test_ranks_that_load_different_parts_are_told(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    """One rank leaves something out."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: load(url, group, **(arguments if group.rank == 2 else {}))
    )
    same_errors(outcomes, waypost.MismatchError)


def test_a_target_that_fits_on_all_ranks_but_one_is_filled_on_none(tmp_path: Path) -> None:
    """I8 holds for the job as a whole; the error says which rank and leaf."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    states: dict[int, Any] = {}

    def body(group: Any) -> None:
        state = states[group.rank] = sample(group, 0)
        target = dict(state, model=dict(state["model"]))
        if group.rank == 2:
            target["model"]["shared"] = torch.zeros(7, 3)
        waypost.load(url, target, process_group=group, options=options())

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[2].error, waypost.MismatchError)
    for outcome in outcomes:
        assert isinstance(outcome.error, (waypost.MismatchError, waypost.PeerError))
        assert "model/shared" in str(outcome.error)
    job(lambda group: assert_is(states[group.rank], group, 0))


def test_the_next_save_works_after_a_disagreement(tmp_path: Path) -> None:
    """Ranks that were one call apart are together again when each has had its error."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        with pytest.raises(waypost.MismatchError):
            save(url_of(run, 1 + (group.rank == 0)), group, 1 + (group.rank == 0))
        save(url_of(run, 3), group, 3)

    job(body)
    check_steps(run, {3: 0})


# --- not all ranks call --------------------------------------------------------------------------


@pytest.mark.parametrize("callers", [{0}, {1, 2, 3}, {0, 3}], ids=str)
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_call_that_some_ranks_do_not_make_names_them(
    call: str, callers: set[int], tmp_path: Path
) -> None:
    """Bounded waiting instead of a hang; nothing is published."""
    run = new_place("memory", tmp_path, "run")
    save_job(url_of(run, 1), 1)

    def body(group: Any) -> None:
        if group.rank not in callers:
            return
        if call == "save":
            save(url_of(run, 2), group, 2)
        else:
            load(url_of(run, 1), group)

    outcomes = run_ranks(WORLD_SIZE, body)
    absent = set(range(WORLD_SIZE)) - callers
    for outcome in others(outcomes, *absent):
        assert isinstance(outcome.error, waypost.CoordinationTimeoutError)
        assert set(outcome.error.missing) == absent
        assert outcome.waited_s <= TIMEOUT_S
    check_steps(run, {1: 0})


def test_the_time_out_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """A quarter of the default, and four times it."""
    url = new_place("memory", tmp_path)
    for timeout_s in (45.0, 720.0):
        outcomes = run_ranks(
            2,
            lambda group, timeout_s=timeout_s: (
                save(url, group, 1, options=options(timeout_s=timeout_s))
                if group.rank == 0
                else None
            ),
        )
        assert isinstance(outcomes[0].error, waypost.CoordinationTimeoutError)
        assert 0.5 * timeout_s <= outcomes[0].waited_s <= timeout_s


def test_one_rank_saves_alone_when_it_says_so(tmp_path: Path) -> None:
    """`"self"` is a group of one: nobody else has to call."""
    url = new_place("memory", tmp_path)

    def body(group: Any) -> None:
        if group.rank == 2:
            waypost.save(url, {"x": torch.ones(3)}, process_group="self", options=options())

    job(body)
    assert_same(waypost.open(url).read("x"), torch.ones(3))
    assert waypost.open(url).world_size == 1


def test_saves_back_to_back_do_not_meet(tmp_path: Path) -> None:
    """A fast rank may be a save ahead of a slow one; each snapshot is of one step."""
    run = new_place("memory", tmp_path, "run")

    def body(group: Any) -> None:
        for step in range(1, 7):
            receipt = save(url_of(run, step), group, step)
            assert receipt.step == step

    job(body)
    check_steps(run, dict.fromkeys(range(1, 7), 0))


def test_all_ranks_get_the_same_receipt(tmp_path: Path) -> None:
    """URL, attempt, digest and payload of the whole snapshot."""
    url = new_place("memory", tmp_path)
    receipts = job(lambda group: save(url, group, 1))
    facts = {(r.url, r.step, r.attempt, r.digest, r.nbytes) for r in receipts}
    assert len(facts) == 1
    assert receipts[0].nbytes == waypost.open(url).nbytes


# --- errors about what all share -----------------------------------------------------------------


def test_a_snapshot_that_exists_is_the_same_error_on_all(tmp_path: Path) -> None:
    """And it stays."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    same_errors(
        run_ranks(WORLD_SIZE, lambda group: save(url, group, 1, salt=1)), waypost.AlreadyExistsError
    )
    check_snapshot(url, 1)


def test_overwriting_swaps_the_whole_snapshot(tmp_path: Path) -> None:
    """Of all ranks."""
    url = new_place("disk", tmp_path)
    save_job(url, 1)
    save_job(url, 1, salt=1, overwrite=True)
    check_snapshot(url, 1, salt=1)
    attempts = {path.parent.name for path in Path(url).rglob("*.safetensors")}
    assert len(attempts) == 1


def test_a_snapshot_that_is_not_there_is_the_same_error_on_all(tmp_path: Path) -> None:
    """Not an error of one and a time-out of the others."""
    url = new_place("memory", tmp_path)
    same_errors(run_ranks(WORLD_SIZE, lambda group: load(url, group)), waypost.NotFoundError)


def test_no_room_is_the_same_error_on_all(tmp_path: Path) -> None:
    """Found before the first byte."""
    url = new_place("memory", tmp_path)

    def body(group: Any) -> None:
        state = {"x": torch.full((100_000,), 1.0)}
        place = seen_through(url, Full)
        waypost.save(place, state, process_group=group, options=options())

    same_errors(run_ranks(WORLD_SIZE, body), waypost.StorageFullError)


# --- storage errors on one rank ------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(rank: int, tmp_path: Path) -> None:
    """It has the numbers; the others say which rank had no room."""
    run = new_place("memory", tmp_path, "run")
    save_job(url_of(run, 1), 1)

    def body(group: Any) -> None:
        url = url_of(run, 2)
        fault = Fault(op="write", call=1, errno=errno.ENOSPC, and_later=True)
        save(faulty(url, fault) if group.rank == rank else url, group, 2)

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[rank].error, waypost.StorageFullError)
    assert outcomes[rank].error.needed_bytes > 0
    for outcome in others(outcomes, rank):
        if not isinstance(outcome.error, waypost.StorageFullError):
            assert_blames(outcome.error, rank)
    check_steps(run, {1: 0})
    save_job(url_of(run, 2), 2)
    check_steps(run, {1: 0, 2: 0})


def _try_save(run: str, faults: dict[int, Fault]) -> tuple[list[Any], dict[int, list[str]]]:
    """One save of step 2 with storage faults by rank; how it ended, and which calls were made."""
    places = {rank: faulty(url_of(run, 2), fault) for rank, fault in faults.items()}
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: save(places.get(group.rank, url_of(run, 2)), group, 2)
    )
    return outcomes, {rank: list(place.calls) for rank, place in places.items()}


def _check_failed_call(rank: int, fault: Fault, tmp_path: Path) -> None:
    """I6: all ranks leave with the same outcome, and it is the truth."""
    run = new_place("memory", tmp_path, "run")
    save_job(url_of(run, 1), 1)
    outcomes, _ = _try_save(run, {rank: fault})
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert len(failed) in (0, WORLD_SIZE), failed
    for outcome in others(outcomes, rank) if failed else ():
        assert isinstance(outcome.error, waypost.WaypostError)
        if isinstance(outcome.error, waypost.PeerError):
            assert blamed(outcome.error) == {rank}
        assert outcome.waited_s < TIMEOUT_S
    is_published = 2 in committed(run)
    if not any(isinstance(error, waypost.CommitUnknownError) for error in failed):
        assert is_published == (not failed)
    check_steps(run, {1: 0, 2: 0} if is_published else {1: 0})
    save_job(url_of(run, 3), 3)


def _calls(rank: int, tmp_path: Path) -> int:
    run = new_place("memory", tmp_path, "run")
    return len(_try_save(run, {rank: never()})[1][rank])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("action", ["error", "after", "short"])
def test_a_storage_call_that_fails_on_one_rank_is_one_outcome_for_all(
    rank: int, action: Any, seed: int, tmp_path: Path
) -> None:
    """A sample of the rank's calls."""
    calls = range(1, _calls(rank, tmp_path) + 1)
    for call in random.Random(seed).sample(calls, min(4, len(calls))):
        print(f"call {call}")
        _check_failed_call(rank, Fault(call=call, action=action), tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("action", ["error", "after", "short"])
@pytest.mark.parametrize("and_later", [False, True], ids=["once", "for good"])
def test_every_storage_call_of_one_rank_fails_in_turn(
    rank: int, action: Any, and_later: bool, tmp_path: Path
) -> None:
    """All of them."""
    for call in range(1, _calls(rank, tmp_path) + 1):
        print(f"call {call}")
        _check_failed_call(rank, Fault(call=call, action=action, and_later=and_later), tmp_path)


def test_a_leaf_that_one_rank_cannot_store_fails_the_save_on_all(tmp_path: Path) -> None:
    """The rank says which; the others say which rank."""
    url = new_place("memory", tmp_path)

    def body(group: Any) -> None:
        own = {"x": (lambda: 0) if group.rank == 1 else 0}
        waypost.save(url, {"own": own}, per_rank="own/**", process_group=group, options=options())

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[1].error, waypost.UnsupportedError)
    for outcome in others(outcomes, 1):
        assert_blames(outcome.error, 1)
        assert "own/x" in str(outcome.error)


# --- errors of a load on one rank ----------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_a_read_error_on_one_rank_fails_the_load_on_all(rank: int, tmp_path: Path) -> None:
    """Nobody trains on with a state that another rank does not have."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)

    def body(group: Any) -> None:
        fault = Fault(op="open", call=1, and_later=True)
        load(faulty(url, fault) if group.rank == rank else url, group)

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[rank].error, waypost.StorageError)
    for outcome in others(outcomes, rank):
        assert_blames(outcome.error, rank)
    check_load(url, 1)


@pytest.mark.parametrize("rank", [0, 2])
def test_corruption_that_one_rank_sees_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    """Its view of the files is damaged; theirs is not."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)

    def body(group: Any) -> None:
        load(seen_through(url, Garbled, "") if group.rank == rank else url, group)

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[rank].error, waypost.CorruptionError)
    for outcome in others(outcomes, rank):
        if not isinstance(outcome.error, waypost.CorruptionError):
            assert_blames(outcome.error, rank)


@pytest.mark.parametrize("file", range(WORLD_SIZE))
def test_a_damaged_file_of_one_rank_is_an_error_on_all(file: int, tmp_path: Path) -> None:
    """Whoever reads it finds it; the error of each names the file."""
    url = new_place("disk", tmp_path)
    save_job(url, 1)
    (path,) = Path(url).rglob(f"model.r{file:05d}-*.safetensors")
    flip(path)
    outcomes = run_ranks(WORLD_SIZE, lambda group: load(url, group))
    assert any(isinstance(outcome.error, waypost.CorruptionError) for outcome in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, (waypost.CorruptionError, waypost.PeerError))
        assert path.name in str(outcome.error)


def test_a_lone_reader_does_not_need_the_ranks_that_saved(tmp_path: Path) -> None:
    """In a job of several ranks, `"self"` loads a snapshot on one of them only."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    model = {"sharded": torch.zeros(10, 3), "shared": torch.zeros(7, 2)}

    def body(group: Any) -> None:
        if group.rank == 1:
            waypost.load(url, {"model": model}, process_group="self", options=options())

    job(body)
    assert_same(model, full_model(1))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_rank_is_named_at_once(kind: type[BaseException], tmp_path: Path) -> None:
    """The others do not wait for it, and are not blamed."""
    url = new_place("disk", tmp_path)

    class Interrupted:
        def state_dict(self) -> dict[str, int]:
            raise kind("stop")

        def load_state_dict(self, state: Any) -> None:
            del state

    def body(group: Any) -> None:
        state = {"x": Interrupted() if group.rank == 1 else torch.nn.Linear(1, 1)}
        waypost.save(url, state, process_group=group)

    outcomes = run_ranks(WORLD_SIZE, body)
    assert isinstance(outcomes[1].error, kind)
    for outcome in others(outcomes, 1):
        assert isinstance(outcome.error, waypost.PeerError)
        assert kind.__name__ in outcome.error.errors[1]
        assert outcome.waited_s == 0
