"""Renames: what moves arrives whole under its new name, or the rename is refused."""

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


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("rename", [{"opt/": "optimizer/"}, {"opt": "optimizer"}], ids=str)
def test_an_optimizer_is_loaded_under_its_new_name(rename: dict[str, str]) -> None:
    """Rates and moments, not only the model beside it."""
    model, optimizer = _trained(0)
    url = _saved({"model": model, "opt": optimizer})
    target = nn.Linear(2, 2)
    fresh = torch.optim.Adam(target.parameters(), lr=0.5)
    waypost.load(url, {"model": target, "optimizer": fresh}, rename=rename)
    assert fresh.param_groups[0]["lr"] == 0.25
    moments = optimizer.state[model.weight]
    for name, moment in moments.items():
        assert_same_tensor(fresh.state[target.weight][name], moment, name)


def test_an_entry_of_values_is_loaded_under_its_new_name() -> None:
    """Without any tensor in it."""
    url = _saved({"w": {"t": torch.ones(1)}, "n": {"k": 5, "log": [1, (2,)]}})
    into = {"w": {"t": torch.zeros(1)}, "m": {"k": 0, "log": []}}
    waypost.load(url, into, rename={"n/": "m/"})
    assert_same(into["m"], {"k": 5, "log": [1, (2,)]})


def test_a_single_value_is_loaded_under_its_new_name() -> None:
    """An entry that is itself a number."""
    into: dict[str, Any] = {"t": torch.zeros(1), "later": 0}
    waypost.load(_saved({"t": torch.ones(1), "n": 5}), into, rename={"n": "later"})
    assert into["later"] == 5


def test_a_stateful_object_is_loaded_under_its_new_name() -> None:
    """Its counters are the saved ones."""
    saved = waypost.Progress()
    saved.step, saved.epoch = 12, 3
    target = waypost.Progress()
    target.epoch = 4
    url = _saved({"w": {"t": torch.ones(1)}, "prog": saved})
    report = waypost.load(
        url, {"w": {"t": torch.zeros(1)}, "progress": target}, rename={"prog/": "progress/"}
    )
    assert (target.step, target.epoch) == (12, 3)
    assert report.missing == report.unexpected == ()


def test_a_generator_is_loaded_under_its_new_name() -> None:
    """The stream goes on where it was."""
    source = torch.Generator().manual_seed(5)
    target = torch.Generator().manual_seed(6)
    url = _saved({"t": torch.ones(1), "g": source})
    waypost.load(url, {"t": torch.zeros(1), "stream": target}, rename={"g": "stream"})
    assert torch.equal(target.get_state(), source.get_state())


def test_a_container_is_loaded_under_its_new_name_with_its_values() -> None:
    """Tensors in place, values beside them."""
    tensor = torch.zeros(2)
    into = {"new": {"w": tensor, "n": 0}}
    waypost.load(_saved({"old": {"w": torch.ones(2), "n": 5}}), into, rename={"old/": "new/"})
    assert_same(into["new"], {"w": torch.ones(2), "n": 5})
    assert into["new"]["w"] is tensor


def test_tensors_of_a_container_move_one_by_one() -> None:
    """Where there is nothing but tensors."""
    target = {"v": torch.zeros(2), "u": torch.zeros(1)}
    url = _saved({"c": {"w": torch.ones(2), "u": torch.ones(1)}})
    waypost.load(url, {"c": target}, rename={"c/w": "c/v"})
    assert_same(target, {"v": torch.ones(2), "u": torch.ones(1)})


def test_a_rename_in_a_container_with_values_is_refused() -> None:
    """Rather than that a value is forgotten; nothing is touched."""
    target = {"v": torch.zeros(2), "n": 0}
    url = _saved({"c": {"w": torch.ones(2), "n": 5}})
    with pytest.raises(ValueError, match="rename"):
        waypost.load(url, {"c": target}, rename={"c/w": "c/v"})
    assert_same(target, {"v": torch.zeros(2), "n": 0})


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_rename_that_puts_values_into_a_container_is_refused(first: str) -> None:
    """Two entries do not become one, in whichever order they were saved."""
    target = {"w": torch.zeros(2), "n": 0}
    entries: dict[str, Any] = {"a": {"w": torch.ones(2)}, "b": {"n": 5}}
    url = _saved({first: entries.pop(first), **entries})
    with pytest.raises(ValueError, match="rename"):
        waypost.load(url, {"a": target}, rename={"b/n": "a/n"})
    assert_same(target, {"w": torch.zeros(2), "n": 0})


def test_a_rename_that_takes_a_state_apart_is_refused() -> None:
    """What can only be loaded whole is not loaded in part, and nothing is touched."""
    saved = waypost.Progress()
    saved.step = 12
    model, target = nn.Linear(2, 2), waypost.Progress()
    before = raw(model.weight)
    url = _saved({"model": nn.Linear(2, 2), "prog": saved})
    with pytest.raises(ValueError, match=r"rename|progress"):
        waypost.load(
            url, {"model": model, "progress": target}, rename={"prog/step": "progress/step"}
        )
    assert target.step == 0
    assert raw(model.weight) == before


def test_a_rename_that_takes_an_optimizer_apart_is_refused() -> None:
    """Moments without their groups are no optimizer."""
    model, optimizer = _trained(0)
    url = _saved({"model": model, "opt": optimizer})
    target = nn.Linear(2, 2)
    fresh = torch.optim.Adam(target.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"rename|optimizer"):
        waypost.load(
            url,
            {"model": target, "optimizer": fresh},
            rename={"opt/state/": "optimizer/state/"},
        )
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_what_the_renamed_entry_lacks_is_missing() -> None:
    """An entry that no rename leads to is a difference, not a silence."""
    model, optimizer = _trained(0)
    url = _saved({"model": model, "opt": optimizer})
    target = nn.Linear(2, 2)
    fresh = torch.optim.Adam(target.parameters())
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(
            url, {"model": target, "optimizer": fresh}, rename={"optimiser/": "optimizer/"}
        )
    assert any(difference.path.startswith("optimizer") for difference in caught.value.differences)


@pytest.mark.parametrize("answer", [None, 5, b"m/w"], ids=repr)
def test_a_function_that_gives_no_path_is_refused(answer: Any) -> None:
    """In words about the rename, before anything is read."""
    target = {"w": torch.zeros(1)}
    url = _saved({"m": {"w": torch.ones(1)}})
    with pytest.raises((TypeError, ValueError), match="rename"):
        waypost.load(url, {"m": target}, rename=lambda path: answer)
    assert not target["w"].any()
