"""Who wrote what all ranks hold alike: where the share of each rank begins.

A cut is a path, a rank, and the byte of the tensor at that path where the rank's share begins.
Shares follow one another in the order of paths, so each ends where the next one begins.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TypeAlias

Cut: TypeAlias = tuple[str, int, int]


def writers(cuts: Sequence[Cut], path: str) -> tuple[int, ...]:
    """Returns the ranks that wrote a part of the tensor at ``path``, if it has any bytes."""
    first, last = _range(cuts, path)
    found = [rank for _, rank, _ in cuts[first:last]]
    begins_before = first == last or cuts[first][2] > 0
    if begins_before and first > 0:
        found.append(cuts[first - 1][1])
    return tuple(sorted(found))


def parts(cuts: Sequence[Cut], path: str) -> int:
    """Returns in how many parts the tensor at ``path`` is stored."""
    first, last = _range(cuts, path)
    return 1 + sum(1 for _, _, start in cuts[first:last] if start > 0)


def _range(cuts: Sequence[Cut], path: str) -> tuple[int, int]:
    """Returns the cuts in ``path``: first, and last plus one."""
    return (
        bisect.bisect_left(cuts, path, key=lambda cut: cut[0]),
        bisect.bisect_right(cuts, path, key=lambda cut: cut[0]),
    )
