"""The leaves of a snapshot, known from its documents alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waypost.format import cuts, paths, shardings, tensornodes, tensortypes, trees
from waypost.format.cuts import Cut
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
        scope: ``"replicated"``, ``"sharded"`` (each rank holds a part) or ``"per_rank"``.
        shards: Parts that it is stored in; of a sharded tensor, its different boxes.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scope: str
    shards: int


def leaf_infos(
    entries: Mapping[str, Entry], glob: Globs = None, divided: Sequence[Cut] = ()
) -> list[LeafInfo]:
    """Returns the leaves, in order, that match any of the globs; all if None.

    Args:
        entries: Of one snapshot.
        glob: Over leaf paths.
        divided: The snapshot's cuts.
    """
    takes = paths.matcher("**" if glob is None else glob)
    return [
        _leaf_info(leaf, entry.scope, divided)
        for name, entry in entries.items()
        for leaf in trees.leaves(entry.tree, paths.segment(name))
        if takes(leaf.path)
    ]


def _leaf_info(leaf: trees.Leaf, scope: str, divided: Sequence[Cut]) -> LeafInfo:
    if leaf.tag == trees.PER_RANK:
        return LeafInfo(
            path=leaf.path, kind="value", dtype="", shape=(), nbytes=0, scope="per_rank", shards=0
        )
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
    shards = sum(cuts.parts(divided, path) for path, _ in stored)
    if "sharding" in description:
        sharding = shardings.parse(description["sharding"])
        if sharding.boxes is not None or sharding.divided:
            scope, shards = "sharded", len(sharding.boxes_of(kind.shape)) * len(stored)
    return LeafInfo(
        path=leaf.path,
        kind="tensor",
        dtype=kind.dtype,
        shape=kind.shape,
        nbytes=sum(piece.nbytes for _, piece in stored),
        scope=scope,
        shards=shards,
    )


def _value_type(payload: object) -> str:
    return "None" if payload is None else type(payload).__name__
