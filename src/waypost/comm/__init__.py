"""Agreement between ranks. One process is a group of one, which agrees with itself."""

from waypost.comm.group import Group, Solo, group_of

__all__ = ["Group", "Solo", "group_of"]
