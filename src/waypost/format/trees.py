"""Walking the tree of an entry without restoring it, and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from waypost.errors import FormatError
from waypost.format import jsontext, paths
from waypost.format.jsontext import Json

TENSOR: Final = "$tensor"
ARRAY: Final = "$ndarray"

_PAIRS: Final = {"$dict": 0, "$odict": 0, "$counter": 0, "$defaultdict": 1}
_ITEMS: Final = {"$tuple": 0, "$slice": 0, "$deque": 1}
_NAMED: Final = ("$namedtuple", "$dataclass")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree: a tensor or array with its payload, or a value.

    ``is_inner`` tells that it belongs to the state of an object, such as a random generator.
    """

    path: str
    tag: str
    payload: Any
    is_inner: bool = False

    @property
    def node(self) -> Json:
        """The whole node."""
        node: Json = {self.tag: self.payload} if self.tag else self.payload
        return node

    @property
    def is_tensor(self) -> bool:
        """Whether bytes in data files belong to it."""
        return self.tag in (TENSOR, ARRAY)

    @property
    def tensor_node(self) -> Json:
        """The payload of the tensor tag that holds its bytes."""
        node: Json = self.payload if self.tag == TENSOR else self.payload["tensor"][TENSOR]
        return node


def leaves(node: Json, path: str) -> Iterator[Leaf]:
    """Yields every leaf below ``node``, which stands at ``path``, in order.

    A container without items is a leaf too. Values have the tag ``""`` or their own.

    Raises:
        FormatError: The tree is not one that an encoder writes.
    """
    try:
        yield from _leaves(node, path)
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deeply") from error
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise FormatError(f"{path}: bad tree: {error}") from error


def items(node: Json, path: str) -> Iterator[Leaf]:
    """Yields the items of a dictionary as leaves, whatever they are made of.

    Raises:
        FormatError: The node is not a dictionary.
    """
    found = children(node, path)
    if found is None:
        raise FormatError(f"{path}: expected a dictionary of names")
    for _, below, child in found:
        tag = next(iter(child), "") if isinstance(child, dict) and len(child) == 1 else ""
        if tag in (TENSOR, ARRAY):
            yield Leaf(below, tag, child[tag])  # type: ignore[index,call-overload]  # a dictionary
        else:
            yield Leaf(below, "", child)


def holds_pickle(node: Json) -> bool:
    """Tells whether anything below ``node`` was pickled."""
    if isinstance(node, dict):
        return "$pickle" in node or any(map(holds_pickle, node.values()))
    return isinstance(node, list) and any(map(holds_pickle, node))


def children(node: Json, path: str) -> Iterator[tuple[Any, str, Json]] | None:
    """Returns key, path and node of each item of a container, or None for a leaf.

    Keys of dictionaries are given as their nodes, those of sequences as numbers.
    """
    if isinstance(node, list):
        return _numbered(node, path)
    if not isinstance(node, dict):
        return None
    tag = next(iter(node), "")
    if len(node) != 1 or not tag.startswith("$"):
        return _keyed(node, path)
    payload: Any = node[tag]
    if tag in _PAIRS:
        return _keyed(payload[_PAIRS[tag]] if _PAIRS[tag] else payload, path)
    if tag in _ITEMS:
        return _numbered(payload[_ITEMS[tag]] if _ITEMS[tag] else payload, path)
    return _keyed(payload[1], path) if tag in _NAMED else None


def _leaves(node: Json, path: str) -> Iterator[Leaf]:
    found = children(node, path)
    if found is None:
        yield from _one(node, path)
        return
    is_empty = True
    for _, below, child in found:
        is_empty = False
        yield from _leaves(child, below)
    if is_empty:
        yield Leaf(path, "", node)


def _one(node: Json, path: str) -> Iterator[Leaf]:
    if not isinstance(node, dict):
        yield Leaf(path, "", node)
        return
    tag = next(iter(node))
    payload: Any = node[tag]
    if tag in ("$generator", "$registered"):
        for leaf in _leaves(payload[1], path):
            yield replace(leaf, is_inner=True)
    else:
        yield Leaf(path, tag, payload)


def _numbered(items: list[Json], path: str) -> Iterator[tuple[Any, str, Json]]:
    for index, node in enumerate(items):
        yield index, f"{path}/{index}", node


def _keyed(pairs: Any, path: str) -> Iterator[tuple[Any, str, Json]]:
    for key, node in pairs.items() if isinstance(pairs, dict) else pairs:
        if type(key) is str:
            yield key, f"{path}/{paths.segment(key)}", node
        else:
            text = jsontext.dump(key).decode("utf-8", "surrogatepass")
            yield key, f"{path}/{paths.key_segment(text)}", node
