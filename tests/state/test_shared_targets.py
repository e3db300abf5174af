"""Targets that share memory: two values never fight for one place, and autograd sees the change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same, assert_same_tensor, new_place, raw


def _saved(state: dict[str, Any]) -> str:
    url = new_place("memory", Path())
    waypost.save(url, state)
    return url


def _is_tie(caught: Any) -> bool:
    return any(difference.kind == "tie" for difference in caught.value.differences)


OVERLAPS = {
    "first half": lambda base: (base, base[:2]),
    "middle": lambda base: (base[:3], base[2:]),
    "every second": lambda base: (base, base[::2]),
    "reshaped": lambda base: (base, base.view(2, 2)),
    "same": lambda base: (base, base),
    "other type": lambda base: (base, base.view(torch.int32)[1:3]),
}


@pytest.mark.parametrize("views", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_overlapping_targets_of_untied_tensors_are_a_tie(views: Any, order: str) -> None:
    """Whichever would win: the target ties what the snapshot does not; nothing is touched."""
    base = torch.zeros(4)
    target = dict(zip("ab", views(base), strict=True))
    saved = {name: torch.full_like(view, 7) for name, view in target.items()}
    url = _saved({"e": saved})
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"e": {name: target[name] for name in order}})
    assert _is_tie(caught)
    assert not base.any()


@pytest.mark.parametrize("views", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_targets_of_the_same_overlap_are_loaded(views: Any) -> None:
    """Saved from such views, loaded into such views."""
    source = dict(zip("ab", views(torch.arange(1.0, 5)), strict=True))
    target = dict(zip("ab", views(torch.zeros(4)), strict=True))
    waypost.load(_saved({"e": source}), {"e": target})
    for name, tensor in source.items():
        assert_same_tensor(target[name], tensor, name)


def test_interleaved_targets_do_not_overlap() -> None:
    """Views of one tensor without a common element are two targets."""
    base = torch.zeros(6)
    url = _saved({"e": {"a": torch.ones(3), "b": torch.full((3,), 2.0)}})
    waypost.load(url, {"e": {"a": base[::2], "b": base[1::2]}})
    assert base.tolist() == [1, 2, 1, 2, 1, 2]


def test_one_target_for_two_tensors_is_a_tie_also_under_cast() -> None:
    """The conversion changes nothing about whose the place is."""
    shared = torch.zeros(2, dtype=torch.float64)
    url = _saved({"e": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}})
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"e": {"a": shared, "b": shared}}, cast=True)
    assert _is_tie(caught)
    assert not shared.any()


def test_one_target_for_one_saved_tensor_under_two_names_is_fine_under_cast() -> None:
    """Tied here as there."""
    source = torch.ones(2)
    shared = torch.zeros(2, dtype=torch.float64)
    waypost.load(
        _saved({"e": {"a": source, "b": source}}), {"e": {"a": shared, "b": shared}}, cast=True
    )
    assert shared.tolist() == [1, 1]


class _Two(nn.Module):
    def __init__(self, *, tied: bool, hook: bool) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight
        if hook:
            self.register_load_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "with a load hook"])
def test_a_tied_module_does_not_take_an_untied_one(hook: bool) -> None:
    """With hooks as without."""
    url = _saved({"model": _Two(tied=False, hook=hook)})
    target = _Two(tied=True, hook=hook)
    before = raw(target.a.weight)
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target})
    assert _is_tie(caught)
    assert raw(target.a.weight) == before


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "with a load hook"])
def test_a_tied_module_takes_a_tied_one(hook: bool) -> None:
    """And stays tied."""
    source, target = _Two(tied=True, hook=hook), _Two(tied=True, hook=hook)
    waypost.load(_saved({"model": source}), {"model": target})
    assert raw(target.a.weight) == raw(source.a.weight)
    assert target.b.weight is target.a.weight


@pytest.mark.parametrize(
    "target",
    [
        lambda: torch.zeros(5).as_strided((3, 3), (1, 1)),
        lambda: torch.zeros(7).as_strided((3, 3), (2, 1)),
        lambda: torch.zeros(3).expand(3, 3),
        lambda: torch.zeros(1, 3).expand(3, 3),
    ],
    ids=["diagonal", "overlapping rows", "expanded", "expanded rows"],
)
@pytest.mark.parametrize("cast", [False, True])
def test_a_target_whose_elements_share_memory_is_refused(target: Any, cast: bool) -> None:
    """Nine numbers do not fit into five places; the neighbour is not filled either."""
    other, overlapping = torch.zeros(2), target()
    dtype = torch.float64 if cast else torch.float32
    url = _saved({"e": {"x": torch.ones(2), "a": torch.arange(9, dtype=dtype).reshape(3, 3)}})
    with pytest.raises((waypost.MismatchError, waypost.UnsupportedError)) as caught:
        waypost.load(url, {"e": {"x": other, "a": overlapping}}, cast=cast)
    assert "e/a" in str(caught.value)
    assert not other.any()
    assert not overlapping.any()


def _momentum(*buffers: torch.Tensor) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    models: list[nn.Module] = [nn.Linear(2, 2, bias=False) for _ in buffers]
    optimizer = torch.optim.SGD([model.weight for model in models], 0.1, momentum=0.9)
    for model, buffer in zip(models, buffers, strict=True):
        optimizer.state[model.weight]["momentum_buffer"] = buffer
    return models, optimizer


def test_momentum_buffers_that_are_one_tensor_become_two() -> None:
    """Each parameter gets its own again."""
    models, optimizer = _momentum(torch.ones(2, 2), torch.full((2, 2), 2.0))
    url = _saved({"m": models[0], "k": models[1], "o": optimizer})
    shared = torch.zeros(2, 2)
    models, optimizer = _momentum(shared, shared)
    waypost.load(url, {"m": models[0], "k": models[1], "o": optimizer})
    for model, number in zip(models, (1, 2), strict=True):
        buffer = optimizer.state[model.weight]["momentum_buffer"]
        assert torch.equal(buffer, torch.full((2, 2), float(number)))


def test_a_momentum_buffer_that_is_the_weight_does_not_overwrite_it() -> None:
    """The model's numbers are the model's."""
    models, optimizer = _momentum(torch.arange(4.0).reshape(2, 2))
    weight = raw(models[0].weight)
    url = _saved({"m": models[0], "o": optimizer})
    optimizer.state[models[0].weight]["momentum_buffer"] = models[0].weight.detach()
    waypost.load(url, {"m": models[0], "o": optimizer})
    assert raw(models[0].weight) == weight
    buffer = optimizer.state[models[0].weight]["momentum_buffer"]
    assert_same_tensor(buffer, torch.arange(4.0).reshape(2, 2))


def test_a_momentum_buffer_that_is_expanded_is_replaced() -> None:
    """What cannot be filled in place is made anew."""
    models, optimizer = _momentum(torch.arange(4.0).reshape(2, 2))
    url = _saved({"m": models[0], "o": optimizer})
    optimizer.state[models[0].weight]["momentum_buffer"] = torch.zeros(1, 2).expand(2, 2)
    waypost.load(url, {"m": models[0], "o": optimizer})
    buffer = optimizer.state[models[0].weight]["momentum_buffer"]
    assert torch.equal(buffer, torch.arange(4.0).reshape(2, 2))


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "with a load hook"])
def test_backward_over_a_load_is_an_error(place: str, hook: bool, tmp_path: Path) -> None:
    """Gradients of the old weights are not computed with the new ones."""
    url = new_place(place, tmp_path)
    waypost.save(url, {"model": nn.Linear(2, 2, bias=False)})
    target = nn.Linear(2, 2, bias=False)
    if hook:
        target.register_load_state_dict_post_hook(lambda *_: None)
    inputs = torch.ones(1, 2, requires_grad=True)
    loss = target(inputs).sum()
    waypost.load(url, {"model": target})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_filled_tensor_has_a_new_version() -> None:
    """Parameters, buffers, views and tensors of containers."""
    base = torch.zeros(4)
    target: dict[str, Any] = {"a": base[:2], "b": torch.zeros(2), "c": torch.zeros(2, 2).t()}
    source = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.arange(4.0).reshape(2, 2)}
    model = nn.BatchNorm1d(2)
    versions = {name: tensor._version for name, tensor in target.items()}
    own = {name: tensor._version for name, tensor in model.state_dict().items()}
    waypost.load(_saved({"e": source, "m": nn.BatchNorm1d(2)}), {"e": target, "m": model})
    assert_same(target["b"], source["b"])
    for name, tensor in target.items():
        assert tensor._version > versions[name], name
    for name, tensor in model.state_dict().items():
        assert tensor._version > own[name], name


def test_training_goes_on_after_a_load() -> None:
    """A new forward and backward are as ever."""
    target = nn.Linear(2, 2)
    target(torch.ones(1, 2)).sum().backward()
    waypost.load(_saved({"model": nn.Linear(2, 2)}), {"model": target})
    target(torch.ones(1, 2)).sum().backward()
    assert target.weight.is_leaf
    assert target.weight.requires_grad
