"""The group of ranks that save and load together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from waypost.errors import UnsupportedError


class Group(Protocol):
    """Who takes part in a save or load.

    Attributes:
        rank: This process, from 0.
        world_size: How many there are.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes take part."""
        ...


@dataclass(frozen=True, slots=True)
class Solo:
    """A process on its own."""

    rank: int = 0
    world_size: int = 1


def group_of(process_group: object) -> Group:
    """Returns the group for what a caller passed as ``process_group``.

    Raises:
        UnsupportedError: Several ranks, which this version does not coordinate yet.
    """
    if process_group is None:
        return Solo()
    raise UnsupportedError("process_group: this version saves from one process only")
