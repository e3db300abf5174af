"""The leaves of a snapshot, known from its documents alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from waypost.format import paths, tensornodes, tensortypes, trees
from waypost.format.documents import Entry
from waypost.format.paths import Globs


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """What is known of a leaf without reading it.

    Attributes:
        path: Entry and keys, joined by ``/``.
        kind: ``"tensor"`` or ``"value"``.
        dtype: Torch's name of the element type; the type tag for a value.
        shape: Global shape; empty for a value.
        nbytes: Bytes in data files; 0 for values and for leaves that share another one's bytes.
        scope: ``"replicated"``, ``"sharded"`` or ``"per_rank"``.
        shards: Parts that it is stored in.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scope: str
    shards: int


def leaf_infos(entries: Mapping[str, Entry], glob: Globs = None) -> list[LeafInfo]:
    """Returns the leaves, in order, that match any of the globs; all if None."""
    takes = paths.matcher("**" if glob is None else glob)
    return [
        _leaf_info(leaf, entry.scope)
        for name, entry in entries.items()
        for leaf in trees.leaves(entry.tree, paths.segment(name))
        if takes(leaf.path)
    ]


def _leaf_info(leaf: trees.Leaf, scope: str) -> LeafInfo:
    if leaf.tag != trees.TENSOR:
        nbytes = 0
        if leaf.tag == trees.ARRAY:
            nbytes = sum(kind.nbytes for _, kind in tensornodes.pieces(leaf.tensor_node, leaf.path))
        return LeafInfo(
            path=leaf.path,
            kind="value",
            dtype=leaf.tag.removeprefix("$") or _value_type(leaf.payload),
            shape=(),
            nbytes=nbytes,
            scope=scope,
            shards=1 if nbytes else 0,
        )
    description = tensornodes.described(leaf.tensor_node, leaf.path)
    kind = tensortypes.parse(description["type"])
    stored = list(tensornodes.pieces(leaf.tensor_node, leaf.path))
    return LeafInfo(
        path=leaf.path,
        kind="tensor",
        dtype=kind.dtype,
        shape=kind.shape,
        nbytes=sum(piece.nbytes for _, piece in stored),
        scope=scope,
        shards=len(stored),
    )


def _value_type(payload: object) -> str:
    return "None" if payload is None else type(payload).__name__
