"""Names carry no wrapper prefixes: wrapped and plain modules read each other's snapshots."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same_tensor, new_place
from _kit.training import compiled

pytestmark = pytest.mark.slow  # the first torch.compile imports its compiler


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "data_parallel": nn.DataParallel,
    "compiled": compiled,
    "compiled_in_parallel": lambda model: nn.DataParallel(compiled(model)),
    "parallel_in_compiled": lambda model: compiled(nn.DataParallel(model)),
}


@pytest.mark.parametrize("saved_as", WRAPPERS)
@pytest.mark.parametrize("loaded_as", WRAPPERS)
def test_any_wrapping_loads_into_any_other(saved_as: str, loaded_as: str, tmp_path: Path) -> None:
    """Saved from one kind of wrapper, loaded into another: same names, same numbers."""
    source, target = _net(0), _net(1)
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": WRAPPERS[saved_as](source)})
    report = waypost.load(url, {"model": WRAPPERS[loaded_as](target)})
    assert not report.missing
    assert not report.unexpected
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


@pytest.mark.parametrize("saved_as", WRAPPERS)
def test_stored_names_are_those_of_the_inner_module(saved_as: str, tmp_path: Path) -> None:
    """The leaf paths of a wrapped module are those of the plain one."""
    model = _net(0)
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": WRAPPERS[saved_as](model)})
    paths = {leaf.path for leaf in waypost.open(url).leaves() if leaf.kind == "tensor"}
    assert paths == {f"model/{name}" for name in model.state_dict()}


@pytest.mark.parametrize("saved_as", ["data_parallel", "compiled"])
def test_optimizer_state_of_a_wrapped_model_loads_into_a_plain_one(
    saved_as: str, tmp_path: Path
) -> None:
    """The optimizer's names are normalised like the model's."""
    model, fresh = _net(0), _net(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": WRAPPERS[saved_as](model), "optimizer": optimizer})
    restored = torch.optim.AdamW(fresh.parameters())
    waypost.load(url, {"model": fresh, "optimizer": restored})
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        wanted = optimizer.state[theirs]["exp_avg"]
        assert_same_tensor(restored.state[ours]["exp_avg"], wanted)


class Named(nn.Module):
    """A model whose own sub-modules are called like wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.other = nn.ModuleDict({"module": nn.Linear(2, 2)})
        self.submodule = nn.Linear(2, 2)


def test_own_names_that_look_like_wrappers_are_kept(tmp_path: Path) -> None:
    """Only wrappers are unwrapped: a model's own `module.` stays in its names."""
    source, target = Named(), Named()
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": source})
    paths = {leaf.path for leaf in waypost.open(url).leaves() if leaf.kind == "tensor"}
    assert paths == {f"model/{name}" for name in source.state_dict()}
    waypost.load(url, {"model": target})
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


def test_own_names_survive_a_wrapper_around_them(tmp_path: Path) -> None:
    """Wrapped in DataParallel, `module.module.weight` loses exactly one prefix."""
    source, target = Named(), Named()
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": nn.DataParallel(source)})
    waypost.load(url, {"model": target})
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


def test_a_submodule_compiled_in_place_keeps_plain_names(tmp_path: Path) -> None:
    """`_orig_mod.` in the middle of a name comes from a wrapper and is removed."""
    source, target = _net(0), _net(1)
    url = new_place("memory", tmp_path)
    source[0] = compiled(source[0])
    waypost.save(url, {"model": source})
    paths = {leaf.path for leaf in waypost.open(url).leaves() if leaf.kind == "tensor"}
    assert paths == {f"model/{name}" for name in target.state_dict()}
    waypost.load(url, {"model": target})
    assert_same_tensor(target.state_dict()["0.weight"], source[0]._orig_mod.weight.detach())
