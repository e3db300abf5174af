"""Names on ranks: wrappers leave no trace, experts keep their numbers, odd tensors are named."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import waypost
from _kit import assert_same, new_place
from _kit.ranks import (
    distribute,
    job,
    load_made,
    mesh_of,
    noise,
    options,
    plain,
    refused_save,
    save_made,
    scopes_of,
    wrap,
)
from _kit.training import compiled


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


# --- tensors and experts -------------------------------------------------------------------------


def test_partial_dtensors_are_refused_by_name(tmp_path: Path) -> None:
    """A sum that nobody has computed has no bits to store."""
    url = new_place("memory", tmp_path)

    def make(group: Any) -> dict[str, Any]:
        full = torch.zeros(4, 3)
        mesh = mesh_of(group.rank, 2, 2)
        return {"m": {"w": wrap(full.clone(), full, mesh, [Replicate(), Partial()])}}

    for text in refused_save(url, make, kind=waypost.UnsupportedError):
        assert "m/w" in text
        assert "Partial" in text


class _Experts(nn.Module):
    """A shared gate and the experts that this rank owns, by global number."""

    def __init__(self, numbers: list[int], factor: float = 1.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(noise((4, 8), 1) * factor)
        self.experts = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in numbers})
        with torch.no_grad():
            for n in numbers:
                self.experts[str(n)].weight.copy_(noise((4, 4), 100 + n) * factor)
                self.experts[str(n)].bias.fill_(n * factor)


def _used(model: nn.Module) -> torch.optim.Optimizer:
    """An AdamW whose moments follow from the weights."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def _with_optimizer(numbers: list[int], factor: float = 1.0) -> dict[str, Any]:
    model = _Experts(numbers, factor)
    return {"model": model, "optimizer": _used(model)}


OWNERS: dict[str, list[list[int]]] = {
    "two each": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "turned": [[6, 7], [0, 1], [2, 3], [4, 5]],
    "uneven": [[0, 3, 5], [], [1, 2, 4, 6], [7]],
    "two ranks": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "replicated": [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]],
    "one": [list(range(8))],
}


def _assert_experts(state: dict[str, Any], numbers: list[int]) -> None:
    wanted = _with_optimizer(numbers)
    assert_same(dict(state["model"].state_dict()), dict(wanted["model"].state_dict()))
    moments, wanted_moments = (s["optimizer"].state_dict()["state"] for s in (state, wanted))
    assert_same(moments, wanted_moments)


@pytest.mark.slow
@pytest.mark.parametrize("saved", OWNERS)
@pytest.mark.parametrize("loaded", ["turned", "uneven", "two ranks", "one"])
def test_experts_go_to_whoever_owns_them(saved: str, loaded: str, tmp_path: Path) -> None:
    """Modules whose names differ by rank, with their optimizer, from any owners to any others."""
    url = new_place("memory", tmp_path)
    owners = OWNERS[saved]
    sources = [_with_optimizer(numbers) for numbers in owners]
    save_made(url, lambda group: sources[group.rank], world_size=len(owners))
    targets = [_with_optimizer(numbers, 0.5) for numbers in OWNERS[loaded]]

    def body(group: Any) -> None:
        waypost.load(url, targets[group.rank], process_group=group, options=options())

    job(body, world_size=len(targets))
    for numbers, target in zip(OWNERS[loaded], targets, strict=True):
        _assert_experts(target, numbers)


# --- wrappers ------------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "data_parallel": nn.DataParallel,
    "compiled": compiled,
    "nested": lambda model: nn.DataParallel(compiled(nn.DataParallel(model))),
    "inside": lambda model: nn.Sequential(compiled(model[0]), nn.DataParallel(model[1])),
}


def _sharded_net(rank: int, world_size: int, seed: int) -> nn.Module:
    """Two linear layers with sharded weights."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5))
    mesh = mesh_of(rank, world_size)
    for n, layer in enumerate(model):
        weight = noise(tuple(layer.weight.shape), seed + n)
        layer.weight = nn.Parameter(distribute(weight, mesh, [Shard(0)]))
        layer.bias = nn.Parameter(noise(tuple(layer.bias.shape), seed + 10 + n))
    return model


def _locals(model: nn.Module) -> dict[str, Any]:
    return plain(dict(model.state_dict()))


@pytest.mark.slow  # the first torch.compile imports its compiler
@pytest.mark.parametrize("saved_as", WRAPPERS)
@pytest.mark.parametrize("loaded_as", WRAPPERS)
def test_any_wrapping_loads_into_any_other(saved_as: str, loaded_as: str, tmp_path: Path) -> None:
    """On another number of ranks too; the names are those of the plain module."""
    url = new_place("memory", tmp_path)
    sources = [WRAPPERS[saved_as](_sharded_net(rank, 4, 1)) for rank in range(4)]
    save_made(url, lambda group: {"model": sources[group.rank]})
    names = {f"model/{n}.{part}" for n in (0, 1) for part in ("weight", "bias")}
    assert set(scopes_of(url)) >= names
    assert not [path for path in scopes_of(url) if "module" in path or "_orig_mod" in path]
    for world_size in (4, 3):
        targets = [_sharded_net(rank, world_size, 7) for rank in range(world_size)]
        wrapped = [WRAPPERS[loaded_as](target) for target in targets]

        def body(group: Any, wrapped: list[nn.Module] = wrapped) -> None:
            into = {"model": wrapped[group.rank]}
            report = waypost.load(url, into, process_group=group, options=options())
            assert not report.missing
            assert not report.unexpected

        job(body, world_size=world_size)
        for rank, target in enumerate(targets):
            assert_same(_locals(target), _locals(_sharded_net(rank, world_size, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("saved_as", ["data_parallel", "nested"])
def test_optimizer_state_has_the_names_of_the_plain_module(saved_as: str, tmp_path: Path) -> None:
    """Saved beside a wrapped model, loaded beside a plain one."""
    url = new_place("memory", tmp_path)
    sources = [_sharded_net(rank, 4, 1) for rank in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in sources]
    for model, optimizer in zip(sources, optimizers, strict=True):
        _give_momentum(model, optimizer)
    save_made(
        url,
        lambda group: {
            "model": WRAPPERS[saved_as](sources[group.rank]),
            "optimizer": optimizers[group.rank],
        },
    )
    assert "optimizer/state/0.weight/momentum_buffer" in scopes_of(url)
    targets = [_sharded_net(rank, 4, 7) for rank in range(4)]
    fresh = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in targets]
    load_made(url, lambda group: {"model": targets[group.rank], "optimizer": fresh[group.rank]})
    for ours, theirs in zip(fresh, optimizers, strict=True):
        assert_same(plain(ours.state_dict()["state"]), plain(theirs.state_dict()["state"]))


def _give_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Momentum as after a step, made by hand: sharded like the parameter."""
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
