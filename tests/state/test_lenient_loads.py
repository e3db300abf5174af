"""strict=False is about single names: an entry of which nothing fits is still an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import new_place, raw


def _saved(state: dict[str, Any]) -> str:
    url = new_place("memory", Path())
    waypost.save(url, state)
    return url


class _Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2))


def _tensors(model: nn.Module) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in model.state_dict().items()}


BESIDE: dict[str, Any] = {
    "progress": waypost.Progress,
    "a value": lambda: {"k": 1},
    "tensors": lambda: {"w": torch.ones(1)},
    "a model": lambda: nn.Linear(1, 1),
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_model_of_which_nothing_fits_is_an_error_whatever_else_loads(beside: Any) -> None:
    """Every name has another prefix: random weights do not pass for loaded ones."""
    url = _saved({"model": nn.Sequential(nn.Linear(2, 2)), "other": beside()})
    target = _Wrapped()
    before = _tensors(target)
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target, "other": beside()}, strict=False)
    assert "model" in str(caught.value)
    assert _tensors(target) == before


def test_nothing_of_the_others_is_loaded_then() -> None:
    """All or nothing."""
    saved = waypost.Progress()
    saved.step = 7
    url = _saved({"model": nn.Sequential(nn.Linear(2, 2)), "progress": saved})
    progress = waypost.Progress()
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"model": _Wrapped(), "progress": progress}, strict=False)
    assert progress.step == 0


def test_a_container_of_which_nothing_fits_is_an_error() -> None:
    """Tensors in a dict as in a module."""
    target = {"b": torch.zeros(1)}
    url = _saved({"c": {"a": torch.ones(1)}, "n": {"k": 1}})
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"c": target, "n": {"k": 0}}, strict=False)
    assert not target["b"].any()


def test_one_common_name_is_enough() -> None:
    """A new head on an old body: the body is loaded, the rest is reported."""
    source = nn.Sequential(nn.Linear(2, 2))
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    report = waypost.load(_saved({"model": source}), {"model": target}, strict=False)
    assert raw(target[0].weight) == raw(source[0].weight)
    assert set(report.missing) == {"model/1.weight", "model/1.bias"}


def test_a_model_without_tensors_is_no_misfit() -> None:
    """There is nothing that could have fitted."""
    source = {"act": nn.ReLU(), "model": nn.Linear(1, 1)}
    into = {"act": nn.ReLU(), "model": nn.Linear(1, 1)}
    waypost.load(_saved(source), into, strict=False)
    assert raw(into["model"].weight) == raw(source["model"].weight)


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_another_optimizer_is_an_error(strict: bool) -> None:
    """AdamW's moments and settings do not land in SGD."""
    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    url = _saved({"model": model, "optimizer": adam})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    groups = set(sgd.param_groups[0])
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": model, "optimizer": sgd}, strict=strict)
    assert "optimizer" in str(caught.value)
    assert not sgd.state
    assert set(sgd.param_groups[0]) == groups
