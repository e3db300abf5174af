"""Values of torch and numpy: sizes, dtypes, devices, arrays, scalars, random generators.

The counterpart of :mod:`waypost.format.scalars` for what only this layer may import.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from waypost.errors import FormatError, UnsupportedError
from waypost.format.jsontext import Json
from waypost.format.tensornodes import TAG
from waypost.state.tensors import TensorDecoder, TensorEncoder

ARRAY: Final = "$ndarray"
GENERATOR: Final = "$generator"

_TORCH_ARRAYS: Final = {
    np.dtype(name): getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
}


class ExtensionEncoder:
    """Describes tensors, arrays, generators and the small values of torch and numpy.

    Args:
        value: Turns a plain value into a node.
        tensors: Takes the tensors.
    """

    def __init__(self, value: Callable[[Any, str], Json], tensors: TensorEncoder) -> None:
        self._value = value
        self._tensors = tensors

    def node(self, value: Any, path: str) -> Json | None:
        """Returns the node of ``value``, or None when it is nothing of torch's or numpy's."""
        if isinstance(value, torch.Tensor):
            return self._tensors.node(value, path)
        if type(value) is np.ndarray:
            return {ARRAY: self._array(value, path)}
        if is_generator(value):
            if "/~key" in path or "/~item" in path:
                raise UnsupportedError(f"{path}: a generator inside a set or a key", path=path)
            return {GENERATOR: [_generator_name(value), self._value(generator_state(value), path)]}
        return small_node(value, path)

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Json:
        if _has_metadata(array.dtype):
            raise UnsupportedError(
                f"{path}: an array whose dtype carries metadata ({array.dtype.metadata})",
                path=path,
            )
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        if order == "F":
            array = array.T
        kind = _TORCH_ARRAYS.get(array.dtype)
        if kind is not None and array.dtype.isnative:
            node = self._tensors.node(_tensor_of(array), path)
            return {"order": order, "tensor": node}
        dtype = _dtype_node(array.dtype, path)
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        node = self._tensors.node(_tensor_of(raw), path)
        return {"order": order, "tensor": node, "dtype": dtype, "shape": list(array.shape)}


class ExtensionDecoder:
    """Puts back what :class:`ExtensionEncoder` described.

    Args:
        value: Turns a node into a plain value.
        tensors: Puts tensors together.
    """

    def __init__(self, value: Callable[[Json, str], Any], tensors: TensorDecoder) -> None:
        self._value = value
        self._tensors = tensors

    def restore(self, tag: str, payload: Any, path: str) -> Any:
        """Returns the object of a tag that the format does not know.

        Raises:
            LookupError: The tag is unknown here too.
        """
        if tag == TAG:
            return self._tensors.tensor(payload, path)
        if tag == ARRAY:
            return self._array(payload, path)
        if tag == GENERATOR:
            name, state = payload
            return set_generator(_new_generator(name), self._value(state, path))
        return small_value(tag, payload)

    def _array(self, payload: Any, path: str) -> np.ndarray[Any, Any]:
        array = self._tensors.tensor(payload["tensor"][TAG], path).numpy()
        if "dtype" in payload:
            array = array.view(_dtype(payload["dtype"])).reshape(payload["shape"])
        return array.T if payload["order"] == "F" else array


def small_node(value: object, path: str) -> Json | None:
    """Returns the node of a value of torch or numpy that needs no bytes of its own, or None."""
    if isinstance(value, np.generic):
        return {"$numpy": _scalar(value, path)}
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        tag, text = encode
        return {tag: text(value)}
    if isinstance(value, np.dtype):
        return {"$numpy_dtype": _dtype_node(value, path)}
    return None


def small_value(tag: str, payload: Any) -> Any:
    """Returns what :func:`small_node` described.

    Raises:
        LookupError: The tag is not one of its own.
    """
    return _DECODERS[tag](payload)


def generator_state(generator: Any) -> Any:
    """Returns the state of a random generator as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return {"device": str(generator.device), "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, internal, gauss = generator.getstate()
    return {"version": version, "state": np.array(internal, np.uint32), "gauss": gauss}


def set_generator(generator: Any, state: Any) -> Any:
    """Sets a random generator to ``state`` and returns it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state["state"].cpu())
    elif isinstance(generator, np.random.Generator):
        check_stream(state)
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        check_stream(state)
        generator.set_state(state)
    else:
        internal = tuple(int(word) for word in state["state"])
        generator.setstate((state["version"], internal, state["gauss"]))
    return generator


def check_stream(state: Any) -> None:
    """Refuses a numpy stream that would read outside of its own memory; numpy does not look.

    Raises:
        FormatError: A position or a length is out of bounds.
    """
    inner = state["state"]
    bounds = {"MT19937": ("key", 624), "Philox": ("counter", 4)}
    name, length = bounds.get(state["bit_generator"], ("", 0))
    if name and np.shape(inner[name]) != (length,):
        raise FormatError(f"a {state['bit_generator']} stream whose {name} has another length")
    positions = [(inner.get("pos", 0) if isinstance(inner, dict) else 0, 624)]
    positions += [(state.get("buffer_pos", 0), 4), (state.get("has_uint32", 0), 1)]
    if "buffer" in state and np.shape(state["buffer"]) != (4,):
        raise FormatError("a stream whose buffer has another length")
    for position, limit in positions:
        if not 0 <= int(position) <= limit:
            raise FormatError(f"a stream at position {position}, outside 0 to {limit}")


def is_generator(value: object) -> bool:
    """Tells whether ``value`` is a random generator whose state can be stored."""
    return isinstance(value, (torch.Generator, *_RANDOM))


_RANDOM: Final = (np.random.Generator, np.random.RandomState, random.Random)


def _generator_name(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch:{generator.device}"
    if isinstance(generator, np.random.Generator):
        return f"numpy:{type(generator.bit_generator).__name__}"
    return "numpy-legacy" if isinstance(generator, np.random.RandomState) else "python"


def _new_generator(name: str) -> Any:
    kind, _, detail = name.partition(":")
    if kind == "torch":
        return torch.Generator(detail)
    if kind == "numpy":
        if detail not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
            raise LookupError(f"unknown bit generator {detail[:40]!r}")
        return np.random.Generator(getattr(np.random, detail)())
    return {"numpy-legacy": np.random.RandomState, "python": random.Random}[name]()


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()
    if any(step % array.itemsize for step in array.strides):
        array = np.ascontiguousarray(array)
    return torch.from_numpy(array)


def _dtype_node(dtype: np.dtype[Any], path: str) -> Json:
    if dtype.hasobject:
        raise UnsupportedError(
            f"{path}: numpy data of dtype {dtype} holds Python objects; convert it first", path=path
        )
    try:
        node = None if _has_metadata(dtype) else _described(np.lib.format.dtype_to_descr(dtype))
        is_exact = node is not None and repr(_dtype(node)) == repr(dtype)
    except (ValueError, TypeError):
        is_exact = False
    if not is_exact:
        raise UnsupportedError(
            f"{path}: the numpy dtype {dtype!r} cannot be described exactly", path=path
        )
    return node


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    """Tells whether a dtype, or any part of it, carries notes that a description leaves out."""
    parts = [dtype[name] for name in dtype.names or ()]
    parts += [dtype.subdtype[0]] if dtype.subdtype else []
    return bool(dtype.metadata) or any(map(_has_metadata, parts))


def _described(description: Any) -> Json:
    """Returns numpy's own description of a dtype, with lists instead of tuples."""
    if isinstance(description, (list, tuple)):
        return [_described(part) for part in description]
    return description  # type: ignore[no-any-return]  # text or a number


def _dtype(node: Any) -> np.dtype[Any]:
    if isinstance(node, str):
        return np.dtype(node)
    return np.lib.format.descr_to_dtype([_field(field) for field in node])


def _field(node: Any) -> Any:
    name, kind, *shape = node
    inner = kind if isinstance(kind, str) else [_field(field) for field in kind]
    return (name, inner, *(tuple(size) for size in shape))


def _scalar(value: np.generic, path: str) -> Json:
    dtype = _dtype_node(value.dtype, path)
    data = value.tobytes()[: value.dtype.itemsize]  # numpy gives empty text a terminator
    return [dtype, base64.b64encode(data).decode("ascii")]


def _from_scalar(payload: Any) -> Any:
    dtype, data = _dtype(payload[0]), base64.b64decode(payload[1], validate=True)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy {dtype}")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _torch_constant(kind: type) -> Callable[[Any], Any]:
    def find(name: Any) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, kind):
            raise LookupError(f"torch.{name} is not a {kind.__name__}")
        return found

    return find


_ENCODERS: Final[dict[type, tuple[str, Callable[[Any], Json]]]] = {
    torch.Size: ("$size", list),
    torch.dtype: ("$dtype", _torch_name),
    torch.device: ("$device", str),
    torch.layout: ("$layout", _torch_name),
    torch.memory_format: ("$memory_format", _torch_name),
}
_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$size": torch.Size,
    "$dtype": _torch_constant(torch.dtype),
    "$device": torch.device,
    "$layout": _torch_constant(torch.layout),
    "$memory_format": _torch_constant(torch.memory_format),
    "$numpy": _from_scalar,
    "$numpy_dtype": _dtype,
}
