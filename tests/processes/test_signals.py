"""Signals to one process of a job, or to all: one save at one step, and all end the same."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import waypost
from _kit import assert_same
from _kit.gloo import process_results, run_processes
from _kit.invariants import committed
from _kit.invariants import snapshot_url as url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="forks"),
]

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
STEPS = 2000
OPTIONS = waypost.Options(timeout_s=60.0)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever a test does, the handlers of the session come back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _train(
    run: str,
    rank: int,
    *,
    signalled: dict[int, int],
    number: int = signal.SIGTERM,
    is_collective: bool = True,
    **arguments: Any,
) -> tuple[Any, ...]:
    """Trains until a signal, which rank r sends itself in step `signalled[r]`; how it ended."""
    state = {"shared": {"w": torch.zeros(5)}, "own": {"rank": rank}, "progress": {"step": 0}}
    arguments = {"per_rank": "own", "options": OPTIONS, **arguments}
    try:
        with waypost.Checkpointer(run, state, **arguments) as checkpointer:
            while checkpointer.step < STEPS:
                step = checkpointer.step + 1
                state["shared"]["w"].fill_(step)
                state["progress"]["step"] = step
                if signalled.get(rank) == step:
                    os.kill(os.getpid(), number)
                if is_collective:
                    dist.all_reduce(torch.ones(1))
                checkpointer.step_done()
    except waypost.Preempted as preempted:
        return preempted.signal, preempted.step, preempted.url, preempted.code
    return (None, STEPS, None, None)


def _check_one_save(run: str, outcomes: list[Any], number: int, earliest: int) -> int:
    """All ranks ended at one step, which is the one that was saved, whole and of that step."""
    assert len(set(outcomes)) == 1, outcomes
    signal_seen, step, url, code = outcomes[0]
    assert signal_seen == number
    assert code == 128 + number
    assert earliest <= step < STEPS
    assert url == url_of(run, step)
    assert set(committed(run)) == {step}
    snapshot = waypost.open(url)
    assert snapshot.verify().ok
    assert_same(snapshot.state_dict("shared"), {"w": torch.full((5,), float(step))})
    assert_same(snapshot.state_dict("progress"), {"step": step})
    for rank in range(snapshot.world_size):
        assert_same(snapshot.state_dict("own", rank=rank), {"rank": rank})
    return step


@pytest.mark.parametrize("is_collective", [True, False], ids=["collective", "free"])
@pytest.mark.parametrize(
    "signalled",
    [{0: 7}, {1: 7}, {0: 7, 1: 7}, {0: 7, 1: 9}, {0: 9, 1: 7}],
    ids=["rank 0", "rank 1", "both", "rank 0 first", "rank 1 first"],
)
def test_a_signal_leads_to_one_save_at_one_step(
    signalled: dict[int, int], is_collective: bool, tmp_path: Path
) -> None:
    """Loops whose steps wait for one another, and loops whose steps do not."""
    run = str(tmp_path / "run")
    outcomes = process_results(
        2, lambda rank: _train(run, rank, signalled=signalled, is_collective=is_collective)
    )
    _check_one_save(run, outcomes, signal.SIGTERM, min(signalled.values()))


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_rank_without_a_signal_ends_with_the_same_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Whichever signal the other one got."""
    run = str(tmp_path / "run")
    outcomes = process_results(2, lambda rank: _train(run, rank, signalled={1: 4}, number=number))
    _check_one_save(run, outcomes, number, 4)


def test_one_of_four_ranks_is_signalled(tmp_path: Path) -> None:
    """The last one."""
    run = str(tmp_path / "run")
    outcomes = process_results(4, lambda rank: _train(run, rank, signalled={3: 5}))
    _check_one_save(run, outcomes, signal.SIGTERM, 5)


def test_a_signal_before_the_first_step_is_not_lost(tmp_path: Path) -> None:
    """In the first step of one rank."""
    run = str(tmp_path / "run")
    outcomes = process_results(2, lambda rank: _train(run, rank, signalled={1: 1}))
    _check_one_save(run, outcomes, signal.SIGTERM, 1)


def test_a_step_that_is_saved_anyway_is_saved_once(tmp_path: Path) -> None:
    """A signal in a run that saves each step."""
    run = str(tmp_path / "run")
    outcomes = process_results(
        2,
        lambda rank: _train(
            run, rank, signalled={1: 4}, save_every=waypost.EverySteps(1), keep=waypost.KeepLast(1)
        ),
    )
    _check_one_save(run, outcomes, signal.SIGTERM, 4)


def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """The same number of processes, signalled again later."""
    run = str(tmp_path / "run")
    first = process_results(2, lambda rank: _train(run, rank, signalled={0: 5}))
    step = _check_one_save(run, first, signal.SIGTERM, 5)

    def again(rank: int) -> tuple[Any, ...]:
        return _train(run, rank, signalled={1: step + 6}, keep=waypost.KeepLast(1))

    _check_one_save(run, process_results(2, again), signal.SIGTERM, step + 6)


def test_without_signal_in_save_on_a_signal_is_the_programs_own(tmp_path: Path) -> None:
    """The rank dies of it, as without Waypost; the other one is told in bounded time."""
    run = str(tmp_path / "run")

    def body(rank: int) -> Any:
        try:
            _train(
                run,
                rank,
                signalled={1: 3},
                is_collective=False,
                save_on=(),
                save_every=waypost.EverySteps(1),
                options=waypost.Options(timeout_s=3.0),
            )
        except waypost.CoordinationTimeoutError as error:
            return error.missing
        return None

    survivor, dead = run_processes(2, body)
    assert dead.signal == signal.SIGTERM
    assert survivor.expect_result() == (1,)
    assert max(committed(run)) == 2
