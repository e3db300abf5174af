"""DTensors without a process group: the part of a full tensor that one rank holds.

The parts are those of torch: each placement splits what the mesh dimensions before it left.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

NAMES = ("a", "b", "c")

Placements = Sequence[Placement]
Sizes = tuple[int, ...]


def world_of(sizes: Sizes) -> int:
    """How many ranks a mesh of these sizes has."""
    ranks = 1
    for size in sizes:
        ranks *= size
    return ranks


def mesh_of(sizes: Sizes, rank: int) -> DeviceMesh:
    """The mesh of ranks 0, 1, … as that rank sees it."""
    ranks = torch.arange(world_of(sizes)).reshape(sizes)
    names = NAMES[: len(sizes)]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def coordinate_of(sizes: Sizes, rank: int) -> list[int]:
    """Where the rank is in the mesh."""
    coordinate = []
    for size in reversed(sizes):
        coordinate.insert(0, rank % size)
        rank //= size
    return coordinate


def part_of(full: torch.Tensor, sizes: Sizes, placements: Placements, rank: int) -> torch.Tensor:
    """A copy of what the rank holds of the full tensor."""
    part = full
    for placement, size, place in zip(placements, sizes, coordinate_of(sizes, rank), strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(part, size, with_padding=False)
            part = pieces[place]
    return part.clone(memory_format=torch.contiguous_format)


def distributed(
    full: torch.Tensor, sizes: Sizes, placements: Placements, rank: int, part: Any = None
) -> DTensor:
    """The DTensor of the full tensor on that rank; `part` replaces what it holds."""
    local = part_of(full, sizes, placements, rank) if part is None else part
    return DTensor.from_local(
        local,
        mesh_of(sizes, rank),
        list(placements),
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape, device="meta").stride(),
    )


def inner_first(full: torch.Tensor, sizes: Sizes, dim: int, rank: int) -> torch.Tensor:
    """What FSDP over tensor parallelism leaves a rank: the last mesh dimension splits first."""
    part = full
    for size, place in reversed(list(zip(sizes, coordinate_of(sizes, rank), strict=True))):
        pieces, _ = Shard(dim)._split_tensor(part, size, with_padding=False)
        part = pieces[place]
    return part.clone()


def strided(sizes: Sizes, dim: int) -> list[Placement]:
    """The placements that say `inner_first`."""
    inner = [world_of(sizes[place + 1 :]) for place in range(len(sizes) - 1)]
    return [*(_StridedShard(dim, split_factor=factor) for factor in inner), Shard(dim)]
