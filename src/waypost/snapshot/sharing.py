"""Regions that several ranks want alike: each reads a share of them, and sends it to the others.

What is wanted by the same set of ranks is laid end to end and divided among them to the element,
the same way on each, so that no byte of it is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from waypost import limits
from waypost.comm import Exchange, Group
from waypost.core.overlap import Filling
from waypost.format import digests
from waypost.options import Settings
from waypost.snapshot.view import View, Wants
from waypost.state.restore import Region

_HOLD: Final = 1
"""Keeps a region's memory, which may be beside its target, until all ranks have got it."""


@dataclass(slots=True)
class _Wanted:
    """A region, and which of its elements each of the ranks that want it reads.

    Attributes:
        path: Of the piece.
        region: Where it goes.
        item_bytes: Of one element.
        readers: Ranks that want it, in order; only this one if it is not shared.
        bounds: Elements where the share of each reader begins, and the end.
        filling: Its memory.
    """

    path: str
    region: Region
    item_bytes: int
    readers: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    filling: Filling | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks get bytes of it from this one, or this one from them."""
        return len(self.readers) > 1 and self.region.target.nbytes > 0

    @property
    def unfinished(self) -> int:
        """Bytes to be filled; a shared region counts one more until the exchange is over."""
        return self.region.target.nbytes + (_HOLD if self.is_shared else 0)

    @property
    def text(self) -> str:
        """What it is, for comparison with other ranks.

        Boxes differ between ranks by right; from how the target is spread follows which.
        """
        size = self.region.target.nbytes if self.region.box is None else "box"
        return f"{self.path} {size} {self.region.spread}"


class Sharing:
    """The regions of one load.

    Args:
        view: The snapshot.
        targets: By path of the piece.
        group: The ranks.
        settings: For reading.
    """

    def __init__(
        self,
        view: View,
        targets: Mapping[str, Sequence[Region]],
        group: Group,
        settings: Settings,
    ) -> None:
        self._view = view
        self._group = group
        self._settings = settings
        self._is_shared = False
        self._wanted = [
            _Wanted(
                path=path,
                region=region,
                item_bytes=view.item_bytes(path),
                readers=self._readers(path, region),
            )
            for path, regions in targets.items()
            for region in regions
        ]

    def digest(self) -> str:
        """Returns a digest of what this rank wants, equal on ranks that want the same."""
        texts = sorted(wanted.text for wanted in self._wanted if len(wanted.readers) > 1)
        return digests.algorithm("xxh3-128").of("\n".join(texts).encode("utf-8", "surrogatepass"))

    @property
    def has_shared(self) -> bool:
        """Whether other ranks want something that this one wants."""
        return self._settings.share_reads and any(wanted.is_shared for wanted in self._wanted)

    def divide(self, *, is_shared: bool, settings: Settings) -> None:
        """Divides the regions among the ranks that want them.

        Args:
            is_shared: All ranks agree to share; otherwise each reads for itself.
            settings: For reading.
        """
        self._settings = settings
        self._is_shared = is_shared
        for wanted in self._wanted:
            if not is_shared:
                wanted.readers = (self._group.rank,)
        for readers, members in self._by_readers():
            total = sum(wanted.region.target.nbytes for wanted in members)
            cuts = [total * number // len(readers) for number in range(len(readers) + 1)]
            at = 0
            for wanted in members:
                nbytes = wanted.region.target.nbytes
                wanted.bounds = tuple(
                    max(0, min(nbytes, cut - at)) // wanted.item_bytes for cut in cuts
                )
                at += nbytes

    def read(self, *, verify: bool, advance: Callable[[int], None]) -> int:
        """Reads this rank's share; returns the bytes read.

        Args:
            verify: Check every chunk that is read.
            advance: Told of bytes read.
        """
        found: Wants = {}
        for wanted in self._wanted:
            wanted.filling = Filling(wanted.region.target, wanted.unfinished)
            index = wanted.readers.index(self._group.rank)
            part = wanted.bounds[index], wanted.bounds[index + 1]
            if part[0] < part[1]:
                self._view.wants(wanted.path, wanted.region, part, wanted.filling, found)
        return self._view.contents.read(found, self._settings, verify=verify, advance=advance)

    def exchange(self, name: str, advance: Callable[[int], None]) -> None:
        """Sends what this rank has read, and receives what others have; collective.

        Args:
            name: Of the exchange, as all ranks have agreed.
            advance: Told of bytes that were passed on.
        """
        if not self._is_shared:
            return
        groups = [(readers, members) for readers, members in self._by_readers() if len(readers) > 1]
        exchange = self._group.exchange(name, self._settings.timeout_s)
        for readers, members in groups:
            for index, owner in enumerate(readers):
                is_own = owner == self._group.rank
                _pass_on(exchange, members, readers, index, advance, is_own=is_own)
            for wanted in members:
                if wanted.filling is not None and wanted.is_shared:
                    wanted.filling.finish(_HOLD)

    def _readers(self, path: str, region: Region) -> tuple[int, ...]:
        """Returns the ranks that want what this one wants."""
        if self._view.is_own(path):
            return (self._group.rank,)
        return tuple(range(self._group.world_size)) if region.replicas is None else region.replicas

    def _by_readers(self) -> Iterator[tuple[tuple[int, ...], list[_Wanted]]]:
        groups: dict[tuple[int, ...], list[_Wanted]] = {}
        for wanted in sorted(self._wanted, key=lambda wanted: wanted.path):
            groups.setdefault(wanted.readers, []).append(wanted)
        yield from sorted(groups.items())


def _pass_on(
    exchange: Exchange,
    members: Sequence[_Wanted],
    readers: tuple[int, ...],
    index: int,
    advance: Callable[[int], None],
    *,
    is_own: bool,
) -> None:
    """Passes the share of one reader to the others, in messages of bounded size."""
    for message in _messages(members, index):
        advance(sum(stop - start for _, start, stop in message))
        if len(message) == 1:
            wanted, start, stop = message[0]
            views = [_view(wanted, start, stop)]
            data = views[0]
        else:
            views = [_view(*part) for part in message]
            data = memoryview(bytearray(sum(map(len, views))))
        if is_own:
            if len(views) > 1:
                data[:] = b"".join(views)
            for number, reader in enumerate(readers):
                if number != index:
                    exchange.send(data, reader)
            continue
        exchange.receive(data, readers[index])
        at = 0
        for view, (wanted, start, stop) in zip(views, message, strict=True):
            if len(views) > 1:
                view[:] = data[at : at + len(view)]
            at += len(view)
            if wanted.filling is not None:
                wanted.filling.finish(stop - start)


def _messages(members: Sequence[_Wanted], index: int) -> Iterator[list[tuple[_Wanted, int, int]]]:
    """Yields the byte ranges of one reader's share, as many at a time as one message takes."""
    message: list[tuple[_Wanted, int, int]] = []
    room = limits.EXCHANGE_BYTES
    for wanted in members:
        start = wanted.bounds[index] * wanted.item_bytes
        stop = wanted.bounds[index + 1] * wanted.item_bytes
        while start < stop:
            end = min(stop, start + room)
            message.append((wanted, start, end))
            room -= end - start
            start = end
            if not room:
                yield message
                message, room = [], limits.EXCHANGE_BYTES
    if message:
        yield message


def _view(wanted: _Wanted, start: int, stop: int) -> memoryview:
    if wanted.filling is None:
        raise AssertionError("an exchange before the read")
    return wanted.filling.view()[start:stop]
