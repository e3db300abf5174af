"""The header of a safetensors file, written with aligned data and read with suspicion.

Layout: 8 bytes, the header's length N, little-endian; N bytes of JSON, padded with spaces; data.
Waypost pads so that data starts at a multiple of 4096 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from waypost import limits
from waypost.errors import FormatError
from waypost.format import jsontext
from waypost.format.tensortypes import NATIVE

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor in a file: its type, its shape and its bytes, relative to the start of data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(items: Mapping[str, Item], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file, up to the start of data.

    Raises:
        FormatError: The header would be longer than the format allows.
    """
    document: dict[str, jsontext.Json] = {}
    if metadata:
        document["__metadata__"] = dict(metadata)
    for key, item in items.items():
        document[key] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [item.start, item.end],
        }
    text = jsontext.dump(document)
    total = _LENGTH.size + len(text)
    padding = -total % limits.DATA_ALIGNMENT_BYTES
    if len(text) + padding > limits.HEADER_BYTES_MAX:
        raise FormatError(
            f"a file of {len(items)} tensors needs a header of {len(text)} bytes; "
            f"safetensors allows {limits.HEADER_BYTES_MAX}"
        )
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def header_length(first: bytes, name: str) -> int:
    """Returns the offset at which data starts, from the first 8 bytes of file ``name``.

    Raises:
        FormatError: Too short, or longer than the format allows.
    """
    if len(first) < _LENGTH.size:
        raise FormatError(f"{name}: too short for a safetensors file")
    length: int = _LENGTH.unpack_from(first)[0]
    if not 2 <= length <= limits.HEADER_BYTES_MAX:
        raise FormatError(f"{name}: header of {length} bytes is out of bounds")
    return _LENGTH.size + length


def parse(data: bytes, data_bytes: int, name: str) -> tuple[dict[str, Item], dict[str, str]]:
    """Returns the items and the metadata of a whole header.

    Args:
        data: The file's first bytes, up to the start of data.
        data_bytes: Bytes of data that follow in the file.
        name: The file, for messages.

    Raises:
        FormatError: Unknown types, ranges that are negative, overlap, leave holes or do not fit the
            shape, or bad JSON.
    """
    document = jsontext.parse(data[_LENGTH.size :], name, bytes_max=limits.HEADER_BYTES_MAX)
    if not isinstance(document, dict):
        raise FormatError(f"{name}: the header is not an object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{name}: __metadata__ does not map names to strings")
    items = {key: _item(key, value, name) for key, value in document.items()}
    _check_cover(items.values(), data_bytes, name)
    return items, metadata  # type: ignore[return-value]  # checked above, value by value


def _item(key: str, value: jsontext.Json, name: str) -> Item:
    try:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("unexpected fields")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            raise ValueError("shape or data_offsets is not a list")
        if len(shape) > limits.DIMENSIONS_MAX or not all(_is_size(n) for n in [*shape, *offsets]):
            raise ValueError("a size is not a non-negative integer")
        if not isinstance(dtype, str) or dtype not in NATIVE:
            raise ValueError(f"unknown dtype {dtype!r}")
        start, end = offsets
        if end - start != prod(shape) * NATIVE[dtype][1]:  # type: ignore[operator,arg-type]
            raise ValueError("the byte range does not fit the shape")
    except ValueError as error:
        raise FormatError(f"{name}: tensor {key[:120]!r}: {error}") from error
    return Item(dtype, tuple(shape), start, end)  # type: ignore[arg-type]


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _check_cover(items: Iterable[Item], data_bytes: int, name: str) -> None:
    position = 0
    for item in sorted(items, key=lambda item: (item.start, item.end)):
        if item.start != position:
            raise FormatError(f"{name}: byte ranges overlap or leave a hole at {position}")
        position = item.end
    if position != data_bytes:
        raise FormatError(f"{name}: header describes {position} bytes, the file has {data_bytes}")
