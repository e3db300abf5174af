"""Sparse layouts, wrapper subclasses and meta tensors: whole, or refused by name."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import PLACES, assert_same_tensor, new_place, tree_of


def _dense() -> torch.Tensor:
    dense = torch.zeros(6, 8)
    dense[0, 1], dense[2, 3], dense[5, 7], dense[2, 4] = 1.5, float("nan"), -0.0, float("inf")
    return dense


def _coo_uncoalesced() -> torch.Tensor:
    indices = torch.tensor([[0, 0, 2], [1, 1, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (3, 4))


def _coo_hybrid() -> torch.Tensor:
    indices = torch.tensor([[0, 2]])
    return torch.sparse_coo_tensor(indices, torch.randn(2, 5), (4, 5)).coalesce()


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: _dense().to_sparse(),
    "coo_uncoalesced": _coo_uncoalesced,
    "coo_hybrid": _coo_hybrid,
    "coo_empty": lambda: torch.zeros(3, 4).to_sparse(),
    "csr": lambda: _dense().to_sparse_csr(),
    "csc": lambda: _dense().to_sparse_csc(),
    "bsr": lambda: _dense().to_sparse_bsr((2, 2)),
    "bsc": lambda: _dense().to_sparse_bsc((3, 4)),
    "csr_bfloat16": lambda: _dense().bfloat16().to_sparse_csr(),
    "coo_complex": lambda: _dense().to(torch.complex64).to_sparse(),
}


def _sparse(name: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SPARSE[name]()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_return_part_by_part(layout: str, place: str, tmp_path: Path) -> None:
    """Indices and values return as they were: order, duplicates and NaNs included."""
    tensor = _sparse(layout)
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": {"s": tensor}})
    assert_same_tensor(waypost.open(url).state_dict("x")["s"], tensor)


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_load_into_containers(layout: str, tmp_path: Path) -> None:
    """A sparse target of the same layout and shape holds the saved parts afterwards."""
    tensor = _sparse(layout)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {"s": tensor}})
    into = {"s": _sparse(layout)}
    values = into["s"]._values() if layout.startswith("coo") else into["s"].values()
    values.fill_(3)
    waypost.load(url, {"x": into})
    assert_same_tensor(into["s"], tensor)


class Scaled(torch.Tensor):
    """A toy quantised weight: integers and a scale, flattened by torch's own protocol."""

    integers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor, label: str) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=torch.float32, device=integers.device
        )

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, label: str) -> None:
        self.integers, self.scale, self.label = integers, scale, label

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["integers", "scale"], {"label": self.label}

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride) -> "Scaled":
        return cls(inner["integers"], inner["scale"], meta["label"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            source = args[0]
            return cls(source.integers, source.scale, source.label)
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            target.integers.copy_(source.integers)
            target.scale.copy_(source.scale)
            return target
        raise NotImplementedError(f"Scaled has no {func}")


def _scaled(seed: int) -> Scaled:
    maker = torch.Generator().manual_seed(seed)
    integers = torch.randint(-128, 127, (4, 6), dtype=torch.int8, generator=maker)
    return Scaled(integers, torch.rand(4, 1, generator=maker), f"group-{seed}")


@pytest.mark.parametrize("place", PLACES)
def test_a_wrapper_subclass_returns_through_its_own_protocol(place: str, tmp_path: Path) -> None:
    """Inner tensors and metadata return, and so does the class."""
    tensor = _scaled(3)
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": {"w": tensor}})
    restored = waypost.open(url).state_dict("x")["w"]
    assert type(restored) is Scaled
    assert restored.label == "group-3"
    assert_same_tensor(restored.integers, tensor.integers)
    assert_same_tensor(restored.scale, tensor.scale)


def test_a_wrapper_subclass_parameter_loads_into_a_module(tmp_path: Path) -> None:
    """A module with a subclass weight is saved and filled in place."""

    def module(seed: int) -> nn.Module:
        made = nn.Module()
        made.weight = nn.Parameter(_scaled(seed), requires_grad=False)
        return made

    source, target = module(1), module(2)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": source})
    waypost.load(url, {"model": target})
    assert_same_tensor(target.weight.integers, source.weight.integers)
    assert_same_tensor(target.weight.scale, source.weight.scale)


@pytest.mark.parametrize("place", ["disk"])
def test_a_meta_tensor_is_refused_by_name_and_nothing_is_written(
    place: str, tmp_path: Path
) -> None:
    """There are no numbers to save: refused at save, naming the leaf, leaving nothing behind."""
    url = new_place(place, tmp_path)
    before = tree_of(tmp_path)
    state = {"model": {"fine": torch.ones(2), "bad": torch.empty(2, device="meta")}}
    with pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(url, state)
    assert caught.value.path == "model/bad"
    assert "model/bad" in str(caught.value)
    assert tree_of(tmp_path) == before


def test_a_meta_module_is_refused_by_name(tmp_path: Path) -> None:
    """A model that was never materialised cannot be saved as if it were."""
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(new_place("memory", tmp_path), {"model": model})
    assert caught.value.path in ("model/weight", "model/bias")


def test_loading_into_a_meta_module_is_refused_before_anything_moves(tmp_path: Path) -> None:
    """A meta target has no memory to fill: an error that names it, nothing half done."""
    url = new_place("memory", tmp_path)
    waypost.save(url, {"a": torch.ones(2), "model": nn.Linear(2, 3)})
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    beside = torch.zeros(2)
    with pytest.raises(waypost.WaypostError) as caught:
        waypost.load(url, {"a": beside, "model": model})
    assert "weight" in str(caught.value)
    assert torch.equal(beside, torch.zeros(2))
