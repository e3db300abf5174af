"""Ranks as threads: all well, or every rank's error and how long it waited."""

from collections.abc import Callable
from typing import Any

import waypost
from waypost.testing import RankFault, run_ranks

WAIT_MAX_S = 180.0  # the default time-out


def all_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """What `body(group)` returned on each rank; raises the error of the first that failed."""
    outcomes = run_ranks(size, body)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def errors_of(
    size: int, body: Callable[[Any], Any], *faults: RankFault, wait_max_s: float
) -> list[Any]:
    """The error of each rank; None for one that was killed. Fails if one waited for longer."""
    outcomes = run_ranks(size, body, faults=list(faults))
    for rank, outcome in enumerate(outcomes):
        assert outcome.waited_s <= wait_max_s, (rank, outcome.waited_s)
        assert outcome.is_killed or outcome.error is not None, f"rank {rank} went on"
    return [None if outcome.is_killed else outcome.error for outcome in outcomes]


def refused(size: int, body: Callable[[Any], Any]) -> list[waypost.MismatchError]:
    """The MismatchError of each rank; fails if a rank has another outcome."""
    errors = errors_of(size, body, wait_max_s=WAIT_MAX_S)
    for error in errors:
        assert isinstance(error, waypost.MismatchError), repr(error)
    return errors
