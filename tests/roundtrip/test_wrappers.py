"""What surrounds a tensor: Parameter, requires_grad, module form, restored containers."""

from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import PLACES, assert_same_tensor, filled, new_place


@pytest.mark.parametrize("place", PLACES)
def test_parameter_and_requires_grad_return_in_containers(place: str, tmp_path: Path) -> None:
    """A Parameter comes back as a Parameter and `requires_grad` keeps its value."""
    made = {
        "trained": nn.Parameter(torch.randn(3)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "leaf": torch.randn(3, requires_grad=True),
        "plain": torch.randn(3),
    }
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": made})
    restored = waypost.open(url).state_dict("x")
    for name, tensor in made.items():
        assert type(restored[name]) is type(tensor), name
        assert restored[name].requires_grad is tensor.requires_grad, name
        assert_same_tensor(restored[name], tensor.detach(), name)


def test_the_result_of_a_computation_is_saved_by_value(tmp_path: Path) -> None:
    """A tensor inside an autograd graph is saved without its graph."""
    weight = torch.randn(4, requires_grad=True)
    output = weight * 2
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {"output": output}})
    assert_same_tensor(waypost.open(url).state_dict("x")["output"].detach(), output.detach())


def test_load_keeps_requires_grad_of_the_target(tmp_path: Path) -> None:
    """Filling a target changes numbers only; autograd can go on from it."""
    url = new_place("memory", tmp_path)
    saved = torch.randn(4)
    waypost.save(url, {"x": {"w": saved}})
    target = nn.Parameter(torch.zeros(4))
    waypost.load(url, {"x": {"w": target}})
    assert target.requires_grad
    assert target.is_leaf
    (target * 3).sum().backward()
    assert torch.equal(target.grad, torch.full((4,), 3.0))
    assert_same_tensor(target.detach(), saved)


def test_gradients_are_neither_saved_nor_cleared(tmp_path: Path) -> None:
    """A load leaves the target's own `.grad` alone."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    url = new_place("memory", tmp_path)
    waypost.save(url, {"model": model})
    grad = model.weight.grad.clone()
    waypost.load(url, {"model": model})
    assert torch.equal(model.weight.grad, grad)


def test_saving_does_not_change_its_source(tmp_path: Path) -> None:
    """Values, flags and version counters of the sources are as before the save."""
    tensors = {"p": nn.Parameter(torch.randn(3)), "c": filled(torch.complex64, (3,)).conj()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    waypost.save(new_place("disk", tmp_path), {"x": tensors})
    assert {name: tensor._version for name, tensor in tensors.items()} == versions
    assert tensors["c"].is_conj()
    assert tensors["p"].requires_grad


def test_restored_tensors_own_their_memory(tmp_path: Path) -> None:
    """Writing into a restored tensor changes neither the file nor a second restore."""
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {"w": torch.arange(1000.0)}})
    first = waypost.open(url).state_dict("x")["w"]
    first.fill_(-1)
    assert torch.equal(waypost.open(url).state_dict("x")["w"], torch.arange(1000.0))
    assert waypost.open(url).verify().ok
