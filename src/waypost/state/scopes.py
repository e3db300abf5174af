"""Who owns a leaf: what the caller says by globs, and what follows from how modules are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from waypost.format import paths
from waypost.format.paths import Globs
from waypost.state import modules, optimizers


def _nothing(path: str) -> bool:
    del path
    return False


@dataclass(frozen=True, slots=True)
class Scopes:
    """Rules for leaves that are neither sharded nor per rank by their nature.

    Attributes:
        is_per_rank: Tells whether each rank has what stands at a path for itself.
        has_per_rank: Whether any path may be per rank.
        declared: Tells whether the caller says that a leaf is equal on all ranks.
        inferred: Paths at and below which tensors are equal on all ranks, by their wrapper.
    """

    is_per_rank: Callable[[str], bool] = _nothing
    has_per_rank: bool = False
    declared: Callable[[str], bool] = _nothing
    inferred: frozenset[str] = field(default=frozenset())

    def is_replicated(self, path: str) -> bool:
        """Tells whether a leaf is said to be equal on all ranks, so that it is not compared."""
        return path in self.inferred or _above(path) in self.inferred or self.declared(path)

    def with_inferred(self, state: Mapping[str, object]) -> Scopes:
        """Returns the rules with what follows from modules under DistributedDataParallel."""
        found: set[str] = set()
        parameters: set[int] = set()
        for entry, value in state.items():
            if isinstance(value, torch.nn.Module):
                for name, tensor in modules.synchronised(value):
                    found.add(f"{paths.segment(entry)}/{paths.segment(name)}")
                    parameters.add(id(tensor))
        for entry, value in state.items():
            if parameters and optimizers.is_optimizer(value):
                found.update(_optimizer_paths(entry, value, state, parameters))
        return replace(self, inferred=frozenset(found)) if found else self


NONE: Final = Scopes()
"""Nothing is said of any leaf."""


def scopes(replicated: Globs = None, per_rank: Globs = None) -> Scopes:
    """Returns the rules that the arguments of a save describe."""
    return Scopes(
        is_per_rank=paths.matcher(per_rank),
        has_per_rank=bool(per_rank),
        declared=paths.matcher(replicated),
    )


def _optimizer_paths(
    entry: str, optimizer: Any, state: Mapping[str, object], parameters: set[int]
) -> set[str]:
    names = optimizers.names_of(optimizer, state).by_position
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{paths.segment(entry)}/state/{paths.segment(name)}"
        for name, parameter in zip(names, held, strict=True)
        if id(parameter) in parameters
    }


def _above(path: str) -> str:
    return path.rpartition("/")[0]
