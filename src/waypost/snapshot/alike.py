"""What ranks must hold alike, agreed before anything is written.

Structures are compared by one digest. Only when they differ does rank 0 show its own, and each
other rank says how it differs; what is only on some ranks then becomes a part of the whole, and
what contradicts is an error that names leaf and ranks. Contents that several ranks hold are
compared by digests of digests, and only where these differ leaf by leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from waypost import limits
from waypost.buffers import Source
from waypost.comm import Agreement, Group
from waypost.comm.failures import ranks_text
from waypost.core import workers
from waypost.errors import Difference, MismatchError
from waypost.format import documents, jsontext, paths, tensornodes, trees, unions
from waypost.format.digests import Algorithm
from waypost.format.documents import Entry
from waypost.format.jsontext import Json
from waypost.format.shardings import Sharding, alone, parse
from waypost.format.unions import Delta
from waypost.options import Settings
from waypost.state.describe import Description, Piece
from waypost.state.scopes import Scopes

_MIXED: Final = ("module", "optimizer")
"""Kinds of entries of which a rank may hold plain values, too, that others do not have."""

_BLOCK_BYTES: Final = 4 * limits.MIB
"""Memory through which tensors are digested that do not lie on the CPU in stored order."""

Holders = dict[str, list[int]]
"""Ranks that hold a leaf, for leaves that not all of them hold."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks save together.

    Attributes:
        entries: Those of all ranks, as far as they share them; complete on rank 0 only.
        pieces: What this rank holds, with how it is spread.
        added_tensors: On rank 0, tensors of each entry that only other ranks hold.
    """

    entries: dict[str, Entry]
    pieces: list[Piece]
    added_tensors: Counter[str]


class Comparison:
    """The rounds in which ranks compare what they hold.

    Args:
        call: The save.
        group: The ranks.
        scopes: What was said of leaves.
        algorithm: For digests.
        settings: Threads, and whether declared replicas are compared.
    """

    def __init__(
        self,
        call: Agreement,
        group: Group,
        scopes: Scopes,
        algorithm: Algorithm,
        settings: Settings,
    ) -> None:
        self._call = call
        self._group = group
        self._scopes = scopes
        self._algorithm = algorithm
        self._settings = settings
        self._entries: dict[str, Entry] = {}
        self._added_tensors: Counter[str] = Counter()
        self._differences = _Differences()

    def say(self, description: Description) -> dict[str, Any]:
        """Returns what a rank says of its own state."""
        self._entries = {
            name: entry for name, entry in description.entries.items() if entry.scope != "per_rank"
        }
        if self._group.world_size == 1:
            return {}
        return {
            "structure": self._algorithm.of(self._structure()),
            "compares": any(self._replicas(piece) for piece in description.pieces),
        }

    def judge(self, said: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Returns, on rank 0, what the ranks have to compare further."""
        if len(said) == 1:
            return {"structure": b"", "compares": False}
        is_equal = all(one["structure"] == said[0]["structure"] for one in said.values())
        return {
            "structure": b"" if is_equal else self._structure(),
            "compares": any(one["compares"] for one in said.values()),
        }

    def settle(self, description: Description, judged: Mapping[str, Any]) -> Agreed:
        """Returns what all ranks save together; collective.

        Raises:
            MismatchError: Ranks hold different things under one name; names leaves and ranks.
        """
        pieces = description.pieces
        if judged["structure"]:
            holders: Holders = self._call.share(
                "unite",
                lambda: self._deltas(judged["structure"]),
                lambda said: self._unite(said, is_last=not judged["compares"]),
            )
            pieces = [_spread(piece, holders) for piece in pieces]
        if judged["compares"]:
            groups = self._grouped(pieces)
            differing: list[str] = self._call.share(
                "compare", lambda: self._digests(groups), self._differing
            )
            if differing:
                self._call.share("differ", lambda: self._single(groups, differing), self._refuse)
        return Agreed(self._entries, pieces, self._added_tensors)

    def _structure(self) -> bytes:
        return documents.encode(documents.Structure(entries=self._entries))

    def _deltas(self, structure: bytes) -> bytes:
        """Returns how this rank's entries differ from those of rank 0, as text."""
        if self._group.rank == 0:
            return b"{}"
        leader = documents.decode_structure(structure, "the structure on rank 0").entries
        found: dict[str, Json] = {}
        for name, own in self._entries.items():
            delta = unions.delta(leader[name], own, paths.segment(name))
            delta.conflicts = [item for item in delta.conflicts if not self._may_differ(item)]
            found[name] = msgspec.to_builtins(delta)
        return jsontext.dump(found)

    def _may_differ(self, conflict: tuple[str, str, str]) -> bool:
        """Tells whether the caller said that a plain value is equal, and wants no comparison."""
        path, leader, own = conflict
        is_tensor = trees.TENSOR in leader or trees.TENSOR in own
        is_checked = self._settings.check_replicas
        return not is_tensor and not is_checked and self._scopes.is_replicated(path)

    def _unite(self, said: Mapping[int, bytes], *, is_last: bool) -> Holders:
        """Puts the entries of all ranks together; returns who holds what not all do."""
        ranks = range(len(said))
        differences = self._differences
        holders: dict[str, set[int]] = {}
        deltas = {
            rank: msgspec.convert(
                jsontext.parse(text, f"rank {rank}", bytes_max=limits.INDEX_BYTES_MAX),
                dict[str, Delta],
            )
            for rank, text in said.items()
        }
        for name, entry in self._entries.items():
            path = paths.segment(name)
            tree, versions = entry.tree, entry.versions
            for rank in ranks[1:]:
                delta = deltas[rank].get(name, Delta())
                conflicts: list[str] = []
                tree = unions.merge(tree, delta.added, path, conflicts)
                versions = unions.merged_versions(versions, delta.versions)
                for at in conflicts:
                    differences.add(at, "another rank has something else", rank, "besides")
                for at, leader, own in delta.conflicts:
                    differences.add(at, f"rank 0: {leader}", rank, own)
                for leaf in unions.added_leaves(delta.added):
                    holders.setdefault(leaf.path, set()).add(rank)
                for at in delta.lacking:
                    holders.setdefault(at, set(ranks)).discard(rank)
            found = {leaf.path: leaf for leaf in trees.leaves(tree, path) if leaf.path in holders}
            for leaf in found.values():
                if not _may_be_partial(entry, leaf) or not _may_be_restricted(leaf, holders):
                    owners = tuple(sorted(holders[leaf.path]))
                    differences.add(leaf.path, f"only on {ranks_text(owners)}")
            before = sum(leaf.is_tensor for leaf in trees.leaves(entry.tree, path))
            self._added_tensors[name] = -before + sum(
                leaf.is_tensor for leaf in trees.leaves(tree, path)
            )
            self._entries[name] = msgspec.structs.replace(
                entry, tree=_marked(tree, path, holders), versions=versions
            )
        if is_last:
            differences.check()
        return {path: sorted(owners) for path, owners in holders.items()}

    def _replicas(self, piece: Piece) -> tuple[int, ...]:
        """Returns the ranks with which this one compares its content of a piece; none if none."""
        is_trusted = piece.is_declared and not self._settings.check_replicas
        if piece.is_own or is_trusted or not piece.type.nbytes:
            return ()
        if piece.sharding is None:
            return tuple(range(self._group.world_size))
        rank = self._group.rank
        found = piece.sharding.replicas(rank) if piece.sharding.includes(rank) else ()
        return found if len(found) > 1 else ()

    def _grouped(self, pieces: list[Piece]) -> dict[str, list[Piece]]:
        groups: dict[str, list[Piece]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.path):
            replicas = self._replicas(piece)
            if replicas:
                groups.setdefault(",".join(map(str, replicas)), []).append(piece)
        return groups

    def _digests(self, groups: Mapping[str, list[Piece]]) -> dict[str, bytes]:
        """Returns one digest for all that this rank shares with each set of ranks."""
        singles = self._single(groups, list(groups))
        return {
            key: self._algorithm.over([*map(str.encode, found), *found.values()])
            for key, found in singles.items()
        }

    def _single(
        self, groups: Mapping[str, list[Piece]], wanted: list[str]
    ) -> dict[str, dict[str, bytes]]:
        """Returns a digest for each piece that this rank shares with some sets of ranks."""
        found: dict[int, bytes] = {}
        pieces = [piece for key in wanted for piece in groups.get(key, ())]

        def digest(piece: Piece) -> None:
            parts = [part for _, source in piece.held for part in self._blocks(source)]
            found[id(piece)] = self._algorithm.over(parts)
            self._call.progress()

        workers.run(pieces, lambda: digest, threads=self._settings.workers)
        return {
            key: {piece.path: found[id(piece)] for piece in groups[key]}
            for key in wanted
            if key in groups
        }

    def _blocks(self, source: Source) -> Iterator[bytes]:
        """Yields the digest of each block of a source."""
        view = source.view()
        if view is None:
            memory = memoryview(bytearray(min(_BLOCK_BYTES, source.nbytes)))
        for start in range(0, source.nbytes, _BLOCK_BYTES):
            stop = min(start + _BLOCK_BYTES, source.nbytes)
            if view is not None:
                yield self._algorithm.one_shot(view[start:stop])
            else:
                source.copy(start, memory[: stop - start])
                yield self._algorithm.one_shot(memory[: stop - start])

    def _differing(self, said: Mapping[int, Mapping[str, bytes]]) -> list[str]:
        """Returns, on rank 0, the sets of ranks whose members do not hold the same."""
        first: dict[str, bytes] = {}
        differing: set[str] = set()
        for digests in said.values():
            for key, digest in digests.items():
                if first.setdefault(key, digest) != digest:
                    differing.add(key)
        if not differing:
            self._differences.check()
        return sorted(differing)

    def _refuse(self, said: Mapping[int, Mapping[str, Mapping[str, bytes]]]) -> None:
        """Raises, on rank 0, the error that names leaves and ranks."""
        first: dict[tuple[str, str], tuple[int, bytes]] = {}
        known = self._differences.paths
        for rank, groups in said.items():
            for key, digests in groups.items():
                for path, digest in digests.items():
                    owner, expected = first.setdefault((key, path), (rank, digest))
                    leaf = paths.leaf_of(path)
                    if digest != expected and leaf not in known:
                        self._differences.add(leaf, f"rank {owner}: one content", rank, "another")
        self._differences.check()


class _Differences:
    """Differences between ranks, those of one kind together."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[int]] = {}

    def add(self, path: str, expected: str, rank: int | None = None, actual: str = "") -> None:
        ranks = self._found.setdefault((path, expected, actual), [])
        if rank is not None:
            ranks.append(rank)

    @property
    def paths(self) -> set[str]:
        """Where something was found."""
        return {path for path, _, _ in self._found}

    def check(self) -> None:
        """Raises what was found, if anything was."""
        if not self._found:
            return
        raise MismatchError(
            "ranks hold different things under one name; nothing was saved. What they share must "
            "be equal bit for bit; what each has for itself is declared by per_rank=[...]",
            tuple(
                Difference(
                    kind="ranks",
                    path=path,
                    expected=expected,
                    actual=f"{ranks_text(tuple(ranks))}: {actual}" if ranks else "",
                )
                for (path, expected, actual), ranks in sorted(self._found.items())
            ),
        )


def _may_be_partial(entry: Entry, leaf: trees.Leaf) -> bool:
    """Tells whether a leaf may be on some ranks only."""
    is_tensor = leaf.tag == trees.TENSOR and not leaf.is_inner
    if leaf.tag == trees.PER_RANK:
        return True
    return entry.kind in _MIXED or (entry.kind == "value" and is_tensor)


def _may_be_restricted(leaf: trees.Leaf, holders: Mapping[str, set[int]]) -> bool:
    """Tells whether the ranks that hold a sharded leaf hold all of it between them."""
    if not leaf.is_tensor:
        return True
    text = tensornodes.described(leaf.tensor_node, leaf.path).get("sharding")
    return text is None or parse(text).restricted(frozenset(holders[leaf.path])) is not None


def _spread(piece: Piece, holders: Holders) -> Piece:
    owners = holders.get(paths.leaf_of(piece.path))
    if owners is None:
        return piece
    if piece.sharding is None:
        return replace(piece, sharding=alone(owners))
    restricted = piece.sharding.restricted(frozenset(owners))
    return piece if restricted is None else replace(piece, sharding=restricted)


def _marked(tree: Json, path: str, holders: Mapping[str, set[int]]) -> Json:
    """Returns the tree in which tensors that not all ranks hold say who does."""

    def mark(node: Json, at: str) -> Json:
        if at not in holders or not isinstance(node, dict) or trees.TENSOR not in node:
            return node
        described = tensornodes.described(node[trees.TENSOR], at)
        sharding: Sharding | None = alone(sorted(holders[at]))
        if "sharding" in described:
            sharding = parse(described["sharding"]).restricted(frozenset(holders[at]))
        if sharding is None:
            return node
        return {trees.TENSOR: {**described, "sharding": sharding.text}}

    return trees.changed(tree, path, mark)
