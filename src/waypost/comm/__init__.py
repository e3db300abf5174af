"""Agreement between ranks. One process is a group of one, which agrees with itself."""

from __future__ import annotations

from typing import Any

from waypost.comm import distributed
from waypost.comm.agreement import Agreement, Subject, names_text
from waypost.comm.group import Channel, Exchange, Group, Solo

__all__ = ["Agreement", "Channel", "Exchange", "Group", "Solo", "Subject", "group_of", "names_text"]

ALONE = "self"
"""As ``process_group``: this process alone, also within a distributed job."""


def group_of(process_group: Any) -> Group:
    """Returns the group for what a caller passed as ``process_group``.

    Args:
        process_group: None for the default group of ``torch.distributed`` when one is initialised,
            else for this process alone; ``"self"`` for this process alone; a process group; or a
            group of :mod:`waypost.testing`.

    Raises:
        TypeError: None of these.
        ValueError: A process group that this process does not belong to.
    """
    if isinstance(process_group, str) and process_group == ALONE:
        return Solo()
    if all(hasattr(process_group, name) for name in ("ranks", "channel", "exchange")):
        group: Group = process_group
        return group
    if process_group is None and not distributed.is_running():
        return Solo()
    return distributed.group_for(process_group)
