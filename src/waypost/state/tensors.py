"""Tensors as nodes and pieces, and back.

A plain tensor is one piece: the bytes of its elements in row-major order. A sparse, quantised or
wrapped tensor is several, each at a part path below the leaf. The node says how they fit together.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from waypost.errors import FormatError, UnsupportedError
from waypost.format import classes, tensortypes
from waypost.format.jsontext import Json
from waypost.format.paths import part_path
from waypost.format.shardings import Ranks
from waypost.format.tensornodes import TAG, described
from waypost.format.tensortypes import TensorType
from waypost.state import shards
from waypost.state.shards import Held

_SPARSE: Final = {
    torch.sparse_coo: ("sparse_coo", ("indices", "values")),
    torch.sparse_csr: ("sparse_csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("sparse_csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsr: ("sparse_bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsc: ("sparse_bsc", ("ccol_indices", "row_indices", "values")),
}
_LAYOUTS: Final = {name: (layout, parts) for layout, (name, parts) in _SPARSE.items()}
_NATIVE_CLASSES: Final = (torch.Tensor, torch.nn.Parameter)
_QUANTIZED: Final = {torch.qint8: "int8", torch.quint8: "uint8", torch.qint32: "int32"}


@dataclass(slots=True)
class TensorLeaf:
    """A strided tensor whose bytes are to be stored.

    Attributes:
        path: Its name.
        tensor: Its elements; of a sharded one, those of this rank.
        type: Of the whole tensor.
        node: What the tree holds for it.
        held: What this rank holds of it, when it is sharded.
    """

    path: str
    tensor: torch.Tensor
    type: TensorType
    node: dict[str, Any]
    held: Held | None = None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of ``dtype`` without the module."""
    return str(dtype).removeprefix("torch.")


def scheme_name(tensor: torch.Tensor) -> str:
    """Returns torch's name of a quantised tensor's scheme without the module."""
    return str(tensor.qscheme()).removeprefix("torch.")


def type_of(tensor: torch.Tensor) -> TensorType:
    """Returns element type and shape."""
    return TensorType(dtype_name(tensor.dtype), tuple(tensor.shape))


class TensorEncoder:
    """Describes tensors; collects what has to be stored.

    Args:
        value: Turns a plain value into a node (for the context of wrapper subclasses).
        ranks: Who saves.
    """

    def __init__(self, value: Callable[[Any, str], Json], ranks: Ranks) -> None:
        self._value = value
        self._ranks = ranks
        self.leaves: list[TensorLeaf] = []
        self._paths: set[str] = set()
        self._holders: list[dict[str, Any]] = []
        self._stand_ins: dict[int, torch.Tensor] = {}

    def node(self, tensor: torch.Tensor, path: str) -> Json:
        """Returns the node of ``tensor``.

        Raises:
            UnsupportedError: It cannot be restored exactly; names the leaf.
        """
        if path in self._paths or "/~key" in path or "/~item" in path:
            raise UnsupportedError(
                f"{path}: a tensor inside a set, or as a key, has no name of its own", path=path
            )
        self._paths.add(path)
        description = self._describe(tensor, path)
        description.update(_attributes(tensor))
        holder: dict[str, Any] = {TAG: description}
        self._holders.append(holder)
        return holder

    def shorten(self) -> None:
        """Gives nodes that hold nothing but a type their short form, once aliases are known."""
        for holder in self._holders:
            if len(holder[TAG]) == 1:
                holder[TAG] = holder[TAG]["type"]

    def _describe(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        refusal = _refusal(tensor)
        if refusal:
            raise UnsupportedError(f"{path}: {refusal}", path=path)
        if shards.is_sharded(tensor):
            return self._describe_sharded(tensor, path)
        if not _is_native(tensor):
            if hasattr(tensor, "__tensor_flatten__"):
                return self._describe_wrapper(tensor, path)
            classes.check_reachable(type(tensor), path)
            plain = tensor.detach().as_subclass(torch.Tensor)
            return {**self._describe(plain, path), "class": classes.name_of(type(tensor))}
        if tensor.layout != torch.strided:
            return self._describe_sparse(tensor, path)
        if tensor.is_quantized:
            return self._describe_quantized(tensor, path)
        return self._describe_strided(tensor, path)

    def _describe_strided(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        kind = type_of(tensor)
        description: dict[str, Any] = {"type": kind.text}
        order = _dense_order(tensor)
        if order is not None:
            description["order"] = order
        self.leaves.append(TensorLeaf(path, tensor, kind, description))
        return description

    def _describe_sharded(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        held = shards.held(tensor, self._ranks, path)
        kind = TensorType(dtype_name(tensor.dtype), held.shape)
        for piece in held.pieces:
            if not _is_native(piece.tensor) or piece.tensor.layout != torch.strided:
                raise UnsupportedError(
                    f"{path}: its local part is a {type(piece.tensor).__name__}, not a plain "
                    f"tensor",
                    path=path,
                )
        description: dict[str, Any] = {"type": kind.text}
        if held.sharding is not None:
            description["sharding"] = held.sharding.text
        memory = held.memory
        if memory is None:
            memory = self._stand_ins.setdefault(id(tensor), torch.empty(0))
        self.leaves.append(TensorLeaf(path, memory, kind, description, held))
        return description

    def _describe_sparse(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        name, parts = _SPARSE[tensor.layout]
        plain = tensor.detach()
        description: dict[str, Any] = {"type": type_of(tensor).text, "layout": name}
        if name == "sparse_coo":
            description["coalesced"] = plain.is_coalesced()
            values = {"indices": plain._indices(), "values": plain._values()}
        else:
            values = {part: getattr(plain, part)() for part in parts}
        description["parts"] = {
            part: self.node(value, part_path(path, part)) for part, value in values.items()
        }
        return description

    def _describe_quantized(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        plain = tensor.detach()
        parts = {"int_repr": plain.int_repr()}
        scheme = scheme_name(plain)
        description: dict[str, Any] = {"type": type_of(tensor).text, "qscheme": scheme}
        if plain.qscheme() == torch.per_tensor_affine:
            description["scale"] = self._value(plain.q_scale(), path)
            description["zero_point"] = plain.q_zero_point()
        elif plain.qscheme() == torch.per_channel_affine:
            description["axis"] = plain.q_per_channel_axis()
            parts["scales"] = plain.q_per_channel_scales()
            parts["zero_points"] = plain.q_per_channel_zero_points()
        else:
            raise UnsupportedError(f"{path}: quantised by the scheme {scheme}", path=path)
        description["parts"] = {
            part: self.node(value, part_path(path, part)) for part, value in parts.items()
        }
        return description

    def _describe_wrapper(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        classes.check_reachable(type(tensor), path)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # tested before
        return {
            "type": type_of(tensor).text,
            "class": classes.name_of(type(tensor)),
            "stride": list(tensor.stride()),
            "context": self._value(context, part_path(path, "context")),
            "parts": {
                name: self.node(getattr(tensor, name), part_path(path, name)) for name in names
            },
        }


class TensorDecoder:
    """Puts tensors together from stored bytes.

    Args:
        piece: Returns the bytes stored at a path, as a one-dimensional uint8 tensor that the result
            may share memory with.
        value: Turns a node into a plain value.
        typed: Returns the tensor at another leaf's path, for ties.
    """

    def __init__(
        self,
        piece: Callable[[str], torch.Tensor],
        value: Callable[[Json, str], Any],
        typed: Callable[[str], torch.Tensor],
    ) -> None:
        self._piece = piece
        self._value = value
        self._typed = typed

    def tensor(self, node: Json, path: str) -> torch.Tensor:
        """Returns the tensor that ``node``, the payload of a tensor tag, describes.

        Raises:
            FormatError: The node and the stored bytes do not fit together.
        """
        description = described(node, path)
        try:
            made = self._make(description, path)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, (FormatError, UnsupportedError)):
                raise
            raise FormatError(
                f"{path}: the tensor cannot be put together: {str(error)[:200]}"
            ) from error
        return _with_attributes(made, description, path)

    def _make(self, description: dict[str, Any], path: str) -> torch.Tensor:
        if "alias" in description:
            return self._make_alias(description)
        kind = tensortypes.parse(description["type"])
        if "parts" not in description:
            return _strided(self._piece(path), kind, description.get("order"))
        parts = {
            name: self.tensor(part[TAG], part_path(path, name))
            for name, part in description["parts"].items()
        }
        if "layout" in description:
            return _make_sparse(description, parts, kind)
        if "qscheme" in description:
            return self._make_quantized(description, parts, path)
        cls: Any = classes.find(description["class"], path)
        if not issubclass(cls, torch.Tensor) or not hasattr(cls, "__tensor_unflatten__"):
            raise FormatError(f"{path}: {description['class']} is not a tensor subclass")
        context = self._value(description["context"], part_path(path, "context"))
        stride = tuple(description["stride"])
        made: torch.Tensor = cls.__tensor_unflatten__(
            parts, context, torch.Size(kind.shape), stride
        )
        return made

    def _make_alias(self, description: dict[str, Any]) -> torch.Tensor:
        base = self._typed(description["alias"])
        if "offset" not in description:
            return base.detach() if not description.get("same") else base
        kind = tensortypes.parse(description["type"])
        return view_of(base, kind, description["offset"], tuple(description["stride"]))

    def _make_quantized(
        self, description: dict[str, Any], parts: dict[str, torch.Tensor], path: str
    ) -> torch.Tensor:
        with quiet_quantization():
            if description["qscheme"] == "per_tensor_affine":
                scale = self._value(description["scale"], path)
                return torch._make_per_tensor_quantized_tensor(
                    parts["int_repr"], scale, description["zero_point"]
                )
            return torch._make_per_channel_quantized_tensor(
                parts["int_repr"], parts["scales"], parts["zero_points"], description["axis"]
            )


def view_of(
    base: torch.Tensor, kind: TensorType, offset: int, stride: tuple[int, ...]
) -> torch.Tensor:
    """Returns the view of ``base``'s memory that starts ``offset`` bytes into it.

    Args:
        base: A contiguous tensor of any type.
        kind: Type and shape of the view.
        offset: In bytes; a multiple of the view's item size.
        stride: In elements of the view.

    Raises:
        ValueError: The view would leave the base's memory.
    """
    last = sum((size - 1) * step for size, step in zip(kind.shape, stride, strict=True))
    reach = offset + (last + 1) * kind.item_bytes if math.prod(kind.shape) else offset
    if offset < 0 or min(stride, default=0) < 0 or reach > base.numel() * base.element_size():
        raise ValueError("a view that leaves the memory that it shares")
    flat = base.detach().reshape(-1).view(torch.uint8)
    if (flat.storage_offset() + offset) % kind.item_bytes:
        flat = flat.clone()  # memory that no element of this type can lie at is not shared
    whole = flat[offset : offset + (flat.numel() - offset) // kind.item_bytes * kind.item_bytes]
    typed = whole.view(getattr(torch, kind.dtype))
    return typed.as_strided(kind.shape, stride, typed.storage_offset())


@contextlib.contextmanager
def quiet_quantization() -> Iterator[None]:
    """Silences torch's announcement that quantised tensors will go; old states hold them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantize", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*quantize", category=DeprecationWarning)
        yield


def _is_native(tensor: torch.Tensor) -> bool:
    return type(tensor) in _NATIVE_CLASSES or type(tensor).__module__.startswith("torch.nn.")


def _refusal(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot be stored, or None."""
    by_class = _class_refusal(type(tensor))
    if by_class is not None:
        return by_class
    if shards.is_sharded(tensor):
        is_known = tensortypes.is_known(dtype_name(tensor.dtype))
        return None if is_known else f"the dtype {tensor.dtype} is not known to this version"
    if tensor.is_meta:
        return "a tensor on the device 'meta' has no content; materialise it before saving"
    if tensor.is_nested:
        return "a nested tensor; store its values and offsets as ordinary tensors"
    if tensor.layout != torch.strided and tensor.layout not in _SPARSE:
        return f"a tensor of layout {tensor.layout}; convert it with to_dense()"
    if not tensortypes.is_known(dtype_name(tensor.dtype)):
        return f"the dtype {tensor.dtype} is not known to this version"
    if tensor.is_quantized and tensor.dtype not in _QUANTIZED:
        return f"quantised elements smaller than a byte ({tensor.dtype}) cannot be read back"
    return None


@functools.cache
def _class_refusal(cls: type) -> str | None:
    names = {base.__name__ for base in cls.__mro__}
    if names & {"UninitializedTensorMixin", "UninitializedParameter", "UninitializedBuffer"}:
        return "a lazy parameter has no content yet; run the module once before saving"
    if names & {"FakeTensor", "FunctionalTensor"}:
        return f"a {cls.__name__} has no content of its own"
    return None


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    if isinstance(tensor, torch.nn.Parameter):
        return {"parameter": True, "requires_grad": tensor.requires_grad}
    if getattr(tensor, "_is_buffer", False):
        return {"buffer": bool(getattr(tensor, "persistent", True))}
    return {"requires_grad": True} if tensor.requires_grad else {}


def _with_attributes(tensor: torch.Tensor, description: dict[str, Any], path: str) -> torch.Tensor:
    name = description.get("class")
    if name is not None and "context" not in description:
        cls = classes.find(name, path)
        if not issubclass(cls, torch.Tensor):
            raise FormatError(f"{path}: {name} is not a tensor subclass")
        tensor = tensor.as_subclass(cls)
    if description.get("same"):
        return tensor
    if "parameter" in description:
        return torch.nn.Parameter(tensor, requires_grad=bool(description["requires_grad"]))
    if "buffer" in description:
        return torch.nn.Buffer(tensor, persistent=bool(description["buffer"]))
    if description.get("requires_grad"):
        return tensor.requires_grad_()
    return tensor


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Returns the order of dimensions in memory when it is a permutation; None when row-major."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= tensor.shape[dim]
    return order


def _strided(piece: torch.Tensor, kind: TensorType, order: list[int] | None) -> torch.Tensor:
    if piece.numel() != kind.nbytes:
        raise FormatError(f"{piece.numel()} bytes are stored for a tensor {kind.text}")
    dtype: torch.dtype = getattr(torch, kind.dtype)
    if order is None:
        return piece.view(dtype).reshape(kind.shape)
    if sorted(order) != list(range(len(kind.shape))):
        raise FormatError(f"{order} is no order of the dimensions of {kind.text}")
    raw = piece.reshape(*kind.shape, kind.item_bytes)
    memory = raw.permute(*order, len(order)).contiguous()
    back = [order.index(dim) for dim in range(len(order))]
    typed = memory.reshape(-1).view(dtype).reshape([kind.shape[dim] for dim in order])
    return typed.permute(*back)


def _make_sparse(
    description: dict[str, Any], parts: dict[str, torch.Tensor], kind: TensorType
) -> torch.Tensor:
    layout, names = _LAYOUTS[description["layout"]]
    if description["layout"] == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            kind.shape,
            is_coalesced=bool(description["coalesced"]),
            check_invariants=True,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*beta state", category=UserWarning)
        plain, other, values = (parts[name] for name in names)
        return torch.sparse_compressed_tensor(
            plain, other, values, size=kind.shape, layout=layout, check_invariants=True
        )
