"""Whose a state is when ranks are many: per-rank, replicated, sharded; other world sizes.

B082 B091 B099 B109 B110 B144
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import waypost
from _kit import assert_same, assert_same_tensor, raw
from _kit.meshes import distributed, part_of
from _kit.processes import results_of, run_world
from _kit.threads import all_ranks, refused
from _kit.training import BATCHES_PER_EPOCH, Shuffled


def own_loader(rank: int) -> Shuffled:
    """A loader with another order, and another number of samples, on each rank."""
    loader = Shuffled(samples=4 * BATCHES_PER_EPOCH + 4 * rank)
    loader.generator.manual_seed(rank)
    loader.order = torch.randperm(loader.samples, generator=loader.generator)
    return loader


def test_b082_each_rank_goes_on_in_its_own_order(tmp_path: Path) -> None:
    """Saved in the middle of epoch 1, resumed: the rest of each rank's order is the same."""
    run = str(tmp_path / "run")
    stop, total = BATCHES_PER_EPOCH + 3, 3 * BATCHES_PER_EPOCH

    def train(until: int) -> list[list[list[int]]]:
        def body(group: Any) -> list[list[int]]:
            loader = own_loader(group.rank)
            seen = []
            with waypost.Checkpointer(
                run, {"data": loader}, per_rank=["data"], save_on=("end",), process_group=group
            ) as checkpointer:
                for _ in range(checkpointer.step, until):
                    seen.append(loader.next_batch())
                    checkpointer.step_done()
            return seen

        return all_ranks(2, body)

    seen = [first + rest for first, rest in zip(train(stop), train(total), strict=True)]
    for rank in range(2):
        whole = own_loader(rank)
        assert seen[rank] == [whole.next_batch() for _ in range(total)], f"rank {rank}"
    assert seen[0] != seen[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_b082_a_real_stateful_loader_is_per_rank_by_itself(tmp_path: Path) -> None:
    """torchdata's StatefulDataLoader, at another position on each rank, with no rule given."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    url = str(tmp_path / "snap")

    def loader() -> Any:
        return stateful.StatefulDataLoader(list(range(20)), batch_size=4, num_workers=0)

    def save(group: Any) -> None:
        data = loader()
        reading = iter(data)
        for _ in range(1 + group.rank):
            next(reading)
        waypost.save(url, {"data": data}, process_group=group)

    def load(group: Any) -> list[int]:
        data = loader()
        waypost.load(url, {"data": data}, process_group=group)
        return next(iter(data)).tolist()

    all_ranks(2, save)
    assert all_ranks(2, load) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def draw_and_draw_again(url: str) -> tuple[list[float], list[float]]:
    """Random numbers after a save, and again after the load of it in generators of other seeds."""
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    state = {"rng": waypost.RNG()}
    waypost.save(url, state)
    first = [random.random(), *torch.rand(3).tolist()]
    random.seed(99)
    torch.manual_seed(99)
    waypost.load(url, state)
    return first, [random.random(), *torch.rand(3).tolist()]


@pytest.mark.slow
def test_b091_each_rank_gets_its_own_random_stream(tmp_path: Path) -> None:
    """RNG is per rank by itself: two seeds, two streams, both go on."""
    url = str(tmp_path / "snap")
    drawn = results_of(run_world(2, draw_and_draw_again, url=url))
    for first, again in drawn:
        assert first == again
    assert drawn[0][0] != drawn[1][0]
    snapshot = waypost.open(url)
    assert {leaf.scope for leaf in snapshot.leaves("rng/**")} == {"per_rank"}
    with pytest.raises(ValueError, match="rank"):
        snapshot.state_dict("rng")
    states = [repr(snapshot.state_dict("rng", rank=rank)) for rank in range(2)]
    assert states[0] != states[1]


def save_positions(url: str) -> None:
    """Two ranks save where their loaders are."""

    def body(group: Any) -> None:
        state = {"data": {"position": 100 + group.rank}, "w": torch.ones(2)}
        waypost.save(url, state, per_rank=["data"], process_group=group)

    all_ranks(2, body)


@pytest.mark.parametrize("size", [1, 4])
def test_b099_per_rank_state_on_another_number_of_ranks_is_an_error(
    size: int, tmp_path: Path
) -> None:
    """Shrinking does not drop a position, growing does not make one up."""
    url = str(tmp_path / "snap")
    save_positions(url)

    def body(group: Any) -> None:
        state = {"data": {"position": 0}, "w": torch.zeros(2)}
        try:
            waypost.load(url, state, process_group=group)
        finally:
            assert state["data"] == {"position": 0}
            assert torch.equal(state["w"], torch.zeros(2))

    for error in refused(size, body):
        assert "data" in str(error)
        assert "2" in str(error)
        assert str(size) in str(error)
        assert "reshard" in str(error)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b099_a_function_gives_each_rank_its_share(size: int, tmp_path: Path) -> None:
    """`reshard` gets the states of all saved ranks in order, this rank, and the new size."""
    url = str(tmp_path / "snap")
    save_positions(url)

    def share(states: list[Any], rank: int, world_size: int) -> Any:
        assert [state["position"] for state in states] == [100, 101]
        return {"position": 1000 * world_size + rank}

    def body(group: Any) -> Any:
        state = {"data": {"position": 0}, "w": torch.zeros(2)}
        reshard = None if size == 2 else {"data": share}
        waypost.load(url, state, process_group=group, reshard=reshard)
        assert torch.equal(state["w"], torch.ones(2))
        return state["data"]["position"]

    expected = [100, 101] if size == 2 else [1000 * size + rank for rank in range(size)]
    assert all_ranks(size, body) == expected


def test_b099_a_resharded_loader_gets_its_state(tmp_path: Path) -> None:
    """The result of the function goes to the target's load_state_dict, also on a resume."""
    run = str(tmp_path / "run")

    def first(group: Any) -> None:
        loader = own_loader(group.rank)
        with waypost.Checkpointer(
            run, {"data": loader}, per_rank=["data"], process_group=group
        ) as checkpointer:
            loader.next_batch()
            checkpointer.step_done()

    def second(group: Any) -> tuple[int, int]:
        loader = own_loader(0)
        with waypost.Checkpointer(
            run,
            {"data": loader},
            per_rank=["data"],
            reshard={"data": lambda states, rank, world_size: states[rank % len(states)]},
            process_group=group,
        ) as checkpointer:
            return checkpointer.step, len(loader.order)

    all_ranks(2, first)
    lengths = [len(own_loader(rank).order) for rank in range(2)]
    assert all_ranks(3, second) == [(1, lengths[0]), (1, lengths[1]), (1, lengths[0])]


class Matrix(nn.Module):
    """One parameter, given in the layout that a rank holds it in."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def with_adam(tensors: dict[str, torch.Tensor], group: Any, fill: float | None = None) -> Any:
    """A 10 × 4 parameter by rows over the ranks, and Adam whose moments are by rows too."""
    sizes = (group.world_size,)
    rows = {
        name: distributed(tensor, sizes, [Shard(0)], group.rank) for name, tensor in tensors.items()
    }
    if fill is not None:
        for tensor in rows.values():
            tensor.to_local().fill_(fill)
    model = Matrix(rows["weight"])
    optimizer = torch.optim.Adam(model.parameters())
    moments = {name: rows[name] for name in ("exp_avg", "exp_avg_sq")}
    step = torch.tensor(2.0 if fill is None else fill)
    optimizer.state[model.weight] = {"step": step, **moments}
    return model, optimizer


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_b109_optimizer_shards_load_on_another_number_of_ranks(size: int, tmp_path: Path) -> None:
    """10 × 4 over two ranks, then over one to four: uneven, and equal in every bit."""
    url = str(tmp_path / "snap")
    maker = torch.Generator().manual_seed(3)
    names = ("weight", "exp_avg", "exp_avg_sq")
    full = {name: torch.randn(10, 4, generator=maker) for name in names}

    def save(group: Any) -> None:
        model, optimizer = with_adam(full, group)
        waypost.save(url, {"model": model, "optimizer": optimizer}, process_group=group)

    def load(group: Any) -> None:
        model, optimizer = with_adam(full, group, fill=-1.0)
        waypost.load(url, {"model": model, "optimizer": optimizer}, process_group=group)
        state = optimizer.state[model.weight]
        assert float(state["step"]) == 2.0
        for name, tensor in {"weight": model.weight, **state}.items():
            if name != "step":
                wanted = part_of(full[name], (size,), [Shard(0)], group.rank)
                assert raw(tensor.to_local()) == raw(wanted), f"{name} on rank {group.rank}"

    all_ranks(2, save)
    all_ranks(size, load)


def own_value_saver(url: str, **arguments: Any) -> Callable[[Any], Any]:
    """A body that saves another tensor under one name on each rank."""

    def body(group: Any) -> None:
        state = {"own": {"t": torch.tensor([group.rank])}, "same": {"t": torch.tensor([7])}}
        waypost.save(url, state, process_group=group, **arguments)

    return body


@pytest.mark.parametrize("arguments", [{}, {"replicated": ["own", "same"]}])
def test_b110_values_that_differ_are_never_stored_as_one(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Without a rule, and with the wrong rule when replicas are compared: leaf and ranks named."""
    url = str(tmp_path / "snap")
    options = waypost.Options(check_replicas=bool(arguments))
    for error in refused(2, own_value_saver(url, options=options, **arguments)):
        assert "own/t" in str(error)
        assert "same/t" not in str(error)
        assert "0" in str(error)
        assert "1" in str(error)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


def test_b110_declared_per_rank_both_are_kept(tmp_path: Path) -> None:
    """Each rank loads its own; in one process the rank is asked for."""
    url = str(tmp_path / "snap")
    all_ranks(2, own_value_saver(url, per_rank=["own/t"]))

    def load(group: Any) -> int:
        state = {"own": {"t": torch.tensor([-1])}}
        waypost.load(url, state, process_group=group)
        return int(state["own"]["t"])

    assert all_ranks(2, load) == [0, 1]
    snapshot = waypost.open(url)
    scopes = {leaf.path: leaf.scope for leaf in snapshot.leaves()}
    assert scopes == {"own/t": "per_rank", "same/t": "replicated"}
    assert [snapshot.read("own/t", rank=rank).tolist() for rank in range(2)] == [[0], [1]]
    with pytest.raises(ValueError, match="rank"):
        snapshot.read("own/t")
    assert snapshot.read("same/t").tolist() == [7]


def test_b110_equal_values_pass_the_comparison(tmp_path: Path) -> None:
    """Declared replicated and equal in every bit: stored once."""
    url = str(tmp_path / "snap")

    def body(group: Any) -> None:
        options = waypost.Options(check_replicas=True)
        state = {"t": torch.arange(5.0), "note": {"lr": 0.1}}
        waypost.save(url, state, replicated=["**"], process_group=group, options=options)

    all_ranks(3, body)
    (leaf,) = waypost.open(url).leaves("t")
    assert (leaf.scope, leaf.shape, leaf.shards) == ("replicated", (5,), 1)


EDGES = {
    "scalar": torch.tensor(1.5),
    "count": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0),
    "no_rows": torch.empty(0, 3),
    "no_columns": torch.empty(3, 0),
    "one": torch.tensor([2.5]),
    "three": torch.arange(3, dtype=torch.bfloat16),
    "few_rows": torch.arange(10.0).reshape(2, 5),
}


@pytest.mark.parametrize("loaded_on", [1, 3, 4])
@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_b144_scalars_and_empty_shards_keep_their_shapes(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    """0-d, empty, and smaller than the world so that a rank has nothing."""
    url = str(tmp_path / "snap")

    def state(group: Any) -> dict[str, Any]:
        sizes = (group.world_size,)
        whole = {name: tensor.clone() for name, tensor in EDGES.items()}
        parts = {
            name: distributed(tensor, sizes, [Shard(0) if tensor.ndim else Replicate()], group.rank)
            for name, tensor in EDGES.items()
        }
        return {"whole": whole, "parts": parts}

    def save(group: Any) -> None:
        waypost.save(url, state(group), process_group=group)

    def load(group: Any) -> None:
        target, wanted = state(group), state(group)
        for tensor in target["whole"].values():
            tensor.fill_(-1)
        for tensor in target["parts"].values():
            tensor.to_local().fill_(-1)
        waypost.load(url, target, process_group=group)
        assert_same(target["whole"], wanted["whole"])
        for name, tensor in wanted["parts"].items():
            actual = target["parts"][name]
            assert actual.shape == tensor.shape
            assert_same_tensor(actual.to_local(), tensor.to_local(), name)

    all_ranks(saved_on, save)
    all_ranks(loaded_on, load)
    snapshot = waypost.open(url)
    assert snapshot.verify().ok
    assert_same(snapshot.state_dict("whole"), EDGES)
    assert_same(snapshot.state_dict("parts"), EDGES)
