"""A snapshot as one rank sees it: its entries, and from where their bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from waypost.core import overlap, read
from waypost.core.overlap import Filling
from waypost.errors import FormatError
from waypost.format import cuts, paths, shardings, shards, tensornodes, trees
from waypost.format.documents import Entry
from waypost.format.shardings import Box, Sharding, whole
from waypost.format.shards import Extent
from waypost.format.tensortypes import TensorType
from waypost.options import Settings
from waypost.snapshot.contents import Contents, PlacedFile, Stored
from waypost.state.restore import Region

Wants = dict[str, tuple[PlacedFile, list[read.Want]]]
"""What to read of each file, by its path."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the documents say of a piece.

    Attributes:
        type: Of the whole tensor; None for bytes that several views share.
        sharding: How it is spread; None when all ranks hold all of it.
        owner: The rank whose own it is, if it is one's own.
    """

    type: TensorType | None
    sharding: Sharding | None
    owner: int | None


class View:
    """What a rank sees of a snapshot.

    Args:
        contents: The snapshot.
        rank: Of those that saved it; None for what they share, and then what is per rank cannot be
            read.
    """

    def __init__(self, contents: Contents, rank: int | None) -> None:
        self.contents = contents
        self.rank = rank
        self._known: dict[str, _Known] = {}
        self._learned: set[str] = set()

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries, in the order of the state."""
        return self.contents.documents.entries_of(self.rank)

    def size(self, path: str) -> int:
        """Returns the bytes that are stored of the piece at ``path``, all parts together.

        Raises:
            FormatError: They are not what its type needs.
        """
        known = self._find(path)
        if self.contents.documents.world_size == 1 and known.type is not None:
            return known.type.nbytes
        extents = [extent for _, extent in self._parts(path, None)]
        if known.type is None and not extents:
            raise FormatError(f"{path}: no data file holds this leaf")
        shape = self._shape(known, extents)
        if not shards.are_all(extents, shape):
            raise FormatError(f"{path}: its stored parts do not make it up")
        return sum(extent.count for extent in extents) * self._item_bytes(known)

    def wants(
        self, path: str, region: Region, part: tuple[int, int], filling: Filling, found: Wants
    ) -> None:
        """Adds to ``found`` what has to be read for a part of a region.

        Args:
            path: Of the piece.
            region: A box of it, and the memory that it goes to.
            part: Elements of the box, in row-major order, to be read: first, and last plus one.
            filling: The region's memory.
            found: What to read of each file.

        Raises:
            FormatError: Not all elements are stored.
        """
        known = self._find(path)
        parts = self._parts(path, region.box)
        shape = self._shape(known, [extent for _, extent in parts])
        wanted = Extent(whole(shape) if region.box is None else region.box, *part)
        item_bytes = self._item_bytes(known)
        count = 0
        for stored, extent in parts:
            start = stored.item.start
            for want, nbytes in overlap.wants(extent, start, wanted, filling, item_bytes):
                found.setdefault(stored.file.path, (stored.file, []))[1].append(want)
                count += nbytes
        if count != wanted.count * item_bytes:
            raise FormatError(
                f"{path}: {wanted.count * item_bytes} bytes are wanted, the stored parts have "
                f"{count} of them"
            )

    def count(self, path: str, region: Region) -> int:
        """Returns the number of elements in a region."""
        known = self._find(path)
        return region.target.nbytes // self._item_bytes(known)

    def item_bytes(self, path: str) -> int:
        """Returns the bytes of one element of the piece at ``path``."""
        return self._item_bytes(self._find(path))

    def is_own(self, path: str) -> bool:
        """Tells whether the piece at ``path`` is one rank's own."""
        return self._find(path).owner is not None

    def read(
        self,
        targets: Mapping[str, Sequence[Region]],
        settings: Settings,
        *,
        verify: bool,
        advance: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Fills regions from the snapshot; returns the bytes read.

        Args:
            targets: By path of the piece.
            settings: Threads and segment size.
            verify: Check every chunk that is read.
            advance: Told of bytes read.

        Raises:
            CorruptionError: Stored bytes are not what was saved.
        """
        found: Wants = {}
        for path, regions in targets.items():
            for region in regions:
                filling = Filling(region.target, region.target.nbytes)
                if region.target.nbytes:
                    self.wants(path, region, (0, self.count(path, region)), filling, found)
        return self.contents.read(found, settings, verify=verify, advance=advance)

    def _find(self, path: str) -> _Known:
        entry = paths.entry_of(path)
        if entry not in self._learned:
            self._learn(entry)
        known = self._known.get(path)
        if known is None:
            leaf = self._known.get(paths.leaf_of(path))
            if leaf is None:
                self.contents.check_entries([entry])
                raise FormatError(f"{self.contents.location.url}: no data file holds {path}")
            known = _Known(None, leaf.sharding, leaf.owner)
        if known.owner == -1:
            raise ValueError(
                f"{path}: each of the {self.contents.documents.world_size} ranks has one of its "
                f"own; say rank=0 to {self.contents.documents.world_size - 1}"
            )
        return known

    def _learn(self, segment: str) -> None:
        """Notes type, sharding and owner of every piece of an entry."""
        self._learned.add(segment)
        rank = self.rank
        if rank is None:
            rank = 0 if self.contents.documents.world_size == 1 else -1
        own = [] if rank < 0 else list(self.contents.documents.index(rank).nodes)
        for name, entry in self.entries.items():
            if paths.segment(name) != segment:
                continue
            for leaf in trees.leaves(entry.tree, segment):
                if leaf.is_tensor:
                    is_own = entry.scope == "per_rank" or _is_below(leaf.path, own)
                    self._learn_leaf(leaf, rank if is_own else None)

    def _learn_leaf(self, leaf: trees.Leaf, owner: int | None) -> None:
        node = leaf.tensor_node
        text = tensornodes.described(node, leaf.path).get("sharding")
        sharding = None if text is None else shardings.parse(text)
        self._known[leaf.path] = _Known(None, sharding, owner)
        for piece, kind in tensornodes.pieces(node, leaf.path):
            self._known[piece] = _Known(kind, sharding, owner)

    def _parts(self, path: str, box: Box | None) -> list[tuple[Stored, Extent]]:
        """Returns what may hold any of a box of the piece at ``path``, or of all of it."""
        known = self._find(path)
        found: list[tuple[Stored, Extent]] = []
        for rank in self._ranks(path, known, box):
            for stored in self.contents.stored(path, rank):
                extent = stored.extent or shards.all_of(whole(stored.item.shape))
                if known.type is not None:
                    extent = shards.check_item(path, known.type, stored.item, stored.extent)
                found.append((stored, extent))
        return found

    def _ranks(self, path: str, known: _Known, box: Box | None) -> Sequence[int]:
        if known.owner is not None:
            return [known.owner]
        if self.contents.documents.world_size == 1:
            return [0]
        if known.sharding is None:
            return cuts.writers(self.contents.documents.structure.cuts, path)
        if known.type is None:
            return known.sharding.ranks
        shape = known.type.shape
        try:
            return known.sharding.holders(whole(shape) if box is None else box, shape)
        except (ValueError, LookupError) as error:
            raise FormatError(
                f"{path}: the sharding {known.sharding.text[:80]} is none of {known.type.text}"
            ) from error

    def _shape(self, known: _Known, extents: Sequence[Extent]) -> tuple[int, ...]:
        if known.type is not None:
            return known.type.shape
        if not extents:
            return (0,)
        return (max(stop for extent in extents for _, stop in extent.box),)

    def _item_bytes(self, known: _Known) -> int:
        return 1 if known.type is None else known.type.item_bytes


def _is_below(path: str, owners: Sequence[str]) -> bool:
    return any(path == owner or path.startswith(f"{owner}/") for owner in owners)
