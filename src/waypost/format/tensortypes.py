"""Tensor types as text, ``F32[3,4]``, and how each is stored in a safetensors file.

Types that safetensors knows are stored as themselves under its own short names. All others keep
torch's name and are stored as the bytes of a known type with one more, last dimension.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from math import prod
from typing import Final

from waypost import limits
from waypost.errors import FormatError

NATIVE: Final[dict[str, tuple[str, int]]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}
"""Short name to torch's name and item size in bytes."""

_SHORT: Final = {name: short for short, (name, _) in NATIVE.items()}

FOREIGN: Final[dict[str, tuple[str, int]]] = {
    "complex32": ("F16", 2),
    "complex128": ("F64", 2),
    "float4_e2m1fn_x2": ("U8", 1),
    "bits8": ("U8", 1),
    "bits16": ("U8", 2),
    "bits1x8": ("U8", 1),
    "bits2x4": ("U8", 1),
    "bits4x2": ("U8", 1),
    "qint8": ("U8", 1),
    "quint8": ("U8", 1),
    "qint32": ("U8", 4),
    "quint4x2": ("U8", 1),
    "quint2x4": ("U8", 1),
    **{f"{sign}int{bits}": ("U8", 1) for sign in ("", "u") for bits in range(1, 8)},
}
"""Torch's name to the stored type and the length of the extra, last dimension."""

_TEXT_CHARACTERS_MAX: Final = 2048
_TEXT = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\[([0-9,]*)\]")


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of elements, by torch's name, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def text(self) -> str:
        """The form in documents, such as ``F32[3,4]``."""
        return _text(self.dtype, self.shape)

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """The safetensors type and shape that hold this tensor's bytes."""
        return _stored(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.item_bytes


@functools.lru_cache(maxsize=4096)
def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{_SHORT.get(dtype, dtype)}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=4096)
def _stored(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    short = _SHORT.get(dtype)
    if short is not None:
        return short, shape
    name, extra = FOREIGN[dtype]
    return name, (*shape, extra)


def is_known(dtype: str) -> bool:
    """Returns whether the format can hold elements of torch's ``dtype``."""
    return dtype in _SHORT or dtype in FOREIGN


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element of torch's ``dtype``."""
    short = _SHORT.get(dtype)
    if short is not None:
        return NATIVE[short][1]
    name, extra = FOREIGN[dtype]
    return NATIVE[name][1] * extra


def parse(text: object) -> TensorType:
    """Returns the type that ``text`` describes.

    Raises:
        FormatError: Unknown type, or a shape beyond the limits.
    """
    if not isinstance(text, str) or len(text) > _TEXT_CHARACTERS_MAX:
        raise FormatError(f"not a tensor type: {str(text)[:80]!r}")
    return _parse(text)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> TensorType:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise FormatError(f"not a tensor type: {text[:80]!r}")
    name, dimensions = match.groups()
    dtype = NATIVE[name][0] if name in NATIVE else name
    if not is_known(dtype):
        raise FormatError(f"unknown tensor type {name[:40]!r}")
    sizes = dimensions.split(",") if dimensions else []
    if len(sizes) > limits.DIMENSIONS_MAX or any(not 0 < len(size) <= 19 for size in sizes):
        raise FormatError(f"not a tensor shape: {text[:200]!r}")
    return TensorType(dtype, tuple(map(int, sizes)))
