"""Tensors that share memory: found at save, stored once, named as aliases of what is stored.

Tensors are grouped by storage. Within one, those whose elements overlap belong together. If one of
them is contiguous and covers the others it is stored, and the others are views of it; if none does,
the memory that they cover is stored as bytes of its own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from waypost.format.paths import part_path
from waypost.format.tensortypes import TensorType
from waypost.state.tensors import TensorLeaf

_ALIGNMENT_BYTES = 16
"""The largest element; bytes stored for several views start at a multiple of it."""

_EXACT_BYTES_MAX = 1 << 28
"""Memory range, in bytes, up to which overlap is decided element by element; beyond that, ranges
that meet count as overlapping, which costs no correctness, only the shared form."""


@dataclass(slots=True)
class _Extent:
    leaf: TensorLeaf
    start: int
    stop: int


def resolve(leaves: list[TensorLeaf], owner: Callable[[TensorLeaf], object]) -> list[TensorLeaf]:
    """Returns the leaves whose bytes must be stored; turns the nodes of the others into aliases.

    Args:
        leaves: In state order; their nodes may be changed.
        owner: Tells which ranks hold a leaf; leaves of different owners are stored apart.
    """
    storages: defaultdict[tuple[object, int], list[TensorLeaf]] = defaultdict(list)
    for leaf in leaves:
        storages[owner(leaf), leaf.tensor.untyped_storage()._cdata].append(leaf)
    dropped: set[int] = set()
    added: list[TensorLeaf] = []
    for sharing in storages.values():
        if len(sharing) > 1 and sharing[0].held is not None:
            _tie_shards(sharing, dropped)
        elif len(sharing) > 1:
            extents = [extent for leaf in sharing if (extent := _extent(leaf)) is not None]
            for cluster in _clusters(extents):
                _resolve_cluster(cluster, dropped, added)
    kept = [leaf for leaf in leaves if id(leaf) not in dropped]
    return kept + added


def _tie_shards(sharing: list[TensorLeaf], dropped: set[int]) -> None:
    """Ties sharded leaves that are the same memory, even where this rank's part is empty."""
    bases: list[TensorLeaf] = []
    for leaf in sharing:
        base = next((base for base in bases if _is_alike(leaf, base)), None)
        if base is None:
            bases.append(leaf)
            continue
        leaf.node["alias"] = base.path
        dropped.add(id(leaf))


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of its storage that a strided tensor reaches: first, and last plus one."""
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(reach) + 1) * item


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether any byte belongs to two of the tensors, which are of one storage.

    Ranges that only interleave do not count, as long as they are small enough to look closely.
    """
    ranges = [byte_range(tensor) for tensor in tensors]
    start, stop = min(first for first, _ in ranges), max(last for _, last in ranges)
    if stop - start > _EXACT_BYTES_MAX or all(
        tensor.numel() * tensor.element_size() == last - first
        for tensor, (first, last) in zip(tensors, ranges, strict=True)
    ):
        return any(first < last for (_, last), (first, _) in itertools.pairwise(sorted(ranges)))
    taken = torch.zeros(stop - start, dtype=torch.uint8)
    for tensor, (first, _) in zip(tensors, ranges, strict=True):
        item = tensor.element_size()
        shape = (*tensor.shape, item)
        stride = (*(step * item for step in tensor.stride()), 1)
        taken.as_strided(shape, stride, first - start).add_(1)
    return int(taken.max()) > 1


def _extent(leaf: TensorLeaf) -> _Extent | None:
    tensor = leaf.tensor
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    if any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return None
    return _Extent(leaf, *byte_range(tensor))


def _clusters(extents: list[_Extent]) -> list[list[_Extent]]:
    """Returns the groups, of two or more, in which memory is shared."""
    if not extents:
        return []
    ordered = sorted(extents, key=lambda extent: extent.start)
    found: list[list[_Extent]] = []
    current: list[_Extent] = []
    stop = -1
    for extent in ordered:
        if extent.start >= stop and current:
            found.append(current)
            current = []
        current.append(extent)
        stop = max(stop, extent.stop)
    found.append(current)
    return [cluster for cluster in found if len(cluster) > 1 and _shares(cluster)]


def _shares(cluster: list[_Extent]) -> bool:
    return overlap([extent.leaf.tensor for extent in cluster])


def _resolve_cluster(cluster: list[_Extent], dropped: set[int], added: list[TensorLeaf]) -> None:
    start = min(extent.start for extent in cluster)
    stop = max(extent.stop for extent in cluster)
    base = next(
        (
            extent.leaf
            for extent in cluster
            if (extent.start, extent.stop) == (start, stop)
            and extent.leaf.tensor.is_contiguous()
            and _holds_aligned(cluster, start)
        ),
        None,
    )
    if base is None and _all_alike(cluster):
        base = cluster[0].leaf
    if base is None:
        start -= start % _ALIGNMENT_BYTES
        base = _bytes_leaf(cluster[0].leaf, start, stop)
        added.append(base)
    for extent in cluster:
        if extent.leaf is not base:
            dropped.add(id(extent.leaf))
            _make_alias(extent, base, start)


def _holds_aligned(cluster: list[_Extent], start: int) -> bool:
    """Tells whether all tensors begin at multiples of their elements, counted from ``start``."""
    return all(
        (extent.start - start) % extent.leaf.tensor.element_size() == 0 for extent in cluster
    )


def _all_alike(cluster: list[_Extent]) -> bool:
    first = cluster[0].leaf
    return all(_is_alike(extent.leaf, first) for extent in cluster)


def _is_alike(leaf: TensorLeaf, base: TensorLeaf) -> bool:
    return (
        leaf.type == base.type
        and leaf.tensor.stride() == base.tensor.stride()
        and leaf.tensor.storage_offset() == base.tensor.storage_offset()
    )


def _make_alias(extent: _Extent, base: TensorLeaf, start: int) -> None:
    node = extent.leaf.node
    node["alias"] = base.path
    node.pop("order", None)
    if _is_alike(extent.leaf, base):
        if extent.leaf.tensor is base.tensor:
            node["same"] = True
        return
    node["offset"] = extent.start - start
    node["stride"] = list(extent.leaf.tensor.stride())


def _bytes_leaf(first: TensorLeaf, start: int, stop: int) -> TensorLeaf:
    """Returns a leaf for memory that no tensor covers alone, named after the first in it."""
    storage = first.tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=first.tensor.device).set_(storage)
    kind = TensorType("uint8", (stop - start,))
    return TensorLeaf(
        part_path(first.path, "storage"), whole[start:stop], kind, {"type": kind.text}
    )
