"""Tensor nodes: what the tree of an entry says of a tensor, and whether the stored bytes agree."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

from waypost.errors import FormatError
from waypost.format import paths, tensortypes, trees
from waypost.format.jsontext import Json
from waypost.format.paths import part_path
from waypost.format.safetensors import Item
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
    """Checks that tensor nodes and data files describe the same bytes; add both, then ask.

    Attributes:
        expected: Each piece that the nodes name, by path.
    """

    def __init__(self) -> None:
        self.expected: dict[str, TensorType] = {}
        self._aliases: list[tuple[str, dict[str, Any]]] = []

    def add_tree(self, tree: Json, path: str) -> None:
        """Learns the tensors of an entry.

        Raises:
            FormatError: A node is malformed.
        """
        for leaf in trees.leaves(tree, path):
            if leaf.is_tensor:
                self._add(leaf.tensor_node, leaf.path)

    def check(
        self, stored: Mapping[tuple[str, str], Item], unknown: Container[str] = frozenset()
    ) -> None:
        """Compares with what data files hold.

        Args:
            stored: Items by entry path and key.
            unknown: Entry paths whose files could not be read; aliases into them pass.

        Raises:
            FormatError: A leaf is in no file, has another type there, or is an alias of nothing.
        """
        for path, kind in self.expected.items():
            item = stored.get((paths.entry_of(path), paths.key_of(path)))
            if item is None:
                raise FormatError(f"{path}: no data file holds this leaf")
            if (item.dtype, item.shape) != kind.stored:
                raise FormatError(
                    f"{path}: the tree says {kind.text}, the data file holds "
                    f"{item.dtype}{list(item.shape)}"
                )
        for path, description in self._aliases:
            if paths.entry_of(description["alias"]) not in unknown:
                self._check_alias(path, description, stored)

    def _add(self, node: Json, path: str) -> None:
        description = described(node, path)
        if "alias" in description:
            if not isinstance(description["alias"], str):
                raise FormatError(f"{path}: an alias must name a leaf")
            tensortypes.parse(description["type"])
            self._aliases.append((path, description))
        elif "parts" not in description:
            self.expected[path] = tensortypes.parse(description["type"])
        else:
            for name, part in _parts(description, path):
                self._add(part, part_path(path, name))

    def _check_alias(
        self,
        path: str,
        description: dict[str, Any],
        stored: Mapping[tuple[str, str], Item],
    ) -> None:
        base = description["alias"]
        item = stored.get((paths.entry_of(base), paths.key_of(base)))
        if item is None:
            raise FormatError(f"{path}: an alias of {base[:200]}, which no data file holds")
        kind = tensortypes.parse(description["type"])
        if "offset" not in description and (item.dtype, item.shape) != kind.stored:
            raise FormatError(f"{path}: an alias of {base[:200]}, which has another type")


def _parts(description: dict[str, Any], path: str) -> Iterator[tuple[str, Json]]:
    parts = description["parts"]
    if not isinstance(parts, dict):
        raise FormatError(f"{path}: parts must be an object")
    for name, part in parts.items():
        if not isinstance(part, dict) or TAG not in part:
            raise FormatError(f"{path}: part {name[:80]!r} is not a tensor node")
        yield name, part[TAG]
