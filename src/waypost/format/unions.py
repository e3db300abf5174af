"""Trees of one entry on several ranks: how they differ, and what they are together.

Ranks with other experts or other stages of a pipeline hold other leaves of one model. Rank 0 says
what it has; each other rank answers with what it has besides, what it lacks, and where the two
contradict each other; rank 0 puts it together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from waypost.format import jsontext, trees
from waypost.format.documents import Entry
from waypost.format.jsontext import Json


class Delta(msgspec.Struct, kw_only=True):
    """How one rank's entry differs from that of rank 0.

    Attributes:
        added: Nested: keys that are new with their nodes, and keys below which something is.
        lacking: Paths of leaves that this rank does not have.
        conflicts: Paths at which both have something else: rank 0's node and this rank's, as text.
        versions: Of the parts of a module, where they are others.
    """

    added: Any = None
    versions: dict[str, list[str]] = {}
    lacking: list[str] = []
    conflicts: list[tuple[str, str, str]] = []


def delta(leader: Entry, own: Entry, path: str) -> Delta:
    """Returns how ``own`` differs from ``leader``, entries of one name at ``path``."""
    found = Delta(lacking=[], conflicts=[])
    if leader.versions != own.versions:
        found.versions = own.versions
    if (leader.kind, leader.scope) != (own.kind, own.scope):
        found.conflicts.append((path, _kind_text(leader), _kind_text(own)))
        return found
    found.added = _compare(leader.tree, own.tree, path, found, leader.kind)
    return found


def merge(tree: Json, added: Any, path: str, conflicts: list[str]) -> Json:
    """Returns ``tree`` with what a rank has besides; notes paths at which that was there already.

    Args:
        tree: Of rank 0, maybe merged before.
        added: As :func:`delta` gave it.
        path: Where the tree stands.
        conflicts: Gets the paths of what differs from what another rank added.
    """
    if added is None:
        return tree
    if "names" in added:
        known = set(_names(tree))
        return [*_names(tree), *(name for name in added["names"] if name not in known)]
    pairs = {_text(key): (key, below, child) for key, below, child in _items(tree, path)}
    for key, below, child in added["new"]:
        text = _text(key)
        if text not in pairs:
            pairs[text] = key, below, child
        elif _text(pairs[text][2]) != _text(child):
            conflicts.append(below)
    for key, below, child in added["below"]:
        node = pairs[_text(key)][2]
        pairs[_text(key)] = key, below, merge(node, child, below, conflicts)
    return trees.with_items(tree, [(key, node) for key, _, node in pairs.values()])


def merged_versions(
    versions: dict[str, list[str]], more: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Returns the versions of the parts of a module that two ranks have together."""
    return {
        version: list(dict.fromkeys([*versions.get(version, []), *more.get(version, [])]))
        for version in {**versions, **more}
    }


def added_leaves(added: Any) -> Iterator[trees.Leaf]:
    """Yields the leaves that a rank has besides those of rank 0."""
    if added is None or "names" in added:
        return
    for _, below, node in added["new"]:
        yield from trees.leaves(node, below)
    for _, _, child in added["below"]:
        yield from added_leaves(child)


def _compare(leader: Json, own: Json, path: str, found: Delta, kind: str) -> Any:
    if leader is own:
        return None
    if kind == "optimizer" and _is_group_of_names(path):
        known = set(_names(leader))
        names = [name for name in _names(own) if name not in known]
        return {"names": names} if names else None
    if not _are_alike(leader, own):
        if _text(leader) == _text(own):
            return None  # by text: 1, 1.0 and True are equal to Python
        found.conflicts.append((path, _short(leader), _short(own)))
        return None
    theirs = {_text(key): (key, below, node) for key, below, node in _items(leader, path)}
    ours = {_text(key): (key, below, node) for key, below, node in _items(own, path)}
    is_ordered = _tag(leader) == "$odict" and kind != "module"
    if is_ordered and list(ours) != list(theirs) and set(ours) == set(theirs):
        found.conflicts.append((path, ", ".join(theirs)[:200], ", ".join(ours)[:200]))
        return None
    new = [item for text, item in ours.items() if text not in theirs]
    below = []
    for text, (key, at, node) in theirs.items():
        if text not in ours:
            found.lacking.extend(leaf.path for leaf in trees.leaves(node, at))
        else:
            child = _compare(node, ours[text][2], at, found, kind)
            if child is not None:
                below.append((key, at, child))
    return {"new": new, "below": below} if new or below else None


def _items(node: Json, path: str) -> Iterator[tuple[Any, str, Json]]:
    found = trees.children(node, path)
    return iter(()) if found is None else found


def _are_alike(leader: Json, own: Json) -> bool:
    """Tells whether two nodes are containers of one kind, whose items can be compared."""
    if isinstance(leader, list) and isinstance(own, list):
        return len(leader) == len(own)
    both = isinstance(leader, dict) and isinstance(own, dict)
    return both and _tag(leader) == _tag(own) and _tag(leader) in ("", "$dict", "$odict")


def _tag(node: Any) -> str:
    tag = next(iter(node), "") if isinstance(node, dict) else "-"
    return tag if isinstance(node, dict) and len(node) == 1 and tag.startswith("$") else ""


def _is_group_of_names(path: str) -> bool:
    pieces = path.split("/")
    return len(pieces) == 4 and pieces[1] == "param_groups" and pieces[3] == "params"


def _names(node: Any) -> list[Any]:
    return node if isinstance(node, list) else []


def _text(key: Any) -> str:
    return jsontext.dump(key).decode("utf-8", "surrogatepass")


def _short(node: Json) -> str:
    return _text(node)[:200]


def _kind_text(entry: Entry) -> str:
    return f"a {entry.kind} ({entry.scope})"
