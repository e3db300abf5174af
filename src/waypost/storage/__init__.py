"""Places that hold bytes: a local file system, memory, and later object stores.

A storage knows nothing of snapshots. It offers data files that are written at positions, small
files that appear all at once, and listings; every failure is one of the library's own errors.
"""

from waypost.storage.base import Location, Name, ReadFile, Storage, WriteFile
from waypost.storage.local import LocalStorage
from waypost.storage.memory import MemoryStorage
from waypost.storage.urls import resolve

__all__ = [
    "LocalStorage",
    "Location",
    "MemoryStorage",
    "Name",
    "ReadFile",
    "Storage",
    "WriteFile",
    "resolve",
]
