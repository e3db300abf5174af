"""Tensor nodes: what the tree of an entry says of a tensor, and whether the stored bytes agree."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from waypost.errors import FormatError
from waypost.format import cuts, paths, shardings, shards, tensortypes, trees
from waypost.format.cuts import Cut
from waypost.format.jsontext import Json
from waypost.format.paths import part_path
from waypost.format.safetensors import Item
from waypost.format.shards import Extent
from waypost.format.tensortypes import TensorType

TAG: Final = trees.TENSOR


def described(node: Json, path: str) -> dict[str, Any]:
    """Returns the payload of a tensor tag in its long form."""
    if isinstance(node, str):
        return {"type": node}
    if not isinstance(node, dict) or not isinstance(node.get("type"), str):
        raise FormatError(f"{path}: not a tensor node")
    return node


def pieces(node: Json, path: str) -> Iterator[tuple[str, TensorType]]:
    """Yields path and type of each piece that the tensor at ``path`` is stored in.

    An alias has none: its bytes belong to the leaf that it names.
    """
    description = described(node, path)
    if "alias" in description:
        return
    if "parts" not in description:
        yield path, tensortypes.parse(description["type"])
        return
    for name, part in _parts(description, path):
        yield from pieces(part, part_path(path, name))


def aliases(node: Json, path: str) -> Iterator[str]:
    """Yields the paths of the leaves that the tensor at ``path`` shares memory with."""
    description = described(node, path)
    if "alias" in description:
        yield description["alias"]
    if "parts" in description:
        for name, part in _parts(description, path):
            yield from aliases(part, part_path(path, name))


class Consistency:
    """Checks that tensor nodes and data files describe the same bytes; add both, then ask."""

    def __init__(self) -> None:
        self._expected: dict[_Owned, TensorType] = {}
        self._aliases: list[tuple[_Owned, dict[str, Any]]] = []
        self._stored: dict[tuple[str, str], list[_Part]] = {}
        self._spread: dict[str, str] = {}

    def add_tree(self, tree: Json, path: str, owner: int | None = None) -> None:
        """Learns the tensors of an entry.

        Args:
            tree: Of the entry, or a rank's own node in it.
            path: Where it stands.
            owner: The rank whose own it is; None for what ranks share.

        Raises:
            FormatError: A node is malformed.
        """
        for leaf in trees.leaves(tree, path):
            if leaf.is_tensor:
                self._add(leaf.tensor_node, leaf.path, owner)

    def add_items(self, entry: str, rank: int, items: Mapping[str, Item]) -> None:
        """Learns what a data file of ``rank`` holds of ``entry``, by key.

        Raises:
            FormatError: A key names no part of a leaf.
        """
        for name, item in items.items():
            key, extent = shards.parse_key(name)
            self._stored.setdefault((entry, key), []).append(_Part(rank, item, extent))

    def check(self, unknown: Container[str] = frozenset()) -> None:
        """Compares the two.

        Args:
            unknown: Entry paths whose files could not be read; aliases into them pass.

        Raises:
            FormatError: A leaf is in no file, or not in parts that make it up; has another type
                there; or is an alias of nothing.
        """
        for owned, kind in self._expected.items():
            parts = self._parts_of(owned)
            if not parts and kind.nbytes:
                raise FormatError(f"{owned.path}: no data file holds this leaf")
            extents = [
                shards.check_item(owned.path, kind, part.item, part.extent) for part in parts
            ]
            if parts and not shards.are_all(extents, kind.shape):
                raise FormatError(
                    f"{owned.path}: its {len(parts)} stored parts do not make up {kind.text}, or "
                    f"it is stored twice"
                )
        for owned, description in self._aliases:
            if paths.entry_of(description["alias"]) not in unknown:
                self._check_alias(owned, description)

    def check_writers(self, divided: Sequence[Cut]) -> None:
        """Makes sure that what several ranks wrote is found where readers look for it.

        Args:
            divided: The cuts of the snapshot.

        Raises:
            FormatError: A part is on a rank that neither cuts nor sharding name.
        """
        for owned, kind in self._expected.items():
            if owned.owner is not None:
                continue
            parts = self._parts_of(owned)
            text = self._spread.get(paths.leaf_of(owned.path))
            for part in parts if kind.nbytes else ():
                if text is None:
                    named: Sequence[int] = cuts.writers(divided, owned.path)
                else:
                    extent = shards.check_item(owned.path, kind, part.item, part.extent)
                    named = shardings.parse(text).holders(extent.box, kind.shape)
                if part.rank not in named:
                    raise FormatError(
                        f"{owned.path}: a part of it is on rank {part.rank}, where nobody looks"
                    )

    def _add(self, node: Json, path: str, owner: int | None) -> None:
        description = described(node, path)
        if "sharding" in description and owner is None:
            shardings.parse(description["sharding"])
            self._spread[path] = description["sharding"]
        if "alias" in description:
            if not isinstance(description["alias"], str):
                raise FormatError(f"{path}: an alias must name a leaf")
            tensortypes.parse(description["type"])
            self._aliases.append((_Owned(path, owner), description))
        elif "parts" not in description:
            self._expected[_Owned(path, owner)] = tensortypes.parse(description["type"])
        else:
            for name, part in _parts(description, path):
                self._add(part, part_path(path, name), owner)

    def _parts_of(self, owned: _Owned) -> list[_Part]:
        found = self._stored.get((paths.entry_of(owned.path), paths.key_of(owned.path)), [])
        return [part for part in found if owned.owner in (None, part.rank)]

    def _check_alias(self, owned: _Owned, description: dict[str, Any]) -> None:
        base = _Owned(description["alias"], owned.owner)
        kind = tensortypes.parse(description["type"])
        found = self._expected.get(base) or self._expected.get(_Owned(base.path, None))
        if found is None and not self._parts_of(base):
            raise FormatError(
                f"{owned.path}: an alias of {base.path[:200]}, which no data file holds"
            )
        if "offset" not in description and found != kind:
            raise FormatError(
                f"{owned.path}: an alias of {base.path[:200]}, which has another type"
            )


@dataclass(frozen=True, slots=True)
class _Owned:
    """A path, and the rank whose own it is; None when it is shared."""

    path: str
    owner: int | None


@dataclass(frozen=True, slots=True)
class _Part:
    """An item of a data file, the rank that wrote it, and which part of a leaf it is."""

    rank: int
    item: Item
    extent: Extent | None


def _parts(description: dict[str, Any], path: str) -> Iterator[tuple[str, Json]]:
    parts = description["parts"]
    if not isinstance(parts, dict):
        raise FormatError(f"{path}: parts must be an object")
    for name, part in parts.items():
        if not isinstance(part, dict) or TAG not in part:
            raise FormatError(f"{path}: part {name[:80]!r} is not a tensor node")
        yield name, part[TAG]
