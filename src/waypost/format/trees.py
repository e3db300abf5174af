"""Walking the tree of an entry without restoring it, and without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from waypost.errors import FormatError
from waypost.format import jsontext, paths
from waypost.format.jsontext import Json

TENSOR: Final = "$tensor"
ARRAY: Final = "$ndarray"
PER_RANK: Final = "$per_rank"
"""Stands, in what all ranks share, where each rank has a node of its own."""

DROP: Final[Json] = {"$drop": None}
"""Returned to :func:`changed` for a node that is to go; known by identity."""

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


def changed(node: Json, path: str, change: Callable[[Json, str], Json]) -> Json:
    """Returns the tree with each node replaced by what ``change`` makes of it, from the top down.

    What ``change`` replaced is not looked into again; what it makes :data:`DROP` is left out of its
    container. Trees are not changed in place.
    """
    replaced = change(node, path)
    found = None if replaced is not node else children(node, path)
    if found is None:
        return replaced
    below = [(key, child, changed(child, at, change)) for key, at, child in found]
    if all(child is new for _, child, new in below):
        return node
    return with_items(node, [(key, new) for key, _, new in below if new is not DROP])


def with_items(node: Any, below: list[tuple[Any, Json]]) -> Json:
    """Returns a container like ``node`` with other items, given as :func:`children` gives them."""
    if isinstance(node, list):
        return [new for _, new in below]
    tag = next(iter(node), "")
    if len(node) != 1 or not tag.startswith("$"):
        return dict(below)
    payload = node[tag]
    pairs: Any = [[key, new] for key, new in below]
    items: Any = [new for _, new in below]
    if tag in _PAIRS:
        held = payload[_PAIRS[tag]] if _PAIRS[tag] else payload
        content = dict(pairs) if isinstance(held, dict) else pairs
        return {tag: [payload[0], content] if _PAIRS[tag] else content}
    if tag in _ITEMS:
        return {tag: [payload[0], items] if _ITEMS[tag] else items}
    content = dict(pairs) if isinstance(payload[1], dict) else pairs
    return {tag: [payload[0], content, *payload[2:]]}


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
