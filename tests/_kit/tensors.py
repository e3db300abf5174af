"""Tensors of every dtype built from raw bytes, and a comparison that looks only at bytes."""

import random
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn


def every_dtype() -> list[torch.dtype]:
    """All dtypes of the installed torch, each once, in a stable order."""
    return sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def _is_quantised(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.").startswith(("qint", "quint"))


QUANTISED = [dtype for dtype in every_dtype() if _is_quantised(dtype)]
QUANTISED_SUB_BYTE = [dtype for dtype in QUANTISED if "x" in str(dtype)]


def _component_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _special_elements(dtype: torch.dtype) -> list[bytes]:
    """Zero, -0.0, the smallest subnormal, all ones (a NaN), and float infinities and NaNs."""
    size = _component_bytes(dtype)
    specials = [
        bytes(size),
        bytes(size - 1) + b"\x80",
        b"\x01" + bytes(size - 1),
        b"\xff" * size,
        b"\x7f" * size,
        b"\x80" * size,
    ]
    if size == 4:
        # +inf, -inf, quiet NaN with a payload, signalling NaN, negative signalling NaN
        words = (0x7F800000, 0xFF800000, 0x7FC12345, 0x7F812345, 0xFFA00001)
        specials += [word.to_bytes(4, "little") for word in words]
    if size == 8:
        words = (0x7FF << 52, 0xFFF << 52, (0x7FF << 52) | 0x8000000012345, (0x7FF << 52) | 7)
        specials += [word.to_bytes(8, "little") for word in words]
    if size == 2:
        # half and bfloat16 infinities and signalling NaNs
        words = (0x7C00, 0xFC00, 0x7C01, 0x7F80, 0xFF80, 0x7F81)
        specials += [word.to_bytes(2, "little") for word in words]
    if not dtype.is_complex:
        return specials
    return [left + right for left, right in zip(specials, reversed(specials), strict=True)]


def filled(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A contiguous tensor whose bytes are the special patterns followed by seeded noise."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex32 calls itself experimental
            return torch.empty(tuple(shape), dtype=dtype)
    total = count * dtype.itemsize
    noise = random.Random(f"{dtype} {tuple(shape)} {seed}")
    specials = _special_elements(dtype)
    noise.shuffle(specials)
    content = (b"".join(specials) + noise.randbytes(total))[:total]
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()
    return flat.view(dtype).reshape(tuple(shape))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor in logical (row-major) order, conj and neg resolved."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.numel() == 0:
        return b""
    item = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    view = storage.as_strided(
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.stride()), 1),
        tensor.storage_offset() * item,
    )
    return view.contiguous().numpy().tobytes()


def quantised(dtype: torch.dtype, seed: int = 0, *, per_channel: bool = False) -> torch.Tensor:
    """A quantised tensor with raw integer content made from `filled`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) * 3
        if per_channel:
            scales = torch.tensor([0.25, 0.5, 0.125, 1.5], dtype=torch.float64)
            zeros = torch.tensor([0, 1, 2, 3], dtype=torch.int64)
            return torch.quantize_per_channel(base, scales, zeros, 0, dtype)
        return torch.quantize_per_tensor(base, 0.37, 3, dtype)


def assert_same_quantised(actual: torch.Tensor, expected: torch.Tensor, at: str = "") -> None:
    """Fails unless integers, scheme, scales and zero points are the same."""
    assert actual.dtype is expected.dtype, at
    assert actual.shape == expected.shape, at
    assert actual.qscheme() == expected.qscheme(), at
    assert raw(actual.int_repr()) == raw(expected.int_repr()), at
    if expected.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        assert actual.q_scale() == expected.q_scale(), at
        assert actual.q_zero_point() == expected.q_zero_point(), at
        return
    assert actual.q_per_channel_axis() == expected.q_per_channel_axis(), at
    for name in ("q_per_channel_scales", "q_per_channel_zero_points"):
        ours, theirs = getattr(actual, name)(), getattr(expected, name)()
        assert ours.dtype is theirs.dtype, (at, name)
        assert raw(ours) == raw(theirs), (at, name)


def _sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    else:
        names = ("ccol_indices", "row_indices", "values")
    return {name: getattr(tensor, name)() for name in names}


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, at: str = "") -> None:
    """Fails unless both tensors have the same dtype, shape, layout and bytes."""
    assert isinstance(actual, torch.Tensor), (at, type(actual))
    assert actual.dtype is expected.dtype, (at, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (at, actual.shape, expected.shape)
    assert actual.layout is expected.layout, (at, actual.layout, expected.layout)
    if expected.is_quantized:
        assert_same_quantised(actual, expected, at)
        return
    if expected.layout is not torch.strided:
        ours, theirs = _sparse_parts(actual.detach()), _sparse_parts(expected.detach())
        for name, part in theirs.items():
            assert_same_tensor(ours[name], part, f"{at}.{name}")
        if expected.layout is torch.sparse_coo:
            assert actual.is_coalesced() == expected.is_coalesced(), at
        return
    assert raw(actual) == raw(expected), f"bytes differ at {at or 'tensor'} ({expected.dtype})"


def _add_where_supported(
    made: dict[str, torch.Tensor], name: str, make: Callable[[], torch.Tensor]
) -> None:
    """Adds the form when torch can make it and read its values for this dtype."""
    try:
        tensor = make()
        raw(tensor)
    except (RuntimeError, NotImplementedError):
        return
    made[name] = tensor


def forms(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensor forms that the dtype can take: sizes, strides, views, wrappers."""
    made = {
        "scalar": filled(dtype, ()),
        "one": filled(dtype, (1,)),
        "empty": filled(dtype, (0,)),
        "empty_2d": filled(dtype, (3, 0)),
        "plain": filled(dtype, (5, 7)),
        "transposed": filled(dtype, (5, 7), 1).t(),
        "strided": filled(dtype, (16,), 2)[::3],
        "block": filled(dtype, (6, 8), 3)[1:5:2, 2:7:2],
        "offset": filled(dtype, (40,), 4)[7:30],
        "expanded": filled(dtype, (1, 4), 5).expand(3, 4),
        "expanded_scalar": filled(dtype, (), 6).expand(4),
        "channels_last": filled(dtype, (2, 4, 5, 3), 7).permute(0, 3, 1, 2),
        "parameter": nn.Parameter(filled(dtype, (3, 4), 8), requires_grad=False),
    }
    _add_where_supported(made, "flipped", lambda: filled(dtype, (4, 3), 9).flip(0))
    if dtype.is_floating_point or dtype.is_complex:
        _add_where_supported(made, "neg", lambda: torch._neg_view(filled(dtype, (3, 5), 10)))
        made["requires_grad"] = filled(dtype, (2, 3), 11).requires_grad_()
        made["parameter_grad"] = nn.Parameter(filled(dtype, (2, 3), 12))
    if dtype.is_complex:
        made["conj"] = filled(dtype, (3, 5), 13).conj()
        made["imag_of_conj"] = filled(dtype, (3, 5), 14).conj().imag
        _add_where_supported(
            made, "conj_neg", lambda: torch._neg_view(filled(dtype, (3, 5), 15).conj())
        )
    return made
