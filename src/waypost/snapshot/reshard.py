"""Entries that each rank has for itself, put together by functions for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from waypost.comm import Group
from waypost.format import paths
from waypost.options import Settings
from waypost.snapshot.contents import Contents
from waypost.snapshot.view import View
from waypost.state import containers
from waypost.state.describe import has_state, is_last
from waypost.state.restore import Restorer

Reshard: TypeAlias = Mapping[str, Callable[[list[Any], int, int], Any]]
"""Entry name to a function of all saved states, this rank, and the number of ranks that load."""


class Resharded:
    """The entries of one load that functions of the caller's put together.

    Args:
        contents: The snapshot.
        into: The target.
        functions: By entry name.
        settings: For reading.

    Raises:
        ValueError: A function for an entry that the snapshot or the target does not have.
    """

    def __init__(
        self,
        contents: Contents,
        into: MutableMapping[str, object],
        functions: Reshard,
        settings: Settings,
    ) -> None:
        self._contents = contents
        self._into = into
        self._functions = functions
        self._settings = settings
        self._states: dict[str, Any] = {}
        entries = contents.documents.entries_of(None)
        for name in functions:
            if name not in entries or name not in into:
                where = "target" if name in entries else "snapshot"
                raise ValueError(f"reshard: the {where} has no entry {name!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The entries."""
        return tuple(self._functions)

    def read(self, group: Group) -> None:
        """Reads the states of all ranks that saved, and calls the functions."""
        for name, function in self._functions.items():
            states = [
                self._state(name, rank) for rank in range(self._contents.documents.world_size)
            ]
            self._states[name] = function(states, group.rank, group.world_size)

    def place(self) -> None:
        """Hands the states to the target; random streams last."""
        for name in sorted(self._states, key=lambda name: is_last(self._into[name])):
            target: Any = self._into[name]
            state = self._states[name]
            if has_state(target):
                target.load_state_dict(state)
            else:
                self._into[name] = containers.update(target, state, strict=True)

    def _state(self, name: str, rank: int) -> Any:
        view = View(self._contents, rank)
        restorer = Restorer(view.entries, view.size, allow_pickle=self._settings.allow_pickle)
        path = paths.segment(name)
        tree = view.entries[name].tree
        restorer.need(tree, path)
        view.read(restorer.targets, self._settings, verify=True)
        return restorer.value(tree, path)
