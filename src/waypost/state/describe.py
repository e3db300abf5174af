"""A state, described: the tree of each entry, and the pieces of bytes that have to be stored.

Nothing is copied here. Random streams are captured first, since an object may draw from them when
it is asked for its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from waypost.buffers import Source
from waypost.format import documents, paths, values
from waypost.format.jsontext import Json
from waypost.format.tensortypes import TensorType
from waypost.state import aliases, modules, optimizers
from waypost.state.extensions import ExtensionEncoder
from waypost.state.memory import TensorSource
from waypost.state.tensors import TensorEncoder


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to store: the path they belong to, their type, and where they come from."""

    path: str
    type: TensorType
    source: Source


@dataclass(frozen=True, slots=True)
class Description:
    """What a state is made of.

    Attributes:
        entries: In the order of the state.
        pieces: In the order of the entries and their trees.
        tensor_counts: Tensors of each entry, ties included.
        ties: Path of a leaf that is exactly another one, to that one's path.
        has_pickle: Something was pickled.
    """

    entries: dict[str, documents.Entry]
    pieces: list[Piece]
    tensor_counts: dict[str, int]
    ties: dict[str, str]
    has_pickle: bool


def describe(state: Mapping[str, object], *, allow_pickle: bool = False) -> Description:
    """Returns the description of ``state``.

    Args:
        state: Entry names to modules, optimizers, objects with ``state_dict``, tensors, values.
        allow_pickle: Pickle what nothing else can hold.

    Raises:
        UnsupportedError: Something cannot be restored exactly; names its path.
        ValueError: The state is empty, or an entry's name is not a non-empty string.
    """
    return _Describer(state, allow_pickle).run()


def scope_of(value: object) -> str:
    """Returns who owns an entry by its nature: each rank, or all ranks together."""
    declared = getattr(value, "waypost_scope", None)
    if declared is None and isinstance(value, torch.utils.data.DataLoader):
        declared = "per_rank"
    return declared or "replicated"


def is_last(value: object) -> bool:
    """Tells whether an entry is captured before and restored after all others."""
    return bool(getattr(value, "waypost_last", False))


def has_state(value: object) -> bool:
    """Tells whether ``value`` can give and take its state itself."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def check_state(state: Mapping[str, object], what: str) -> None:
    """Refuses a state without entries, or with names that are not text.

    Raises:
        ValueError: With what was found.
    """
    if not isinstance(state, Mapping) or not state:
        raise ValueError(f"{what} must be a dictionary of at least one entry, not {state!r:.80}")
    for name in state:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{what}: an entry's name must be a non-empty string, not {name!r:.80}"
            )


class _Describer:
    def __init__(self, state: Mapping[str, object], allow_pickle: bool) -> None:
        check_state(state, "state")
        self._state = state
        self._values = values.Encoder(self._leaf, allow_pickle=allow_pickle)
        self._tensors = TensorEncoder(self._values.node)
        self._extensions = ExtensionEncoder(self._values.node, self._tensors)

    def run(self) -> Description:
        found: dict[str, documents.Entry] = {}
        counts: dict[str, int] = {}
        for name in sorted(self._state, key=lambda name: not is_last(self._state[name])):
            before = len(self._tensors.leaves)
            found[name] = self._entry(name, self._state[name])
            counts[name] = len(self._tensors.leaves) - before
        leaves = self._tensors.leaves
        kept = aliases.resolve(leaves)
        self._tensors.shorten()
        ties = {
            leaf.path: leaf.node["alias"]
            for leaf in leaves
            if "alias" in leaf.node and "offset" not in leaf.node
        }
        return Description(
            entries={name: found[name] for name in self._state},
            pieces=[Piece(leaf.path, leaf.type, TensorSource(leaf.tensor)) for leaf in kept],
            tensor_counts=counts,
            ties=ties,
            has_pickle=self._values.has_pickle,
        )

    def _leaf(self, value: Any, path: str) -> Json | None:
        return self._extensions.node(value, path)

    def _entry(self, name: str, value: object) -> documents.Entry:
        path = paths.segment(name)
        versions: dict[str, list[str]] = {}
        content: Any
        if isinstance(value, torch.nn.Module):
            kind = "module"
            content, versions = modules.state_of(value)
        elif isinstance(value, torch.optim.Optimizer) and (
            named := optimizers.state_of(value, optimizers.names_of(value, self._state), path)
        ):
            kind, content = "optimizer", named
        elif has_state(value):
            kind, content = "stateful", value.state_dict()  # type: ignore[attr-defined]
        else:
            kind, content = "tensor" if isinstance(value, torch.Tensor) else "value", value
        tree = self._values.node(content, path)
        return documents.Entry(kind=kind, scope=scope_of(value), tree=tree, versions=versions)


def is_module(value: object) -> bool:
    """Tells whether ``value`` is a module, whose weights stand alone."""
    return isinstance(value, torch.nn.Module)
