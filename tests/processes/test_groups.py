"""Processes in a gloo group: who calls, who dies, what they hold; the group itself stays usable."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import waypost
from _kit import assert_same, die
from _kit.gloo import process_results, run_processes
from _kit.invariants import committed
from _kit.invariants import snapshot_url as url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="forks"),
]

SOON = waypost.Options(timeout_s=2.0)


def _state(rank: int, step: int) -> dict[str, Any]:
    return {"shared": {"w": torch.full((5,), float(step))}, "own": {"rank": rank, "step": step}}


def _save(run: str, rank: int, step: int, options: waypost.Options | None = None) -> None:
    url = url_of(run, step)
    waypost.save(url, _state(rank, step), step=step, per_rank="own", options=options)


def _check(run: str, steps: set[int], world_size: int) -> None:
    assert set(committed(run)) == steps
    for step in steps:
        snapshot = waypost.open(url_of(run, step))
        assert snapshot.verify().ok
        assert_same(snapshot.state_dict("shared"), _state(0, step)["shared"])
        for rank in range(world_size):
            assert_same(snapshot.state_dict("own", rank=rank), _state(rank, step)["own"])


@pytest.mark.parametrize("callers", [{0}, {1, 2}], ids=str)
def test_a_save_that_some_ranks_do_not_call_ends_and_the_next_one_works(
    callers: set[int], tmp_path: Path
) -> None:
    """The others are named; then all are together again."""
    run = str(tmp_path / "run")

    def body(rank: int) -> tuple[int, ...]:
        missing: tuple[int, ...] = ()
        if rank in callers:
            try:
                _save(run, rank, 1, SOON)
            except waypost.CoordinationTimeoutError as error:
                missing = error.missing
        dist.barrier()
        _save(run, rank, 2)
        return missing

    absent = tuple(sorted({0, 1, 2} - callers))
    expected = [absent if rank in callers else () for rank in range(3)]
    assert process_results(3, body) == expected
    _check(run, {2}, 3)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_killed_rank_is_named_and_a_restart_saves_again(dead: int, tmp_path: Path) -> None:
    """SIGKILL between two saves; the survivors end in bounded time."""
    run = str(tmp_path / "run")

    def body(rank: int) -> tuple[int, ...]:
        _save(run, rank, 1)
        if rank == dead:
            die()
        try:
            _save(run, rank, 2, SOON)
        except waypost.CoordinationTimeoutError as error:
            return error.missing
        return ()

    outcomes = run_processes(3, body)
    assert outcomes[dead].signal == signal.SIGKILL
    assert {o.expect_result() for r, o in enumerate(outcomes) if r != dead} == {(dead,)}
    _check(run, {1}, 3)
    process_results(3, lambda rank: _save(run, rank, 2))
    _check(run, {1, 2}, 3)


def test_the_users_collectives_go_on_between_and_after_saves(tmp_path: Path) -> None:
    """Back to back, without a barrier of the caller's; the group's own order is untouched."""
    run = str(tmp_path / "run")

    def body(rank: int) -> float:
        total = torch.zeros(1)
        for step in range(1, 6):
            work = dist.all_reduce(torch.full((1,), float(rank)), async_op=True)
            _save(run, rank, step)
            work.wait()
            total = torch.full((1,), float(rank + step))
            dist.all_reduce(total)
        return float(total)

    assert process_results(2, body) == [11.0, 11.0]
    _check(run, {1, 2, 3, 4, 5}, 2)


def test_a_subgroup_saves_by_itself(tmp_path: Path) -> None:
    """Ranks are those of the group; processes outside it do not call."""
    run = str(tmp_path / "run")

    def body(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank:
            url = url_of(run, 7)
            state = _state(dist.get_rank(group), 7)
            waypost.save(url, state, step=7, per_rank="own", process_group=group)
        dist.barrier()

    process_results(3, body)
    assert waypost.open(url_of(run, 7)).world_size == 2
    _check(run, {7}, 2)


def test_one_process_of_a_group_saves_alone_when_it_says_so(tmp_path: Path) -> None:
    """`"self"` in a distributed job."""
    url = str(tmp_path / "alone")

    def body(rank: int) -> None:
        if rank == 1:
            waypost.save(url, {"x": torch.ones(2)}, process_group="self")

    process_results(2, body)
    assert waypost.open(url).world_size == 1


def test_every_process_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    """`RNG()` needs no rule."""
    url = str(tmp_path / "snap")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def save(rank: int) -> tuple[float, float, float]:
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        waypost.save(url, {"rng": waypost.RNG()})
        return draw()

    def load(rank: int) -> tuple[float, float, float]:
        waypost.load(url, {"rng": waypost.RNG()})
        return draw()

    drawn = process_results(2, save)
    assert drawn[0] != drawn[1]
    assert process_results(2, load) == drawn


def _replicas(differs: bool, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), momentum=0.9)
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if differs and rank == 1:
        with torch.no_grad():
            model.bias[0] += 1
    return {"model": wrapped, "optimizer": optimizer}


@pytest.mark.parametrize("differs", [False, True], ids=["equal", "different"])
@pytest.mark.parametrize("is_checked", [False, True], ids=["trusted", "checked"])
def test_data_parallel_replicas_are_compared_only_when_asked(
    is_checked: bool, differs: bool, tmp_path: Path
) -> None:
    """They are replicas by what they are; `check_replicas=True` names the leaf that is not."""
    url = str(tmp_path / "snap")

    def body(rank: int) -> str:
        state = _replicas(differs, rank)
        try:
            waypost.save(url, state, options=waypost.Options(check_replicas=is_checked))
        except waypost.MismatchError as error:
            return str(error)
        return ""

    texts = process_results(2, body)
    for text in texts:
        assert bool(text) == (differs and is_checked)
        assert not text or "model/bias" in text
    if not texts[0]:
        scopes = {leaf.scope for leaf in waypost.open(url).leaves("model/**")}
        assert scopes == {"replicated"}
    assert os.path.exists(os.path.join(url, "manifest.json")) == (not texts[0])
