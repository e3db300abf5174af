"""Who writes what: bytes that several ranks hold are divided among them, each written once.

Pure, and the same on every rank: nothing is exchanged. All that a set of ranks holds in common is
laid end to end, by path, and cut into as many shares as there are ranks, at multiples of a chunk;
so each is within one chunk of an equal share, however large or small the single tensors are.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from waypost import limits
from waypost.format.cuts import Cut


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes that a rank holds, and that one rank has to write.

    Attributes:
        path: What they belong to.
        nbytes: How many.
        item_bytes: Of one element, which stays in one piece.
        replicas: The ranks that hold the same, in order.
    """

    path: str
    nbytes: int
    item_bytes: int
    replicas: tuple[int, ...]


def shares(claims: Sequence[Claim], rank: int) -> list[tuple[int, int]]:
    """Returns, for each claim, the bytes that ``rank`` writes: first, and last plus one."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, claim in enumerate(claims):
        groups.setdefault(claim.replicas, []).append(number)
    found = [(0, 0)] * len(claims)
    for replicas, numbers in groups.items():
        if len(replicas) == 1:
            for number in numbers:
                found[number] = (0, claims[number].nbytes)
            continue
        numbers.sort(key=lambda number: claims[number].path)
        total = sum(claims[number].nbytes for number in numbers)
        start, stop = bounds(total, replicas.index(rank), len(replicas))
        at = 0
        for number in numbers:
            claim = claims[number]
            found[number] = _within(claim, start - at, stop - at)
            at += claim.nbytes
    return found


def bounds(total: int, index: int, count: int) -> tuple[int, int]:
    """Returns share ``index`` of ``count`` of ``total`` bytes: first, and last plus one."""
    return _cut(total, index, count), _cut(total, index + 1, count)


def _cut(total: int, index: int, count: int) -> int:
    """Returns the multiple of a chunk that is nearest to where share ``index`` should begin."""
    if index == count or (index and total <= limits.CHUNK_BYTES):
        return total
    nearest = (2 * total * index + count * limits.CHUNK_BYTES) // (2 * count * limits.CHUNK_BYTES)
    return min(total, nearest * limits.CHUNK_BYTES)


def cuts(claims: Sequence[Claim], world_size: int) -> list[Cut]:
    """Returns where the shares of all ranks begin, in order.

    Args:
        claims: Of what all ranks hold alike.
        world_size: How many ranks there are.
    """
    ordered = sorted(claims, key=lambda claim: claim.path)
    ends: list[int] = []
    total = 0
    for claim in ordered:
        total += claim.nbytes
        ends.append(total)
    found: list[Cut] = []
    for rank in range(world_size):
        start, stop = bounds(total, rank, world_size)
        if start < stop:
            number = bisect.bisect_right(ends, start)
            claim = ordered[number]
            at = start - (ends[number] - claim.nbytes)
            found.append((claim.path, rank, at - at % claim.item_bytes))
    return found


def _within(claim: Claim, start: int, stop: int) -> tuple[int, int]:
    """Returns the part of a claim between two places, at whole elements."""
    if not claim.nbytes:
        return 0, 0
    first, last = max(0, min(start, claim.nbytes)), max(0, min(stop, claim.nbytes))
    return first - first % claim.item_bytes, last - last % claim.item_bytes
