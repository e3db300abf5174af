"""Tensors that a rank holds a part of: torch's DTensor, and the older ShardedTensor.

What each rank holds is computed from mesh and placements; nothing is exchanged. Modules of torch
that define these classes are used only when the program has imported them.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from waypost.errors import UnsupportedError
from waypost.format import shardings
from waypost.format.shardings import Box, Ranks, Sharding
from waypost.format.shards import lengths_of

_DTENSOR = "torch.distributed.tensor"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the whole tensor, and the memory of this rank that holds it."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a tensor.

    Attributes:
        shape: Of the whole tensor.
        sharding: How it is spread; None when all ranks hold all of it.
        pieces: This rank's boxes; none when it holds nothing.
        memory: One tensor with all of this rank's elements, to tell shared memory by; or None.
        is_assumed: It is spread over a part of a larger mesh, and only taken to be equal on the
            other parts.
    """

    shape: tuple[int, ...]
    sharding: Sharding | None
    pieces: tuple[Piece, ...]
    memory: torch.Tensor | None
    is_assumed: bool = False


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tells whether a rank may hold only a part of ``tensor``."""
    return _is_a(tensor, _DTENSOR, "DTensor") or _is_a(tensor, _SHARDED_TENSOR, "ShardedTensor")


def held(tensor: torch.Tensor, ranks: Ranks, path: str) -> Held:
    """Returns what this rank holds of ``tensor``, for which :func:`is_sharded` holds.

    Raises:
        UnsupportedError: A placement that has no value of its own (``Partial``), a mesh with ranks
            that do not take part, or local memory of another kind or shape than expected.
    """
    if _is_a(tensor, _DTENSOR, "DTensor"):
        return _held_by_mesh(tensor, ranks, path)
    return _held_by_boxes(tensor, ranks, path)


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a new DTensor spread like ``tensor``, of another type, whose content is undefined."""
    module: Any = sys.modules[_DTENSOR]
    source: Any = tensor
    local = source._local_tensor
    made: torch.Tensor = module.DTensor.from_local(
        torch.empty_like(local.detach(), dtype=dtype),
        source.device_mesh,
        source.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made


def replicated_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``value`` as a DTensor that is equal on all ranks of the mesh of ``tensor``."""
    module: Any = sys.modules[_DTENSOR]
    source: Any = tensor
    placements = [module.Replicate()] * source.device_mesh.ndim
    made: torch.Tensor = module.DTensor.from_local(
        value.to(source._local_tensor.device), source.device_mesh, placements, run_check=False
    )
    return made


def is_dtensor(tensor: object) -> bool:
    """Tells whether ``tensor`` is one of torch's DTensors."""
    return _is_a(tensor, _DTENSOR, "DTensor")


def _is_a(tensor: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(tensor, getattr(loaded, name))


def _held_by_mesh(tensor: Any, ranks: Ranks, path: str) -> Held:
    placements = tuple(_placement(placement, path) for placement in tensor.placements)
    own = _mesh_sharding(tensor.device_mesh, placements, ranks)
    sharding = _expanded(tensor.device_mesh, placements, ranks) or own
    if sharding is None or own is None:
        raise _outside(tensor.device_mesh.mesh.flatten().tolist(), ranks, path)
    shape = tuple(tensor.shape)
    local = tensor._local_tensor.detach()
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.trigger_wait()
    if not sharding.includes(ranks.rank):
        return Held(shape, sharding, (), None)
    parts = sharding.parts(ranks.rank, shape)
    sizes = tuple(
        sum(stop - start for start, stop in {part.local[dim] for part in parts})
        for dim in range(len(shape))
    )
    if local.numel() != sum(_count(part.box) for part in parts) or (
        parts and tuple(local.shape) != sizes
    ):
        raise UnsupportedError(
            f"{path}: rank {ranks.rank} holds {tuple(local.shape)} of {shape}, which is not what "
            f"{sharding.text} says",
            path=path,
        )
    pieces = tuple(Piece(part.box, _cut(local, part.local)) for part in parts)
    everywhere = len(sharding.ranks) == ranks.world_size and not sharding.divided
    is_assumed = len(sharding.ranks) > len(own.ranks)
    return Held(shape, None if everywhere else sharding, pieces, local, is_assumed)


@functools.lru_cache(maxsize=256)
def _mesh_sharding(mesh: Any, placements: tuple[str, ...], ranks: Ranks) -> Sharding | None:
    """Returns the sharding over a mesh; None when the mesh has ranks that do not take part."""
    found = [ranks.index(rank) for rank in mesh.mesh.flatten().tolist()]
    known = tuple(index for index in found if index is not None)
    return Sharding(known, tuple(mesh.mesh.shape), placements) if len(known) == len(found) else None


@functools.lru_cache(maxsize=256)
def _expanded(mesh: Any, placements: tuple[str, ...], ranks: Ranks) -> Sharding | None:
    """Returns the sharding over the whole mesh that ``mesh`` is a part of, equal over the others.

    A model that is sharded over one dimension of a mesh holds the same on each index of the other
    dimensions, unless these divide it by other means; then it has other names there, or other
    content, which is found before anything is written.
    """
    root = _root_of(mesh)
    if root is None or root.mesh.numel() == mesh.mesh.numel():
        return None
    of_root = root.mesh.flatten().tolist()
    shape = tuple(root.mesh.shape)
    if any(ranks.index(rank) is None for rank in of_root):
        return None
    places = {rank: np.unravel_index(n, shape) for n, rank in enumerate(of_root)}
    own = [places[rank] for rank in mesh.mesh.flatten().tolist()]
    fixed = [d for d in range(len(shape)) if len({int(place[d]) for place in own}) == 1]
    found: list[int] = []
    for index in np.ndindex(*(shape[d] for d in fixed)):
        for place in own:
            moved = list(place)
            for dimension, at in zip(fixed, index, strict=True):
                moved[dimension] = np.intp(at)
            found.append(of_root[int(np.ravel_multi_index(moved, shape))])
    if len(set(found)) != len(of_root):
        return None
    known = tuple(number for rank in found if (number := ranks.index(rank)) is not None)
    sizes = tuple(shape[dimension] for dimension in fixed)
    replicated = (shardings.REPLICATE,) * len(fixed)
    return Sharding(known, (*sizes, *mesh.mesh.shape), (*replicated, *placements))


def _root_of(mesh: Any) -> Any:
    """Returns the mesh that ``mesh`` was taken out of; itself if none."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is not None:
        return find()
    resources = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return resources.get_root_mesh(mesh) if resources is not None else None


def _placement(placement: Any, path: str) -> str:
    name = type(placement).__name__
    if placement.is_replicate():
        return shardings.REPLICATE
    if name == "_StridedShard":
        return f"S{placement.dim}*{int(placement.split_factor)}"
    if name == "Shard":
        return f"S{placement.dim}"
    raise UnsupportedError(
        f"{path}: a DTensor placed as {placement!r}, whose ranks hold terms that must be reduced "
        f"before there is a value; redistribute it to Shard or Replicate before saving",
        path=path,
    )


def _held_by_boxes(tensor: Any, ranks: Ranks, path: str) -> Held:
    found: dict[int, list[Box]] = {}
    for shard in tensor.metadata().shards_metadata:
        owner = ranks.index(shard.placement.rank())
        if owner is None:
            raise _outside([shard.placement.rank()], ranks, path)
        found.setdefault(owner, []).append(_box(shard))
    owners = tuple(sorted(found))
    boxes = tuple(tuple(found[rank]) for rank in owners)
    sharding = Sharding(owners, (len(owners),), (), boxes)
    local = [Piece(_box(shard.metadata), shard.tensor.detach()) for shard in tensor.local_shards()]
    own = boxes[owners.index(ranks.rank)] if ranks.rank in owners else ()
    by_box = {piece.box: piece for piece in local}
    if set(by_box) != set(own):
        raise UnsupportedError(
            f"{path}: rank {ranks.rank} holds other shards than the metadata says", path=path
        )
    pieces = tuple(by_box[box] for box in own if shardings.is_filled(box))
    return Held(tuple(tensor.size()), sharding, pieces, None)


def _box(shard: Any) -> Box:
    return tuple(
        (offset, offset + size)
        for offset, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    )


def _outside(global_ranks: list[int], ranks: Ranks, path: str) -> UnsupportedError:
    outside = [rank for rank in global_ranks if ranks.index(rank) is None]
    return UnsupportedError(
        f"{path}: spread over ranks {outside[:8]}, which do not take part in this call; pass a "
        f"process group that holds them",
        path=path,
    )


def _cut(local: torch.Tensor, box: Box) -> torch.Tensor:
    if lengths_of(box) == tuple(local.shape):
        return local
    return local[tuple(slice(start, stop) for start, stop in box)]


def _count(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count
