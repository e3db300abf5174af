"""Tensors, structure, Python objects, safety: the rows not covered by name elsewhere.

B136 B138 B140 B141 B143 B147 B151 B153 B154 B157 B158 B161
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import QUANTISED, assert_same, assert_same_tensor, every_dtype, files_under, filled, raw
from _kit.training import compiled
from _kit.values import documented_values, nested


def test_b136_ten_elements_of_a_large_storage_cost_forty_bytes(tmp_path: Path) -> None:
    """x = zeros(10**7); save x[:10]: 40 bytes and a fixed overhead."""
    url = str(tmp_path / "snap")
    receipt = waypost.save(url, {"x": torch.zeros(10**7)[:10]})
    assert receipt.nbytes == 40
    assert sum(path.stat().st_size for path in files_under(url)) < 32 * 1024


def _three() -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
    model = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_b138_exactly_the_state_that_is_there_returns(tmp_path: Path) -> None:
    """One stepped, one never, one stepped then frozen; gradients still set while saving."""
    model, optimizer = _three()
    model["a"].grad, model["c"].grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    model["c"].requires_grad_(False)
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh, restored = _three()
    fresh["b"].grad = torch.ones(2)
    waypost.load(url, {"model": fresh, "optimizer": restored})
    have = {name for name in "abc" if restored.state.get(fresh[name])}
    assert have == {"a", "c"}
    assert raw(fresh["b"].grad) == raw(torch.ones(2))


def test_b138_an_error_names_the_parameter(tmp_path: Path) -> None:
    """A moment of another shape is reported under the parameter's name."""
    model, optimizer = _three()
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer.step()
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": model, "optimizer": optimizer})
    other = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2)})
    grown = torch.optim.AdamW(other.parameters())
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": other, "optimizer": grown})
    assert "model/b" in {difference.path for difference in caught.value.differences}


def test_b140_swapped_parameters_keep_their_own_moments(tmp_path: Path) -> None:
    """Two parameters of one shape in the other order: matched by name."""

    def build(order: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        for name in order:
            model.register_parameter(name, nn.Parameter(torch.zeros(2)))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build("ab")
    model.a.grad, model.b.grad = torch.full((2,), 1.0), torch.full((2,), 5.0)
    optimizer.step()
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh, restored = build("ba")
    waypost.load(url, {"model": fresh, "optimizer": restored})
    for name in "ab":
        wanted = optimizer.state[getattr(model, name)]["exp_avg"]
        assert_same_tensor(restored.state[getattr(fresh, name)]["exp_avg"], wanted, name)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_b141_state_keeps_its_dtype_and_value(
    weights: torch.dtype, moments: torch.dtype, tmp_path: Path
) -> None:
    """Moments of any dtype beside weights of any dtype; a step of 1001 stays 1001."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, bias=False).to(weights)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    optimizer.state[model.weight] = {
        "step": torch.tensor(1001.0),
        "exp_avg": torch.randn(2, 2).to(moments),
        "exp_avg_sq": torch.rand(2, 2).to(moments),
    }
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": model, "optimizer": optimizer})
    fresh, restored = build()
    waypost.load(url, {"model": fresh, "optimizer": restored})
    for name, tensor in optimizer.state[model.weight].items():
        assert_same_tensor(restored.state[fresh.weight][name], tensor, name)


def test_b143_one_tensor_of_every_dtype_in_one_snapshot(tmp_path: Path) -> None:
    """All of them side by side, so that none fails at the last save of a long run."""
    made = {str(dtype): filled(dtype, (3, 5)) for dtype in every_dtype() if dtype not in QUANTISED}
    url = str(tmp_path / "snap")
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


def test_b147_meta_tensors_are_named_at_save(tmp_path: Path) -> None:
    """meta is refused with its key; Parameter, buffer and requires_grad return."""
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.randn(2)))
    module.register_buffer("b", torch.randn(2))
    module.register_parameter("frozen", nn.Parameter(torch.randn(2), requires_grad=False))
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": module})
    assert_same(dict(waypost.open(url).state_dict("model")), dict(module.state_dict()))
    module.register_buffer("ghost", torch.empty(2, device="meta"))
    with pytest.raises(waypost.UnsupportedError, match="model/ghost"):
        waypost.save(str(tmp_path / "other"), {"model": module})


def test_b151_structure_returns_without_a_template(tmp_path: Path) -> None:
    """Keys with dots, lists that were empty at load and filled at save, and the reverse."""
    saved = {"a.b": 1, "a": {"b": 2}, "log": [{"loss": 1.0}, {"loss": 0.5}], "empty": []}
    url = str(tmp_path / "snap")
    waypost.save(url, {"x": saved})
    assert_same(waypost.open(url).state_dict("x"), saved)
    target: dict[str, Any] = {"a.b": 0, "a": {"b": 0}, "log": [], "empty": [1, 2]}
    waypost.load(url, {"x": target})
    assert_same(target, saved)


def test_b153_everything_documented_returns_five_deep(tmp_path: Path) -> None:
    """The whole set in one container, nested five deep, type-exact."""
    made = nested(documented_values())
    url = str(tmp_path / "snap")
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


def test_b154_plain_values_are_updated_by_a_load(tmp_path: Path) -> None:
    """The caller's epoch becomes the saved one, in a container and as an entry."""
    url = str(tmp_path / "snap")
    waypost.save(url, {"loop": {"epoch": 7}, "epoch": 7})
    loop = {"epoch": 0}
    into: dict[str, Any] = {"loop": loop, "epoch": 0}
    waypost.load(url, into)
    assert loop == {"epoch": 7}
    assert into["epoch"] == 7


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_b157_a_pickle_in_place_of_a_file_is_never_run(tmp_path: Path) -> None:
    """Each file of a snapshot replaced by a malicious pickle: refused, nothing executed."""
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": {"w": torch.ones(2)}, "x": {"v": (1, 2)}})
    trap = tmp_path / "sprung"
    payload = pickle.dumps(_Trap(str(trap)))
    for file in files_under(url):
        content = file.read_bytes()
        file.write_bytes(payload)
        with pytest.raises(waypost.WaypostError):
            waypost.load(
                url,
                {"model": {"w": torch.zeros(2)}, "x": {"v": None}},
                options=waypost.Options(allow_pickle=True),
            )
        assert not trap.exists(), file
        file.write_bytes(content)


@pytest.mark.slow
def test_b158_wrappers_are_normalised_at_both_ends(tmp_path: Path) -> None:
    """Compiled inside DataParallel, loaded plain; `module.` in the middle of a name is kept."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict({"module": nn.Linear(2, 2)})

    source, target = Inner(), Inner()
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": nn.DataParallel(compiled(source))})
    paths = {leaf.path for leaf in waypost.open(url).leaves() if leaf.kind == "tensor"}
    assert paths == {"model/block.module.weight", "model/block.module.bias"}
    waypost.load(url, {"model": target})
    assert_same(target.state_dict(), source.state_dict())
    waypost.load(url, {"model": compiled(nn.DataParallel(target))})


def test_b161_an_error_on_the_last_key_leaves_the_first_alone(tmp_path: Path) -> None:
    """All checked, then copied: the model is old or new, never half."""
    keys = [f"{index:03d}" for index in range(50)]
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": {key: torch.ones(2) for key in keys}})
    target = {key: torch.zeros(2) for key in keys}
    target[keys[-1]] = torch.zeros(3)
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target})
    assert [difference.path for difference in caught.value.differences] == [f"model/{keys[-1]}"]
    assert not any(tensor.any() for tensor in target.values())
