"""Storage faults by `waypost.testing`: every call of an action, one at a time."""

import errno
from collections.abc import Callable
from typing import Any

from waypost.testing import Fault, faulty

ERRNOS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT")}


def never() -> Fault:
    """A fault that no action reaches."""
    return Fault(op=None, call=10**9, action="error", errno=errno.EIO)


def at(call: int, action: str = "error", number: int = errno.EIO) -> Fault:
    """The fault at the `call`-th storage call of any kind, counted from 1."""
    return Fault(op=None, call=call, action=action, errno=number)


def calls_of(url: str, action: Callable[[Any], Any]) -> list[str]:
    """The storage calls that `action` makes when nothing fails."""
    place = faulty(url, never())
    action(place)
    return list(place.calls)
