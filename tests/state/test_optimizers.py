"""Optimizer state: by parameter name, with its own dtypes, with its holes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same_tensor, new_place, raw

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _same_state(ours: Any, theirs: Any, at: str) -> None:
    assert type(ours) is type(theirs), at
    if isinstance(theirs, torch.Tensor):
        assert_same_tensor(ours, theirs, at)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), at
        for key in theirs:
            _same_state(ours[key], theirs[key], f"{at}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), at
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _same_state(a, b, f"{at}[{index}]")
    else:
        assert ours == theirs, at


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_returns_and_goes_on_equally(name: str, tmp_path: Path) -> None:
    """State and groups are equal after a load, and so are the next three steps."""
    model = _net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(3):
        _step(model, optimizer, seed)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh = _net(5)
    restored = OPTIMIZERS[name](fresh.parameters())
    waypost.load(url, {"model": fresh, "optimizer": restored})
    _same_state(restored.state_dict(), optimizer.state_dict(), name)
    for seed in range(3, 6):
        _step(model, optimizer, seed)
        _step(fresh, restored, seed)
    for (key, ours), theirs in zip(
        fresh.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert raw(ours) == raw(theirs), key


def test_a_fresh_optimizer_without_state_returns(tmp_path: Path) -> None:
    """Saved before the first step: no state, and none is invented at load."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    restored = torch.optim.AdamW(model.parameters(), lr=1.0)
    waypost.load(url, {"model": model, "optimizer": restored})
    assert restored.state_dict()["state"] == {}
    assert restored.param_groups[0]["lr"] == 3e-4


def test_state_that_the_snapshot_lacks_is_removed_by_a_load(tmp_path: Path) -> None:
    """A used optimizer loaded from a fresh snapshot is fresh again, not half old."""
    model = _net()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    used = torch.optim.AdamW(model.parameters())
    _step(model, used, 0)
    waypost.load(url, {"model": model, "optimizer": used})
    assert used.state_dict()["state"] == {}


def _three(order: str) -> nn.Module:
    """Three parameters of one shape, registered in the order of the letters."""
    made = nn.Module()
    for letter in order:
        made.register_parameter(letter, nn.Parameter(torch.full((3,), float(ord(letter)))))
    return made


def _partly_stepped(optimizer_class: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`a` stepped twice, `b` never, `c` once and then frozen."""
    model = _three("abc")
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    model.a.grad, model.c.grad = torch.ones(3), torch.full((3,), 2.0)
    optimizer.step()
    model.c.requires_grad_(False)
    model.c.grad = None
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam], ids=["w", "a"])
def test_never_stepped_and_frozen_parameters_keep_exactly_their_state(
    optimizer_class: Any, tmp_path: Path
) -> None:
    """What has no state gets none; what has keeps it with its own step count."""
    model, optimizer = _partly_stepped(optimizer_class)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh = _three("abc")
    restored = optimizer_class(fresh.parameters(), lr=0.7)
    waypost.load(url, {"model": fresh, "optimizer": restored})
    _same_state(restored.state_dict(), optimizer.state_dict(), "optimizer")
    assert fresh.b not in restored.state or not restored.state[fresh.b]
    assert float(restored.state[fresh.a]["step"]) == 2.0
    assert float(restored.state[fresh.c]["step"]) == 1.0


def test_frozen_later_parameters_load_into_a_model_that_is_frozen_already(tmp_path: Path) -> None:
    """`requires_grad` of the target does not decide what state it gets."""
    model, optimizer = _partly_stepped(torch.optim.AdamW)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh = _three("abc")
    fresh.c.requires_grad_(False)
    restored = torch.optim.AdamW(fresh.parameters())
    waypost.load(url, {"model": fresh, "optimizer": restored})
    _same_state(restored.state_dict()["state"], optimizer.state_dict()["state"], "state")
    assert not fresh.c.requires_grad


def test_saving_and_loading_need_no_cleared_gradients(tmp_path: Path) -> None:
    """Gradients that are set when one saves or loads stay as they are."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, 0)
    grads = [raw(parameter.grad) for parameter in model.parameters()]
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    waypost.load(url, {"model": model, "optimizer": optimizer})
    assert [raw(parameter.grad) for parameter in model.parameters()] == grads


def test_parameters_in_another_order_get_their_own_state(tmp_path: Path) -> None:
    """Registered as b, c, a at load: matched by name, not by position."""
    model, optimizer = _partly_stepped(torch.optim.AdamW)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh = _three("bca")
    restored = torch.optim.AdamW(fresh.parameters())
    waypost.load(url, {"model": fresh, "optimizer": restored})
    for letter in "ac":
        ours = restored.state[getattr(fresh, letter)]
        _same_state(dict(ours), dict(optimizer.state[getattr(model, letter)]), letter)
    assert not restored.state.get(fresh.b)


def test_state_is_stored_under_parameter_names(tmp_path: Path) -> None:
    """The leaves of an optimizer carry the names of the model's parameters."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    snapshot = waypost.open(url)
    wanted = optimizer.state[model[0].weight]["exp_avg"]
    assert_same_tensor(snapshot.read("optimizer/state/0.weight/exp_avg"), wanted)
    assert snapshot.read("optimizer/param_groups/0/lr") == 0.25


def _mixed() -> tuple[nn.Module, torch.optim.Optimizer]:
    """bf16 weights with fp32 moments and an fp32 step of 1001."""
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {
        "step": torch.tensor(1001.0),
        "exp_avg": torch.randn(2, 3),
        "exp_avg_sq": torch.rand(2, 3, dtype=torch.float64),
    }
    return model, optimizer


def test_dtypes_of_state_do_not_follow_the_parameters(tmp_path: Path) -> None:
    """fp32 and fp64 moments of a bf16 weight, and a step above 256, return unchanged."""
    model, optimizer = _mixed()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    restored = torch.optim.AdamW(fresh.parameters())
    waypost.load(url, {"model": fresh, "optimizer": restored})
    state = restored.state[fresh.weight]
    for name, tensor in optimizer.state[model.weight].items():
        assert_same_tensor(state[name], tensor, name)
    assert state["step"].item() == 1001


def test_groups_return_with_their_options_and_an_empty_group(tmp_path: Path) -> None:
    """Each group's options return, also those of a group without parameters."""

    def build(rates: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _net()
        groups = [
            {"params": list(model[0].parameters()), "lr": rates[0], "tag": "low"},
            {"params": [], "lr": rates[1]},
            {"params": list(model[2].parameters()), "lr": rates[2], "weight_decay": rates[2]},
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = build([0.1, 0.2, 0.3])
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh, restored = build([1.0, 2.0, 3.0])
    waypost.load(url, {"model": fresh, "optimizer": restored})
    _same_state(restored.state_dict(), optimizer.state_dict(), "optimizer")


def test_a_group_added_since_is_a_clear_error(tmp_path: Path) -> None:
    """More groups than the snapshot holds: a difference of kind "group", nothing changed."""
    model = _net()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    grown = torch.optim.AdamW(
        [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}], lr=0.5
    )
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": model, "optimizer": grown})
    assert "group" in {difference.kind for difference in caught.value.differences}
    assert "group" in str(caught.value)
    assert grown.state_dict()["state"] == {}
    assert grown.param_groups[0]["lr"] == 0.5


def test_a_parameter_in_another_group_is_a_clear_error(tmp_path: Path) -> None:
    """The same parameters split otherwise: refused rather than given another group's options."""

    def build(split: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _net()
        every = list(model.parameters())
        return model, torch.optim.AdamW([{"params": every[:split]}, {"params": every[split:]}])

    model, optimizer = build(1)
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh, restored = build(2)
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": fresh, "optimizer": restored})
    assert "group" in {difference.kind for difference in caught.value.differences}


def test_another_kind_of_optimizer_does_not_take_the_state(tmp_path: Path) -> None:
    """AdamW's moments do not go into SGD without a word."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "optimizer": optimizer})
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    assert other.state_dict()["state"] == {}


def test_an_optimizer_without_its_model_returns(tmp_path: Path) -> None:
    """Names are unknown: the state is matched by position, and returns."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, 0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"optimizer": optimizer})
    restored = torch.optim.AdamW(model.parameters())
    waypost.load(url, {"optimizer": restored})
    _same_state(restored.state_dict(), optimizer.state_dict(), "optimizer")


def test_two_models_with_an_optimizer_each_do_not_mix(tmp_path: Path) -> None:
    """A generator and a discriminator with equal parameter names keep their own moments."""
    models = {name: _net(index) for index, name in enumerate(["generator", "critic"])}
    state: dict[str, Any] = dict(models)
    for index, (name, model) in enumerate(models.items()):
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer, index)
        state[f"{name}_optimizer"] = optimizer
    url = new_place("disk", tmp_path)
    waypost.save(url, state)
    fresh: dict[str, Any] = {name: _net(9) for name in models}
    for name in models:
        fresh[f"{name}_optimizer"] = torch.optim.AdamW(fresh[name].parameters())
    waypost.load(url, fresh)
    for name in models:
        ours, theirs = fresh[f"{name}_optimizer"], state[f"{name}_optimizer"]
        _same_state(ours.state_dict(), theirs.state_dict(), name)
