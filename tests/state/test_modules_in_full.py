"""What a module says of itself is what is loaded: its hooks, its overrides, its extra state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same, new_place, raw


def _saved(state: dict[str, Any]) -> str:
    url = new_place("memory", Path())
    waypost.save(url, state)
    return url


class _WholeCopies(nn.Linear):
    """Its state is a copy, as of a model that gathers or moves its tensors to be saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in list(state):
            state[name] = state[name].clone()
        return state


class _OwnCopies(nn.Linear):
    """The same, one level down."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in list(destination):
            destination[name] = destination[name].clone()


def _hooked(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)

    def copies(_: nn.Module, state: dict[str, Any], *rest: Any) -> None:
        for name in list(state):
            state[name] = state[name].clone()

    linear._register_state_dict_hook(copies)
    return linear


@pytest.mark.parametrize("make", [_WholeCopies, _OwnCopies, _hooked])
@pytest.mark.parametrize("depth", ["alone", "as a child"])
def test_a_module_whose_state_is_a_copy_is_loaded(make: Callable[..., Any], depth: str) -> None:
    """What is reported as loaded is in the module's own parameters."""

    def model() -> nn.Module:
        return make(3, 2) if depth == "alone" else nn.Sequential(nn.Linear(4, 3), make(3, 2))

    source, target = model(), model()
    report = waypost.load(_saved({"model": source}), {"model": target})
    for name, parameter in source.named_parameters():
        assert f"model/{name}" in report.loaded
        assert raw(target.get_parameter(name)) == raw(parameter), name


@pytest.mark.parametrize("make", [_WholeCopies, _OwnCopies, _hooked])
def test_an_optimizer_keeps_the_parameters_of_a_module_whose_state_is_a_copy(
    make: Callable[..., Any],
) -> None:
    """Loading gives values to the parameters that are there; it makes no new ones."""
    target = make(3, 2)
    weight = target.weight
    waypost.load(_saved({"model": make(3, 2)}), {"model": target})
    assert target.weight is weight


class _Counting(nn.Module):
    """Extra state of the kind that `give` makes of a number."""

    def __init__(self, number: int, give: Callable[[int], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.number = number
        self._give = give

    def get_extra_state(self) -> Any:
        return self._give(self.number)

    def set_extra_state(self, state: Any) -> None:
        state = state["n"] if isinstance(state, dict) else state
        self.number = int(state)


EXTRA_STATES: dict[str, Callable[[int], Any]] = {
    "tensor": torch.tensor,
    "number": int,
    "dict": lambda number: {"n": number},
    "dict of a tensor": lambda number: {"n": torch.tensor(number)},
}


@pytest.mark.parametrize("give", EXTRA_STATES.values(), ids=EXTRA_STATES)
@pytest.mark.parametrize("depth", ["alone", "as a child"])
def test_extra_state_is_handed_to_the_module(give: Callable[[int], Any], depth: str) -> None:
    """`set_extra_state` is called with what `get_extra_state` gave, whatever that is."""
    source, target = _Counting(7, give), _Counting(0, give)
    wrap = (lambda model: model) if depth == "alone" else nn.Sequential
    waypost.load(_saved({"model": wrap(source)}), {"model": wrap(target)})
    assert target.number == 7
    assert raw(target.linear.weight) == raw(source.linear.weight)


def test_tensor_extra_state_of_a_module_with_a_load_hook() -> None:
    """The two together: through `load_state_dict`, with the extra state."""
    source, target = _Counting(7, torch.tensor), _Counting(0, torch.tensor)
    target.register_load_state_dict_post_hook(lambda *_: None)
    waypost.load(_saved({"model": source}), {"model": target})
    assert target.number == 7
    assert raw(target.linear.weight) == raw(source.linear.weight)


@pytest.mark.parametrize("wrap", [lambda lazy: lazy, nn.Sequential], ids=["alone", "child"])
def test_a_module_without_sizes_is_refused_by_name(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A lazy module that has not seen data yet has no numbers to save."""
    url = new_place("memory", Path())
    with pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(url, {"model": wrap(nn.LazyLinear(2))})
    assert caught.value.path.startswith("model/")
    assert caught.value.path.endswith(("weight", "bias"))
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


def test_a_saved_module_does_not_fill_one_without_sizes() -> None:
    """An error of Waypost, or the values of the saved one."""
    source, target = nn.Linear(3, 2), nn.LazyLinear(2)
    try:
        waypost.load(_saved({"model": source}), {"model": target})
    except waypost.WaypostError:
        assert isinstance(target.weight, nn.parameter.UninitializedParameter)
    else:
        assert_same(target.weight, source.weight)


class _Refusing:
    """A state that can be saved, and that refuses to be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"k": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("mine")


def test_an_error_in_the_users_own_load_says_what_was_filled() -> None:
    """The error is the user's own, with a note that a part of the target is new."""
    url = _saved({"model": nn.Linear(2, 2), "other": _Refusing()})
    with pytest.raises(RuntimeError, match="mine") as caught:
        waypost.load(url, {"model": nn.Linear(2, 2), "other": _Refusing()})
    assert any("load" in note for note in getattr(caught.value, "__notes__", []))
