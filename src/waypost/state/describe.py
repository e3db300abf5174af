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
from waypost.errors import UnsupportedError
from waypost.format import documents, paths, shardings, trees, values
from waypost.format.jsontext import Json
from waypost.format.shardings import Box, Ranks, Sharding, whole
from waypost.format.tensortypes import TensorType
from waypost.state import aliases, modules, optimizers
from waypost.state import scopes as scoping
from waypost.state.extensions import ExtensionEncoder
from waypost.state.memory import TensorSource
from waypost.state.scopes import Scopes
from waypost.state.tensors import TensorEncoder, TensorLeaf


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of a tensor that has to be stored.

    Attributes:
        path: The path that the bytes belong to.
        type: Of the whole tensor.
        held: Boxes of it, and their bytes.
        sharding: How it is spread over ranks; None when every rank holds all of it.
        is_own: It is this rank's alone: every rank stores a tensor of that name for itself.
        is_declared: The caller, or its kind, says that ranks that hold the same hold equal bytes.
    """

    path: str
    type: TensorType
    held: tuple[tuple[Box, Source], ...]
    sharding: Sharding | None = None
    is_own: bool = False
    is_declared: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """What a state is made of, as this rank sees it.

    Attributes:
        entries: In the order of the state. What each rank has for itself is a placeholder.
        own: Nodes of this rank for the placeholders, by path.
        pieces: In the order of the entries and their trees.
        tensor_counts: Tensors of each entry, ties included.
        ties: Path of a leaf that is exactly another one, to that one's path.
        has_pickle: Something was pickled.
    """

    entries: dict[str, documents.Entry]
    own: dict[str, Json]
    pieces: list[Piece]
    tensor_counts: dict[str, int]
    ties: dict[str, str]
    has_pickle: bool


def describe(
    state: Mapping[str, object],
    *,
    allow_pickle: bool = False,
    ranks: Ranks = shardings.ONE,
    scopes: Scopes = scoping.NONE,
) -> Description:
    """Returns the description of ``state``.

    Args:
        state: Entry names to modules, optimizers, objects with ``state_dict``, tensors, values.
        allow_pickle: Pickle what nothing else can hold.
        ranks: Who saves.
        scopes: What the caller says of leaves.

    Raises:
        UnsupportedError: Something cannot be restored exactly; names its path.
        ValueError: The state is empty, or an entry's name is not a non-empty string.
    """
    return _Describer(state, allow_pickle, ranks, scopes).run()


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
    def __init__(
        self, state: Mapping[str, object], allow_pickle: bool, ranks: Ranks, scopes: Scopes
    ) -> None:
        check_state(state, "state")
        self._state = state
        self._scopes = scopes.with_inferred(state) if ranks.world_size > 1 else scopes
        self._is_many = ranks.world_size > 1
        self._own: dict[str, Json] = {}
        self._own_leaves: set[str] = set()
        self._values = values.Encoder(self._leaf, allow_pickle=allow_pickle)
        self._tensors = TensorEncoder(self._values.node, ranks)
        self._extensions = ExtensionEncoder(self._values.node, self._tensors)

    def run(self) -> Description:
        found: dict[str, documents.Entry] = {}
        counts: dict[str, int] = {}
        for name in sorted(self._state, key=lambda name: not is_last(self._state[name])):
            before = len(self._tensors.leaves)
            found[name] = self._entry(name, self._state[name])
            counts[name] = len(self._tensors.leaves) - before
        leaves = self._tensors.leaves
        kept = aliases.resolve(leaves, self._owner)
        self._tensors.shorten()
        ties = {
            leaf.path: leaf.node["alias"]
            for leaf in leaves
            if "alias" in leaf.node and "offset" not in leaf.node
        }
        return Description(
            entries={name: found[name] for name in self._state},
            own=self._own,
            pieces=[self._piece(leaf) for leaf in kept],
            tensor_counts=counts,
            ties=ties,
            has_pickle=self._values.has_pickle,
        )

    def _piece(self, leaf: TensorLeaf) -> Piece:
        if leaf.held is None:
            held: tuple[tuple[Box, Source], ...] = (
                (whole(leaf.type.shape), TensorSource(leaf.tensor)),
            )
        else:
            held = tuple((piece.box, TensorSource(piece.tensor)) for piece in leaf.held.pieces)
        name = paths.leaf_of(leaf.path)
        if name in self._own_leaves and leaf.held is not None and leaf.held.sharding is not None:
            raise UnsupportedError(
                f"{leaf.path}: a tensor that is spread over ranks ({leaf.held.sharding.text}) "
                f"cannot be each rank's own; take it out of per_rank",
                path=leaf.path,
            )
        return Piece(
            path=leaf.path,
            type=leaf.type,
            held=held,
            sharding=None if leaf.held is None else leaf.held.sharding,
            is_own=name in self._own_leaves,
            is_declared=self._scopes.is_replicated(name)
            or (leaf.held is not None and not leaf.held.is_assumed),
        )

    def _owner(self, leaf: TensorLeaf) -> object:
        sharding = None if leaf.held is None else leaf.held.sharding
        return leaf.held is not None, sharding, leaf.path in self._own_leaves

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
        scope = scope_of(value)
        if scope == "per_rank" or self._scopes.is_per_rank(path):
            scope = "per_rank"
            self._take_own(tree, path)
        elif self._is_many and self._scopes.has_per_rank:
            tree = self._without_own(tree, path)
        return documents.Entry(kind=kind, scope=scope, tree=tree, versions=versions)

    def _take_own(self, tree: Json, path: str) -> None:
        for leaf in trees.leaves(tree, path):
            if self._scopes.is_per_rank(leaf.path) and self._scopes.declared(leaf.path):
                raise ValueError(f"{leaf.path}: is declared both replicated and per_rank")
        self._own_leaves.update(paths.leaf_of(leaf.path) for leaf in trees.leaves(tree, path))

    def _without_own(self, tree: Json, path: str) -> Json:
        """Returns the tree with placeholders where each rank has something for itself."""

        def change(node: Json, at: str) -> Json:
            if not self._scopes.is_per_rank(at):
                return node
            self._own[at] = node
            self._take_own(node, at)
            return {trees.PER_RANK: None}

        return trees.changed(tree, path, change)


def is_module(value: object) -> bool:
    """Tells whether ``value`` is a module, whose weights stand alone."""
    return isinstance(value, torch.nn.Module)
