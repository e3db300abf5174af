"""The unsharded model file is a plain safetensors file that any reader opens."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import waypost
from _kit import assert_same_tensor, files_under, new_place


def _model_file(url: str) -> Path:
    found = [path for path in files_under(url) if path.name.startswith("model")]
    (file,) = [path for path in found if path.suffix == ".safetensors"]
    return file


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 2).to(torch.bfloat16))


def test_safe_open_lists_the_modules_own_names(tmp_path: Path) -> None:
    """Keys are the names of `state_dict()`, nothing added, nothing left out."""
    model = _net()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": model, "progress": {"epoch": 3}}, step=5)
    with safe_open(str(_model_file(url)), framework="pt") as reader:
        assert set(reader.keys()) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert_same_tensor(reader.get_tensor(name), tensor, name)


def test_load_file_feeds_load_state_dict(tmp_path: Path) -> None:
    """The file loads into a plain module with strict matching."""
    source, target = _net(), _net()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": source, "other": torch.ones(3)})
    target.load_state_dict(load_file(str(_model_file(url))), strict=True)
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool],
    ids=str,
)
def test_common_dtypes_are_stored_as_themselves(dtype: torch.dtype, tmp_path: Path) -> None:
    """What safetensors knows is stored under its safetensors type, in the tensor's own shape."""
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": {"w": tensor}})
    assert_same_tensor(load_file(str(_model_file(url)))["w"], tensor)


def test_data_begins_at_a_page_boundary(tmp_path: Path) -> None:
    """The header is padded so that the first data byte lies at a multiple of 4096."""
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": _net()})
    header = int.from_bytes(_model_file(url).read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0


def test_names_of_wrappers_are_not_in_the_file(tmp_path: Path) -> None:
    """A wrapped module is stored under the names of the module inside."""
    model = _net()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": nn.DataParallel(model)})
    with safe_open(str(_model_file(url)), framework="pt") as reader:
        assert set(reader.keys()) == set(model.state_dict())


def test_a_scalar_and_an_empty_tensor_are_readable(tmp_path: Path) -> None:
    """0-d and zero-sized tensors are legal entries of the file."""
    state = {"scalar": torch.tensor(3.5), "none": torch.empty(3, 0), "w": torch.ones(2)}
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": state})
    read = load_file(str(_model_file(url)))
    for name, tensor in state.items():
        assert_same_tensor(read[name], tensor, name)
