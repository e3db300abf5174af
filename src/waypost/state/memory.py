"""The bytes of tensors, where they lie or piece by piece, without a second copy of the state."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from waypost import limits

_ORDINARY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})
"""Types that need no other view of their elements: those of most tensors."""

_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a plain tensor of a type that every operation supports.

    Elements keep their size and their bits; pending conjugation and negation is carried out.
    """
    plain = tensor.detach()
    if type(plain) is torch.Tensor and plain.dtype in _ORDINARY and not plain.is_neg():
        return plain
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_quantized:
        plain = plain.int_repr()
    kind = _BY_SIZE[plain.element_size()]
    return plain if plain.dtype == kind else plain.view(kind)


def bytes_of(plain: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU, writable; it stays alive with the view.

    Args:
        plain: Any shape; any type that :func:`as_plain` returns.
    """
    # By stride 1: of a single element torch keeps any stride, and calls it contiguous.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy arrays are buffers


def is_direct(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor's memory is its bytes in stored order, on the CPU."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class TensorSource:
    """The bytes of a tensor in row-major order, copied out in blocks when they do not lie so.

    Args:
        tensor: Any shape, stride, type and device but ``meta``.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._plain = as_plain(tensor)
        self._nbytes = self._plain.numel() * self._plain.element_size()
        self._address = self._plain.data_ptr() if is_direct(self._plain) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._nbytes

    def view(self) -> memoryview | None:
        """Returns the tensor's own memory, if it is contiguous and on the CPU."""
        return None if self._address is None else bytes_of(self._plain)

    def copy(self, start: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``start`` on, using at most one block of extra memory."""
        if self._address is not None:
            into = ctypes.addressof(ctypes.c_char.from_buffer(out))
            ctypes.memmove(into, self._address + start, len(out))
            return
        done = 0
        for block_start, block in self._blocks(start, start + len(out)):
            data = bytes_of(block.contiguous().cpu())
            first = max(0, start - block_start)
            piece = data[first : first + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _blocks(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Returns the sub-tensors that cover the byte range, each with its first byte."""
        shape = self._plain.shape
        inner = self._plain.element_size()
        depth = len(shape)
        while depth and inner * shape[depth - 1] <= limits.SEGMENT_BYTES // 8:
            depth -= 1
            inner *= shape[depth]
        if depth == 0:
            return [(0, self._plain)]
        rows = shape[depth - 1]
        blocks: list[tuple[int, torch.Tensor]] = []
        group = max(1, limits.SEGMENT_BYTES // inner)
        position = start // inner
        last = -(-stop // inner)
        while position < last:
            row = position % rows
            count = min(group, rows - row, last - position)
            index = np.unravel_index(position // rows, shape[: depth - 1]) if depth > 1 else ()
            block = self._plain[tuple(int(i) for i in index)].narrow(0, row, count)
            blocks.append((position * inner, block))
            position += count
        return blocks


class FreshTarget:
    """New memory, to be filled and then made into tensors."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """The memory's size."""
        return self.tensor.numel()

    def view(self) -> memoryview:
        """Returns the memory."""
        return bytes_of(self.tensor)

    def done(self) -> None:
        """Does nothing: the memory is the result."""


class InPlaceTarget:
    """An existing tensor; contiguous ones on the CPU are filled where they lie.

    Args:
        tensor: Any shape and stride; its type is not converted.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._plain = as_plain(tensor)
        self._direct = is_direct(self._plain)
        self._nbytes = self._plain.numel() * self._plain.element_size()
        self._staged: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._nbytes

    def view(self) -> memoryview:
        """Returns the tensor's memory, or memory that :meth:`done` copies from."""
        if self._direct:
            return bytes_of(self._plain)
        if self._staged is None:
            self._staged = torch.empty(self._plain.shape, dtype=self._plain.dtype)
        return bytes_of(self._staged)

    def done(self) -> None:
        """Copies into place what was read beside it."""
        if self._staged is not None:
            self._plain.copy_(self._staged)
            self._staged = None
        elif not self._plain.is_inference():
            torch.autograd.graph.increment_version(self._plain)


def is_writable(tensor: torch.Tensor) -> bool:
    """Tells whether writing each element once is well defined: no two share memory."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return True
