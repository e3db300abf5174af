"""URLs and paths, turned into locations."""

from __future__ import annotations

import os
import re
import threading
from typing import TypeAlias
from urllib.parse import unquote

from waypost.errors import UnsupportedError
from waypost.storage.base import Location
from waypost.storage.local import LocalStorage
from waypost.storage.memory import MemoryStorage

Url: TypeAlias = str | os.PathLike[str] | Location

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)
_memory: dict[str, MemoryStorage] = {}
_guard = threading.Lock()


def resolve(url: Url) -> Location:
    """Returns the location that ``url`` names; nothing is opened or made.

    Args:
        url: A path (``~`` is expanded), ``file:///path``, ``memory://name/path``, or a location.

    Raises:
        ValueError: Empty, or with a NUL character.
        UnsupportedError: A scheme that is not supported.
    """
    if isinstance(url, Location):
        return url
    text = os.fspath(url)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or "\0" in text:
        raise ValueError(f"not a path or URL: {text!r}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return Location(LocalStorage(os.path.expanduser(text)))
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise ValueError(f"file URL with a host or without an absolute path: {text!r}")
        return Location(LocalStorage(unquote("/" + path)))
    if scheme == "memory":
        name, _, path = rest.partition("/")
        with _guard:
            storage = _memory.setdefault(name, MemoryStorage(name))
        return Location(storage, path.strip("/"))
    raise UnsupportedError(
        f"{text!r}: no storage for the scheme {scheme!r}; there are paths, file:// and memory://"
    )
