"""One small model in every layout of a training job, beside its full tensors.

The full tensors come from one process and a seed: the model in one piece, after two steps of
AdamW. A layout takes them apart by the means of torch alone, never of Waypost. What a load must
have made is what the layout makes of the full tensors, rank by rank and bit by bit.

All functions that take a layout are collective, and need a process group.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from _kit.tensors import raw

EXPERTS = 5
STEPS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")
RATE, RATE_OF_VECTORS, WRONG_RATE = 0.01, 0.003, 0.5
TIED = ("embed.weight", "head.weight")

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Sizes of 5, 7, 3 and 2: uneven on two ranks and on more, smaller than four ranks."""

    def __init__(self, experts: Iterable[int] = range(EXPERTS)) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)
        self.thin = nn.Linear(7, 2, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.experts = nn.ModuleDict({str(k): nn.Linear(3, 2, bias=False) for k in experts})
        self.head.weight = self.embed.weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The whole state in one piece: parameters and buffers, and AdamW's two moments."""

    tensors: Tensors
    moments: dict[str, Tensors]

    def flat_moments(self) -> Tensors:
        """Both moments under one key each, such as `exp_avg.up.weight`."""
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self.moments.items()
            for name, tensor in tensors.items()
        }


def full_state(seed: int) -> Full:
    """The model of the seed after two steps of AdamW, made in this process alone."""
    maker = torch.Generator().manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=maker))
        model.norm.running_mean.copy_(torch.randn(3, generator=maker))
        model.norm.running_var.copy_(torch.rand(3, generator=maker))
        model.norm.num_batches_tracked.fill_(STEPS)
    optimizer = adamw(model, RATE, RATE_OF_VECTORS)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=maker)
        optimizer.step()
    moments = {
        kind: {name: optimizer.state[p][kind].clone() for name, p in model.named_parameters()}
        for kind in MOMENTS
    }
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Full(tensors=tensors, moments=moments)


def adamw(model: nn.Module, rate: float, rate_of_vectors: float) -> torch.optim.AdamW:
    """AdamW with a group for the matrices and one for the vectors."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": rate_of_vectors}]
    return torch.optim.AdamW(groups, lr=rate)


# --- layouts --------------------------------------------------------------------------------


@functools.cache
def mesh(*sizes: int) -> DeviceMesh:
    """One mesh of all ranks for each shape, made once in a process."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def _tie(model: nn.Module) -> nn.Module:
    model.head.weight = model.embed.weight
    return model


def _tensor_parallel(model: nn.Module, on: DeviceMesh) -> nn.Module:
    """`Shard(0)` for up, thin, embed and head; `Shard(1)` for down, whose bias is on all ranks."""
    plan = {
        "embed": RowwiseParallel(),
        "head": ColwiseParallel(),
        "up": ColwiseParallel(),
        "thin": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return _tie(parallelize_module(model, on, plan))


def _fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model.up, mesh=mesh(dist.get_world_size()))
    return fully_shard(model, mesh=mesh(dist.get_world_size()))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": _fsdp,
    "hsdp": lambda model: fully_shard(model, mesh=mesh(2, 2)),
    "tp": lambda model: _tensor_parallel(model, mesh(dist.get_world_size())),
    "fsdp_tp": lambda model: fully_shard(
        _tensor_parallel(model, mesh(2, 2)["tp"]), mesh=mesh(2, 2)["dp"]
    ),
    "ep": lambda model: model,
}
LAYOUTS = (*WRAPS, "sharded_tensor")


def layouts_of(world_size: int) -> list[str]:
    """The layouts that this number of ranks can have."""
    return [kind for kind in LAYOUTS if world_size == 4 or kind not in ("hsdp", "fsdp_tp")]


def spread(kind: str, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model in the layout, each rank with its part of the tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Net(range(rank, EXPERTS, size) if kind == "ep" else range(EXPERTS))
    own = {name: tensors[name] for name in model.state_dict() if name in tensors}
    model.load_state_dict(own, strict=False)
    return WRAPS[kind](model)


def sharded(full: torch.Tensor) -> ShardedTensor:
    """A ShardedTensor by rows, as even as `torch.chunk`; ranks at the end may have none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = full.chunk(size)
    own = []
    if rank < len(parts):
        offsets = [sum(len(part) for part in parts[:rank]), *([0] * (full.ndim - 1))]
        place = ShardMetadata(
            shard_offsets=offsets,
            shard_sizes=list(parts[rank].shape),
            placement=f"rank:{rank}/cpu",
        )
        own = [Shard(parts[rank].clone(), place)]
    return init_from_local_shards(own, *full.shape)


def names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, without the prefix that DDP puts before it."""
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds in a layout. A dictionary of ShardedTensors has no optimizer."""

    kind: str
    model: Any
    moments: Tensors
    optimizer: torch.optim.AdamW | None = None

    def state(self) -> dict[str, Any]:
        """All entries, as they are saved."""
        entries = {"model": self.model, "moments": self.moments}
        if self.optimizer is not None:
            entries["optimizer"] = self.optimizer
        return entries

    def tensors(self) -> Tensors:
        """Parameters and buffers by name."""
        found = self.model if isinstance(self.model, dict) else self.model.state_dict()
        return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def hold(kind: str, full: Full) -> Held:
    """This rank's part of the full state in the layout."""
    if kind == "sharded_tensor":
        return _hold_sharded(full)
    model = spread(kind, full.tensors)
    # The moments are laid out as torch lays out parameters, by a model whose parameters they are.
    inner = "plain" if kind == "ddp" else kind
    spreads = {moment: names(spread(inner, full.moments[moment])) for moment in MOMENTS}
    optimizer = adamw(model, RATE, RATE_OF_VECTORS)
    for name, parameter in names(model).items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(STEPS)),
            **{moment: spreads[moment][name].detach().clone() for moment in MOMENTS},
        }
    moments = {
        f"{moment}.{name}": tensor.detach()
        for moment, tensors in spreads.items()
        for name, tensor in tensors.items()
    }
    return Held(kind=kind, model=model, optimizer=optimizer, moments=moments)


def _hold_sharded(full: Full) -> Held:
    parameters = {name: sharded(full.tensors[name]) for name in full.moments[MOMENTS[0]]}
    model = {name: parameters.get(name, tensor.clone()) for name, tensor in full.tensors.items()}
    model[TIED[1]] = model[TIED[0]]
    moments = {name: sharded(tensor) for name, tensor in full.flat_moments().items()}
    return Held(kind="sharded_tensor", model=model, moments=moments)


# --- comparison -----------------------------------------------------------------------------


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of this rank that holds elements of the tensor."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        return [tensor.detach().to_local()]
    return [tensor.detach()]


def spoil(held: Held, *, is_fresh: bool) -> None:
    """Wrong elements everywhere; `is_fresh`: the optimizer has made no step yet."""
    for tensor in [*held.tensors().values(), *held.moments.values()]:
        for part in parts(tensor):
            part.fill_(float("nan") if part.is_floating_point() else -1)
    if held.optimizer is None:
        return
    for group in held.optimizer.param_groups:
        group["lr"] = WRONG_RATE
    for parameter, state in held.optimizer.state.items():
        for name, tensor in state.items():
            fresh = torch.full_like(tensor if name == "step" else parameter, float("nan"))
            state[name] = fresh.detach()
    if is_fresh:
        held.optimizer.state.clear()


def layout_of(tensor: torch.Tensor) -> str:
    """The type, and the placements of a DTensor."""
    if isinstance(tensor, DTensor):
        return f"DTensor {tensor.placements} on {tensor.device_mesh}"
    return "ShardedTensor" if isinstance(tensor, ShardedTensor) else "plain"


def _unequal(at: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if layout_of(actual) != layout_of(expected):
        return [f"{at}: {layout_of(actual)} instead of {layout_of(expected)}"]
    ours, theirs = parts(actual), parts(expected)
    shapes = [[tuple(part.shape) for part in side] for side in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return [f"{at}: local shapes {shapes[0]} instead of {shapes[1]}"]
    same = [raw(ours[k]) == raw(theirs[k]) for k in range(len(ours))]
    return [] if all(same) else [f"{at}: {ours} instead of {theirs}"]


def _unequal_all(at: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    if list(actual) != list(expected):
        return [f"{at}: keys {list(actual)} instead of {list(expected)}"]
    return [
        text for name in expected for text in _unequal(f"{at} {name}", actual[name], expected[name])
    ]


def differences(actual: Held, expected: Held, *entries: str) -> list[str]:
    """Every way in which this rank's part of the entries is not what it should be."""
    found = []
    if "model" in entries:
        found += _unequal_all("model", actual.tensors(), expected.tensors())
        found += _untied(actual)
    if "moments" in entries:
        found += _unequal_all("moments", actual.moments, expected.moments)
    if "optimizer" in entries:
        found += _unequal_optimizers(actual, expected)
    return found


def _untied(actual: Held) -> list[str]:
    first, second = ([raw(part) for part in parts(actual.tensors()[name])] for name in TIED)
    return [] if first == second else ["the tied parameters are no longer the same"]


def _unequal_optimizers(actual: Held, expected: Held) -> list[str]:
    assert actual.optimizer is not None
    assert expected.optimizer is not None
    found = []
    theirs = names(expected.model)
    for name, parameter in names(actual.model).items():
        state = actual.optimizer.state.get(parameter, {})
        wanted = expected.optimizer.state[theirs[name]]
        found += _unequal_all(f"optimizer {name}", state, wanted)
    rates = [group["lr"] for group in actual.optimizer.param_groups]
    if rates != [RATE, RATE_OF_VECTORS]:
        found.append(f"optimizer: learning rates {rates}")
    return found
