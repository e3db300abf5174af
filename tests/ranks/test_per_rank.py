"""Per-rank state: generators, another world size, reading it without a group."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, assert_same_tensor, new_place
from _kit.ranks import (
    WORLD_SIZE,
    check_snapshot,
    job,
    load_made,
    options,
    own_state,
    same_errors,
    save_job,
    save_made,
    scopes_of,
)
from _kit.training import Shuffled
from waypost.testing import run_ranks


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


# --- random generators and loaders ---------------------------------------------------------------


def test_each_rank_goes_on_with_its_own_generator(tmp_path: Path) -> None:
    """Four streams are saved; none is taken for another."""
    url = new_place("memory", tmp_path)

    class Own:
        """Like RNG, with one generator for each rank of this process."""

        def __init__(self, rank: int, seed: int) -> None:
            self.generator = torch.Generator().manual_seed(seed + rank)

        def state_dict(self) -> dict[str, Any]:
            return {"torch": self.generator.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["torch"])

    save_made(url, lambda group: {"g": Own(group.rank, 10)}, per_rank="g/**")
    targets = [Own(rank, 77) for rank in range(WORLD_SIZE)]
    load_made(url, lambda group: {"g": targets[group.rank]})
    for rank, target in enumerate(targets):
        wanted = torch.rand(3, generator=Own(rank, 10).generator)
        assert_same_tensor(torch.rand(3, generator=target.generator), wanted)


def test_rng_has_the_scope_per_rank(tmp_path: Path) -> None:
    """No glob is needed, and one rank's state can be looked at."""
    url = new_place("memory", tmp_path)
    random.seed(3)
    torch.manual_seed(4)
    save_made(url, lambda _: {"rng": waypost.RNG()})
    assert set(scopes_of(url).values()) == {"per_rank"}
    snapshot = waypost.open(url)
    assert_same(snapshot.state_dict("rng", rank=0), snapshot.state_dict("rng", rank=3))
    with pytest.raises(ValueError, match="rank"):
        snapshot.state_dict("rng")


def test_rng_needs_the_same_world_size(tmp_path: Path) -> None:
    """Or to be left out."""
    url = new_place("memory", tmp_path)
    save_made(url, lambda _: {"rng": waypost.RNG(), "x": torch.ones(2)})

    def body(group: Any) -> None:
        state = {"rng": waypost.RNG(), "x": torch.zeros(2)}
        waypost.load(url, state, process_group=group, options=options())

    for text in same_errors(run_ranks(2, body), waypost.MismatchError):
        assert "rng" in text
        assert "4" in text
        assert "2" in text
        assert "reshard" in text
    for state in load_made(url, lambda _: {"x": torch.zeros(2)}, world_size=2):
        assert_same(state["x"], torch.ones(2))


# --- reshard -------------------------------------------------------------------------------------


def _own_only(group: Any) -> dict[str, Any]:
    return {"own": own_state(group.rank, 1)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_per_rank_entries_need_a_function_at_another_world_size(
    world_size: int, tmp_path: Path
) -> None:
    """The error says both sizes and what to give; the target is untouched."""
    url = new_place("memory", tmp_path)
    save_made(url, _own_only, per_rank="own/**")
    states: dict[int, Any] = {}

    def body(group: Any) -> None:
        state = states[group.rank] = {"own": own_state(group.rank, 9)}
        waypost.load(url, state, process_group=group, options=options())

    for text in same_errors(run_ranks(world_size, body), waypost.MismatchError):
        assert "own" in text
        assert "reshard" in text
        assert "4" in text
        assert str(world_size) in text
    for rank, state in states.items():
        assert_same(state, {"own": own_state(rank, 9)})


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_reshard_function_makes_the_new_states(world_size: int, tmp_path: Path) -> None:
    """It gets the states of all saved ranks in order; its result replaces values."""
    url = new_place("memory", tmp_path)
    save_made(
        url, lambda group: {"data": {"seen": list(range(group.rank + 1))}}, per_rank="data/**"
    )
    calls: list[tuple[int, int]] = []

    def spread(states: list[Any], rank: int, world_size: int) -> Any:
        calls.append((rank, world_size))
        assert_same(states, [{"seen": list(range(saved + 1))} for saved in range(WORLD_SIZE)])
        return {"seen": [rank, world_size, sum(len(state["seen"]) for state in states)]}

    states = load_made(
        url,
        lambda _: {"data": {"seen": []}},
        world_size=world_size,
        reshard={"data": spread},
    )
    assert sorted(calls) == [(rank, world_size) for rank in range(world_size)]
    for rank, state in enumerate(states):
        assert_same(state["data"], {"seen": [rank, world_size, 10]})


def test_a_reshard_function_feeds_load_state_dict(tmp_path: Path) -> None:
    """A loader by global sample index: two ranks go on where four stopped."""
    url = new_place("memory", tmp_path)

    def loader(group: Any) -> dict[str, Any]:
        data = Shuffled()
        for _ in range(group.rank + 1):
            data.next_batch()
        return {"data": data}

    save_made(url, loader, per_rank="data/**")
    targets = [Shuffled() for _ in range(2)]

    def furthest(states: list[Any], rank: int, world_size: int) -> Any:
        return max(states, key=lambda state: state["position"])

    def body(group: Any) -> None:
        into = {"data": targets[group.rank]}
        waypost.load(url, into, process_group=group, options=options(), reshard={"data": furthest})

    job(body, world_size=2)
    assert [target.position for target in targets] == [16, 16]


def test_an_error_of_a_reshard_function_fails_the_load_on_all(tmp_path: Path) -> None:
    """With its cause."""
    url = new_place("memory", tmp_path)
    save_made(url, _own_only, per_rank="own/**")

    def bad(states: list[Any], rank: int, world_size: int) -> Any:
        if rank == 1:
            raise RuntimeError("cannot split epoch 12")
        return states[0]

    def body(group: Any) -> None:
        state = {"own": own_state(group.rank, 9)}
        waypost.load(url, state, process_group=group, options=options(), reshard={"own": bad})

    outcomes = run_ranks(2, body)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "cannot split epoch 12" in str(outcome.error)


def test_a_reshard_function_for_an_unknown_entry_is_refused(tmp_path: Path) -> None:
    """A typing mistake must not restart the data from the beginning."""
    url = new_place("memory", tmp_path)
    save_made(url, _own_only, per_rank="own/**")

    def body(group: Any) -> None:
        waypost.load(
            url,
            {"own": own_state(group.rank, 9)},
            process_group=group,
            options=options(),
            reshard={"onw": lambda states, rank, world_size: states[rank]},
        )

    for outcome in run_ranks(2, body):
        assert isinstance(outcome.error, ValueError)


# --- reading without a group ---------------------------------------------------------------------


def test_per_rank_leaves_are_read_by_rank(tmp_path: Path) -> None:
    """Through `state_dict` and `read`; without the rank, the error says that one is needed."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    snapshot = waypost.open(url)
    for rank in range(WORLD_SIZE):
        own = own_state(rank, 1)
        assert_same(snapshot.state_dict("own", rank=rank), own)
        assert_same(snapshot.read("own/noise", rank=rank), own["noise"])
        assert_same(snapshot.read("own/noise", rank=rank, box=[(0, 1)]), own["noise"][:1])
        assert_same(snapshot.read("own/draw", rank=rank), own["draw"])
    for read in (lambda: snapshot.state_dict("own"), lambda: snapshot.read("own/noise")):
        with pytest.raises(ValueError, match="rank="):
            read()
    for rank in (-1, 4):
        with pytest.raises((ValueError, LookupError)):
            snapshot.state_dict("own", rank=rank)
    check_snapshot(url, 1)


def test_entries_that_are_not_per_rank_need_no_rank(tmp_path: Path) -> None:
    """Giving one makes no difference."""
    url = new_place("memory", tmp_path)
    save_job(url, 1)
    snapshot = waypost.open(url)
    assert_same(snapshot.state_dict("model", rank=2), snapshot.state_dict("model"))
    assert_same(snapshot.read("model/sharded", rank=2), snapshot.read("model/sharded"))
