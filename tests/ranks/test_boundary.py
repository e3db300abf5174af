"""Flags between ranks that train in step or freely: all act at one step, and nobody is stuck."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from waypost.manager.boundary import Boundary, Request
from waypost.testing import run_ranks

WORLD_SIZE = 4
SIGNAL = 15
PATIENCE_S = 20.0  # of the real clock, before a test fails


def _train(
    group: Any,
    wants: Callable[[int], Request | None],
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> int:
    """Steps until all act on a flag; the step at which this rank did."""
    boundary = Boundary(group, "run", 30.0)
    wanted = None
    for step in itertools.count(1):
        before(step)
        wanted = wanted or wants(step)
        request = boundary.reach(step, wanted, may_wait=True)
        after(step)
        if request is not None:
            assert request.signal == SIGNAL
            return step
    raise AssertionError("unreachable: the count has no end")


def _steps(body: Callable[[Any], int]) -> list[int]:
    outcomes = run_ranks(WORLD_SIZE, body)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    return [outcome.value or 0 for outcome in outcomes]


def _signal_at(steps: dict[int, int], rank: int) -> Callable[[int], Request | None]:
    at = steps.get(rank)
    return lambda step: Request(reason="signal", signal=SIGNAL) if step == at else None


@pytest.mark.parametrize("order", [(3, 0, 1, 2), (0, 1, 2, 3), (2, 3, 1, 0)], ids=str)
def test_ranks_in_step_act_together_in_whichever_order_they_look(order: Sequence[int]) -> None:
    """Rank 3 asks when all others have looked; at the next boundary they look one by one, and those
    that have looked are in the next step, where they need rank 3, before the last one has."""
    in_step = threading.Barrier(WORLD_SIZE)
    looked = [threading.Event() for _ in range(WORLD_SIZE)]
    others_passed = threading.Barrier(WORLD_SIZE)

    def body(group: Any) -> int:
        place = order.index(group.rank)

        def before(step: int) -> None:
            in_step.wait(PATIENCE_S)
            if step == 5 and group.rank == 3:
                others_passed.wait(PATIENCE_S)
            if step == 6 and place:
                looked[order[place - 1]].wait(0.5 if order[place - 1] == 3 else PATIENCE_S)

        def after(step: int) -> None:
            if step == 5 and group.rank != 3:
                others_passed.wait(PATIENCE_S)
            if step == 6:
                looked[group.rank].set()

        return _train(group, _signal_at({3: 5}, group.rank), before, after)

    steps = _steps(body)
    assert len(set(steps)) == 1
    assert steps[0] <= 8


@pytest.mark.slow
@pytest.mark.parametrize("is_in_step", [True, False], ids=["in step", "freely"])
def test_ranks_act_together_whenever_signals_come(is_in_step: bool, seed: int) -> None:
    """To one rank or to several, in the same step or not."""
    draw = random.Random(seed)
    for _ in range(40):
        signals = {
            rank: draw.randint(1, 12) for rank in draw.sample(range(WORLD_SIZE), draw.randint(1, 4))
        }
        spins = [[draw.randint(0, 400) for _ in range(16)] for _ in range(WORLD_SIZE)]
        in_step = threading.Barrier(WORLD_SIZE)

        def body(
            group: Any,
            signals: dict[int, int] = signals,
            spins: list[list[int]] = spins,
            in_step: threading.Barrier = in_step,
        ) -> int:
            def before(step: int) -> None:
                if is_in_step:
                    in_step.wait(PATIENCE_S)
                sum(range(spins[group.rank][step % 16]))

            return _train(group, _signal_at(signals, group.rank), before, lambda step: None)

        assert len(set(_steps(body))) == 1
