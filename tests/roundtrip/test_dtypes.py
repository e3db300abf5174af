"""Every dtype of the installed torch, in every form a tensor can take, returns bit for bit."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import (
    PLACES,
    QUANTISED,
    QUANTISED_SUB_BYTE,
    assert_same_tensor,
    every_dtype,
    filled,
    forms,
    new_place,
    quantised,
    raw,
    refusal,
)

DENSE = [dtype for dtype in every_dtype() if dtype not in QUANTISED]


def _names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_sweep_covers_the_dtypes_people_use() -> None:
    """The enumeration must not silently shrink."""
    named = {_names(dtype) for dtype in DENSE}
    assert {"bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64"} <= named
    assert {"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"} <= named
    assert {"uint16", "uint32", "uint64", "complex32", "int4", "uint4", "bits8"} <= named
    assert len(QUANTISED) >= 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_every_form_returns_through_state_dict(
    dtype: torch.dtype, place: str, tmp_path: Path
) -> None:
    """`open(...).state_dict` gives back the same dtype, shape and bytes for every form."""
    made = forms(dtype)
    url = new_place(place, tmp_path)
    waypost.save(url, {"forms": made}, step=1)
    restored = waypost.open(url).state_dict("forms")
    assert list(restored) == list(made)
    for name, tensor in made.items():
        assert_same_tensor(restored[name], tensor, name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_every_form_returns_through_load_in_place(
    dtype: torch.dtype, place: str, tmp_path: Path
) -> None:
    """`load` fills the tensors the caller already has, without replacing them."""
    made = forms(dtype)
    url = new_place(place, tmp_path)
    waypost.save(url, {"forms": made})
    targets = {
        name: filled(tensor.dtype, tuple(tensor.shape), seed=99) for name, tensor in made.items()
    }
    before = dict(targets)
    waypost.load(url, {"forms": targets})
    for name, tensor in made.items():
        assert targets[name] is before[name], f"{name} was replaced"
        assert_same_tensor(targets[name], tensor, name)


@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_load_fills_targets_of_any_layout(dtype: torch.dtype, tmp_path: Path) -> None:
    """Transposed, strided and channels-last targets are filled, and nothing beside them."""
    saved = {"t": filled(dtype, (4, 6)), "s": filled(dtype, (5,)), "c": filled(dtype, (2, 3, 4, 5))}
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": saved})
    base = filled(dtype, (16,), 50)
    beside = raw(base[1::3])
    targets = {
        "t": filled(dtype, (6, 4), 51).t(),
        "s": base[::3][:5],
        "c": filled(dtype, (2, 4, 5, 3), 52).permute(0, 3, 1, 2),
    }
    strides = {name: tensor.stride() for name, tensor in targets.items()}
    waypost.load(url, {"x": targets})
    for name, tensor in saved.items():
        assert_same_tensor(targets[name], tensor, name)
        assert targets[name].stride() == strides[name], name
    assert raw(base[1::3]) == beside


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_every_dtype_is_read_alone_and_in_part(
    dtype: torch.dtype, place: str, tmp_path: Path
) -> None:
    """`read` returns one leaf or a box of it, into the caller's tensor when asked."""
    tensor = filled(dtype, (9, 11))
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": {"w": tensor}})
    snapshot = waypost.open(url)
    assert_same_tensor(snapshot.read("x/w"), tensor)
    assert_same_tensor(snapshot.read("x/w", box=(slice(2, 5), (3, 9))), tensor[2:5, 3:9])
    out = filled(dtype, (9, 11), 77)
    snapshot.read("x/w", out=out)
    assert_same_tensor(out, tensor)


@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_a_tensor_entry_is_filled_in_place(dtype: torch.dtype, tmp_path: Path) -> None:
    """A bare tensor is an entry: saved by name, filled in place."""
    tensor, target = filled(dtype, (7, 3)), filled(dtype, (7, 3), 31)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"weight": tensor})
    waypost.load(url, {"weight": target})
    assert_same_tensor(target, tensor)


@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_parameters_and_buffers_of_every_dtype_return(dtype: torch.dtype, tmp_path: Path) -> None:
    """A module's parameters and buffers keep dtype, identity and bytes."""

    def module(seed: int) -> nn.Module:
        made = nn.Module()
        made.register_parameter("p", nn.Parameter(filled(dtype, (3, 5), seed), requires_grad=False))
        made.register_buffer("b", filled(dtype, (4,), seed + 1))
        made.register_buffer("scalar", filled(dtype, (), seed + 2))
        made.register_buffer("nothing", filled(dtype, (3, 0), seed + 3))
        return made

    source, target = module(0), module(10)
    kept = target.p
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": source})
    waypost.load(url, {"model": target})
    assert target.p is kept
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


def _quantised_forms() -> Iterator[tuple[torch.dtype, bool]]:
    """Yields every quantised dtype and scheme that this torch can make at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype, per_channel in itertools.product(QUANTISED, (False, True)):
            with contextlib.suppress(NotImplementedError):
                quantised(dtype, per_channel=per_channel)
                yield dtype, per_channel


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "per_channel"), list(_quantised_forms()))
@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_return_or_are_refused_at_save(
    dtype: torch.dtype, per_channel: bool, place: str, tmp_path: Path
) -> None:
    """Integers, scheme, scales and zero points return; only sub-byte ones may be refused."""
    tensor = quantised(dtype, per_channel=per_channel)
    url = new_place(place, tmp_path)
    refused = refusal(lambda: waypost.save(url, {"q": {"w": tensor}}))
    if refused is not None:
        assert dtype in QUANTISED_SUB_BYTE
        assert refused.path == "q/w"
        assert "q/w" in str(refused)
        return
    assert_same_tensor(waypost.open(url).state_dict("q")["w"], tensor)
    target = quantised(dtype, seed=5, per_channel=per_channel)
    waypost.load(url, {"q": {"w": target}})
    assert_same_tensor(target, tensor)


@pytest.mark.parametrize("dtype", DENSE, ids=_names)
def test_the_listing_names_dtype_shape_and_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    """`leaves` tells dtype, shape and size of a leaf without reading it."""
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {"w": filled(dtype, (4, 5))}})
    (leaf,) = waypost.open(url).leaves("x/w")
    assert leaf.path == "x/w"
    assert leaf.dtype == _names(dtype)
    assert leaf.shape == (4, 5)
    assert leaf.nbytes == 20 * dtype.itemsize
    assert leaf.kind == "tensor"


def test_nan_payloads_and_negative_zero_survive(tmp_path: Path) -> None:
    """The bit patterns that arithmetic would change are in the sweep and come back."""
    words = [0x7FC12345, 0x7F812345, 0xFFA00001, 0x80000000, 0x7F800000, 0xFF800000, 1]
    tensor = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words])
    tensor = tensor.to(torch.int32).view(torch.float32)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": tensor})
    read = waypost.open(url).read("x")
    assert [value & 0xFFFFFFFF for value in read.view(torch.int32).tolist()] == words
