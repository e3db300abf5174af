"""Who owns a leaf: what is stored of it, from which rank, and what a difference means."""

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import waypost
from _kit import assert_same, new_place
from _kit.ranks import (
    WORLD_SIZE,
    Make,
    distribute,
    load_made,
    mesh_of,
    noise,
    options,
    plain,
    refused_save,
    save_made,
    scopes_of,
    wrap,
    written_by_rank,
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


# --- plain leaves --------------------------------------------------------------------------------

ODD_RANK = 2


def _with_odd_rank(usual: Any, odd: Any, entry: str = "x") -> Make:
    return lambda group: {entry: {"leaf": odd if group.rank == ODD_RANK else usual, "same": 1}}


DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "content": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-45])),
    "sign of zero": (torch.zeros(3), -torch.zeros(3)),
    "dtype": (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "shape": (torch.zeros(4), torch.zeros(2, 2)),
    "empty shape": (torch.zeros(0, 4), torch.zeros(4, 0)),
    "int": (7, 8),
    "type": (1, 1.0),
    "bool": (1, True),
    "float": (0.0, -0.0),
    "text": ("a", "b"),
    "none": (None, 0),
    "list": ([1, 2], [1, 2, 3]),
    "array": (np.zeros(3), np.ones(3)),
    "tensor or value": (torch.tensor(1), 1),
    "last of many": (torch.zeros(300_000), (torch.arange(300_000) == 299_999).float()),
}


@pytest.mark.parametrize(("usual", "odd"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_leaf_without_a_rule_that_differs_is_refused(
    usual: Any, odd: Any, tmp_path: Path
) -> None:
    """The error names the leaf and the odd rank; no rank's value is chosen."""
    url = new_place("memory", tmp_path)
    for text in refused_save(url, _with_odd_rank(usual, odd)):
        assert "x/leaf" in text
        assert "x/same" not in text
        assert str(ODD_RANK) in text


def test_all_leaves_that_differ_are_named(tmp_path: Path) -> None:
    """Not the first only."""
    url = new_place("memory", tmp_path)

    def make(group: Any) -> dict[str, Any]:
        return {"x": {f"leaf{n}": torch.tensor([group.rank * (n % 2)]) for n in range(6)}}

    for text in refused_save(url, make):
        for n in range(6):
            assert (f"x/leaf{n}" in text) == bool(n % 2)


def test_what_a_rule_can_say_is_in_the_error(tmp_path: Path) -> None:
    """It tells the user of `per_rank`."""
    for text in refused_save(new_place("memory", tmp_path), _with_odd_rank(1, 2)):
        assert "per_rank" in text


def test_two_nans_of_the_same_bits_are_equal(tmp_path: Path) -> None:
    """Bits are compared, not numbers."""
    url = new_place("memory", tmp_path)
    save_made(url, lambda _: {"x": torch.tensor([float("nan")]), "y": float("nan")})
    assert waypost.open(url).read("x").isnan().all()


def test_equal_leaves_are_stored_once(tmp_path: Path) -> None:
    """Plain tensors and values; the snapshot does not say which rank."""
    url = new_place("disk", tmp_path)
    full = noise((500, 3), 1)
    save_made(url, lambda _: {"model": {"w": full.clone()}, "progress": {"step": 5}})
    assert_same(waypost.open(url).read("model/w"), full)
    assert sum(written_by_rank(url, "model")) < full.nbytes + 1024
    assert set(scopes_of(url).values()) == {"replicated"}
    states = load_made(
        url, lambda _: {"model": {"w": torch.zeros(500, 3)}, "progress": {"step": 0}}
    )
    for state in states:
        assert_same(state, {"model": {"w": full}, "progress": {"step": 5}})


def test_equal_leaves_need_no_rule_at_any_world_size(tmp_path: Path) -> None:
    """Saved by three ranks, loaded by two and by one process alone."""
    url = new_place("memory", tmp_path)
    save_made(url, lambda _: {"x": torch.arange(5), "n": {"k": "v"}}, world_size=3)
    for world_size in (1, 2):
        states = load_made(
            url, lambda _: {"x": torch.zeros(5).long(), "n": {"k": ""}}, world_size=world_size
        )
        for state in states:
            assert_same(state, {"x": torch.arange(5), "n": {"k": "v"}})
    alone = {"x": torch.zeros(5).long(), "n": {"k": ""}}
    waypost.load(url, alone)
    assert_same(alone, {"x": torch.arange(5), "n": {"k": "v"}})


# --- replicated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("globs", [("x/**",), ("x",), "x/**", ("**/leaf",), ("x/*",), ("**",)])
def test_declared_replicas_are_not_compared(globs: Any, tmp_path: Path) -> None:
    """The caller vouches: what is stored is one rank's content, piece by piece."""
    url = new_place("memory", tmp_path)
    make = _with_odd_rank(torch.zeros(3), torch.ones(3))
    save_made(url, make, replicated=globs)
    assert waypost.open(url).read("x/leaf").shape == (3,)
    assert scopes_of(url)["x/leaf"] == "replicated"


@pytest.mark.parametrize(("usual", "odd"), [(torch.zeros(3), torch.ones(3)), (7, 8)], ids=str)
def test_declared_replicas_are_compared_when_asked(usual: Any, odd: Any, tmp_path: Path) -> None:
    """`check_replicas=True` finds the leaf and the rank."""
    url = new_place("memory", tmp_path)
    texts = refused_save(
        url,
        _with_odd_rank(usual, odd),
        replicated="x/**",
        options=options(check_replicas=True),
    )
    for text in texts:
        assert "x/leaf" in text
        assert str(ODD_RANK) in text


def test_declared_replicas_that_are_equal_pass_the_check(tmp_path: Path) -> None:
    """Large ones too, which are split over the ranks."""
    url = new_place("memory", tmp_path)
    full = noise((400_000,), 3)
    save_made(
        url,
        lambda _: {"x": full.clone()},
        replicated="x",
        options=options(check_replicas=True),
    )
    assert_same(waypost.open(url).read("x"), full)


@pytest.mark.parametrize("shape", [(3,), (300_000,)])
def test_replicated_dtensors_are_compared_when_asked(shape: Any, tmp_path: Path) -> None:
    """`Replicate` on a mesh dimension is a claim like any other."""
    url = new_place("memory", tmp_path)

    def make(group: Any) -> dict[str, Any]:
        full = torch.zeros(shape)
        local = full.clone()
        local[-1] = float(group.rank == ODD_RANK)
        return {"x": {"leaf": wrap(local, full, mesh_of(group.rank, 4), [Replicate()])}}

    for text in refused_save(url, make, options=options(check_replicas=True)):
        assert "x/leaf" in text
        assert str(ODD_RANK) in text
    save_made(url, make)
    assert waypost.open(url).read("x/leaf").shape == shape


def test_a_declared_replica_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Pieces of different wholes cannot be put together."""
    url = new_place("memory", tmp_path)
    for text in refused_save(
        url, _with_odd_rank(torch.zeros(4), torch.zeros(6)), replicated="x/**"
    ):
        assert "x/leaf" in text


# --- per rank ------------------------------------------------------------------------------------


def _own(rank: int) -> dict[str, Any]:
    return {
        "tensor": noise((rank + 1, 2), rank),
        "dtype": torch.ones(2, dtype=[torch.int8, torch.float64][rank % 2]),
        "list": list(range(rank)),
        "only": {f"key{rank}": rank},
        "same": torch.arange(3),
    }


def _blank(rank: int) -> dict[str, Any]:
    own = _own(rank)
    for name in ("tensor", "dtype", "same"):
        own[name].zero_()
    return own | {"list": [-1] * rank, "only": {f"key{rank}": None}}


@pytest.mark.parametrize("globs", [("own/**",), "own", ["nothing/**", "own/**"]], ids=str)
def test_a_whole_entry_per_rank(globs: Any, tmp_path: Path) -> None:
    """Other shapes, dtypes, lengths and keys on each rank; each gets its own back."""
    url = new_place("memory", tmp_path)
    save_made(url, lambda group: {"own": _own(group.rank), "n": {"k": 1}}, per_rank=globs)
    states = load_made(url, lambda group: {"own": _blank(group.rank), "n": {"k": 0}})
    for rank, state in enumerate(states):
        assert_same(state, {"own": _own(rank), "n": {"k": 1}})
    scopes = scopes_of(url)
    assert {scope for path, scope in scopes.items() if path.startswith("own/")} == {"per_rank"}
    assert scopes["n/k"] == "replicated"


def test_single_leaves_of_a_dictionary_per_rank(tmp_path: Path) -> None:
    """A counter and a tensor among leaves that all ranks share."""
    url = new_place("memory", tmp_path)

    def make(rank: int, factor: int) -> dict[str, Any]:
        return {
            "x": {
                "shared": torch.arange(4) * factor,
                "deep": {"counter": rank * factor, "total": 9 * factor},
                "buffer": torch.full((rank + 1,), float(rank * factor)),
            }
        }

    save_made(url, lambda group: make(group.rank, 1), per_rank=("**/counter", "x/buffer"))
    for rank, state in enumerate(load_made(url, lambda group: make(group.rank, 0))):
        assert_same(state, make(rank, 1))
    scopes = scopes_of(url)
    assert scopes["x/deep/counter"] == scopes["x/buffer"] == "per_rank"
    assert scopes["x/deep/total"] == scopes["x/shared"] == "replicated"


class _WithBuffer(nn.Module):
    """A sharded weight, a shared bias, and a buffer of this rank alone."""

    def __init__(self, rank: int, factor: float) -> None:
        super().__init__()
        weight = distribute(noise((8, 3), 5) * factor, mesh_of(rank, 4), [Shard(0)])
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(noise((8,), 6) * factor)
        self.register_buffer("seen", torch.full((rank + 2,), rank * factor))
        self.inner = nn.BatchNorm1d(3)
        self.inner.running_mean += rank * factor


def test_single_leaves_of_a_module_per_rank(tmp_path: Path) -> None:
    """Buffers that each rank counts for itself, beside parameters that are not."""
    url = new_place("memory", tmp_path)
    globs = ("model/seen", "model/*running_mean")
    save_made(url, lambda group: {"model": _WithBuffer(group.rank, 1.0)}, per_rank=globs)
    models = [_WithBuffer(rank, 0.0) for rank in range(WORLD_SIZE)]
    load_made(url, lambda group: {"model": models[group.rank]})
    for rank, model in enumerate(models):
        assert_same(
            plain(dict(model.state_dict())), plain(_WithBuffer(rank, 1.0).state_dict() | {})
        )
    assert scopes_of(url)["model/seen"] == "per_rank"
    assert scopes_of(url)["model/weight"] == "sharded"
    refused = new_place("memory", tmp_path)
    for text in refused_save(refused, lambda group: {"model": _WithBuffer(group.rank, 1.0)}):
        assert "model/inner.running_mean" in text


def test_a_leaf_that_only_some_ranks_hold_of_a_per_rank_entry(tmp_path: Path) -> None:
    """Whoever has none gets none back."""
    url = new_place("memory", tmp_path)

    def make(group: Any) -> dict[str, Any]:
        return {"own": {"queue": torch.arange(3) + group.rank} if group.rank % 2 else {}}

    save_made(url, make, per_rank="own/**")
    states = load_made(
        url, lambda group: {"own": {"queue": torch.zeros(3).long()} if group.rank % 2 else {}}
    )
    for rank, state in enumerate(states):
        assert_same(state["own"], {"queue": torch.arange(3) + rank} if rank % 2 else {})


@pytest.mark.parametrize(
    ("replicated", "per_rank"), [("x/**", "x/leaf"), ("**", "**")], ids=["leaf", "all"]
)
def test_a_leaf_that_is_declared_both_is_refused(
    replicated: str, per_rank: str, tmp_path: Path
) -> None:
    """Two rules for one leaf: no guess."""
    url = new_place("memory", tmp_path)
    refused_save(
        url, _with_odd_rank(1, 2), kind=ValueError, replicated=replicated, per_rank=per_rank
    )


def test_a_sharded_leaf_may_lie_below_a_glob_for_the_rest(tmp_path: Path) -> None:
    """A DTensor is sharded whatever `replicated` says of the entry around it."""
    url = new_place("memory", tmp_path)
    full = noise((9, 2), 4)

    def make(group: Any) -> dict[str, Any]:
        return {"m": {"w": distribute(full, mesh_of(group.rank, 4), [Shard(0)]), "b": full[0]}}

    save_made(url, make, replicated="m/**")
    assert scopes_of(url) == {"m/w": "sharded", "m/b": "replicated"}
    assert_same(waypost.open(url).read("m/w"), full)


def test_a_sharded_tensor_cannot_be_each_ranks_own(tmp_path: Path) -> None:
    """Each rank has only a part of it; nothing could be put together from one rank's."""
    url = new_place("memory", tmp_path)
    full = noise((4, 2), 1)

    def make(group: Any) -> dict[str, Any]:
        return {"m": {"w": distribute(full, mesh_of(group.rank, WORLD_SIZE), [Shard(0)])}}

    for per_rank in (["m/w"], ["m"]):
        for text in refused_save(url, make, waypost.UnsupportedError, per_rank=per_rank):
            assert "m/w" in text
            assert "per_rank" in text


def test_a_sharded_tensor_that_a_rank_of_its_mesh_lacks_is_refused(tmp_path: Path) -> None:
    """What that rank should hold would be stored nowhere."""
    url = new_place("memory", tmp_path)
    full = noise((8, 2), 1)

    def make(group: Any) -> dict[str, Any]:
        rows = distribute(full, mesh_of(group.rank, WORLD_SIZE), [Shard(0)])
        return {"m": {"a": rows, "b": 1} if group.rank != ODD_RANK else {"b": 1}}

    for text in refused_save(url, make):
        assert "m/a" in text
        assert "0, 1, 3" in text


def test_ordered_keys_in_another_order_are_a_difference(tmp_path: Path) -> None:
    """An OrderedDict is its order, too."""
    url = new_place("memory", tmp_path)
    keys = {"a": 1, "b": 2}
    usual, odd = OrderedDict(keys), OrderedDict(reversed(keys.items()))
    for text in refused_save(url, _with_odd_rank(usual, odd)):
        assert "x/leaf" in text
