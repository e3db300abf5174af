"""Classes by name: found among modules that are already imported, never imported, never run.

A snapshot may name a dataclass, a namedtuple or an Enum. Restoring one sets its fields without
calling its constructor, so that a hostile snapshot cannot make code run by naming a class.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from waypost.errors import FormatError, UnsupportedError

_Object = TypeVar("_Object")
_Plain = TypeVar("_Plain")


@dataclass(frozen=True, slots=True)
class Registered:
    """How objects of one class become plain values and back."""

    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}
_known: dict[str, type] = {}


def register_value(
    cls: type[_Object],
    *,
    name: str,
    encode: Callable[[_Object], _Plain],
    decode: Callable[[_Plain], _Object],
) -> None:
    """Makes objects of exactly ``cls`` storable, in this process.

    Args:
        cls: The class.
        name: What snapshots call it; must be registered under the same name where they are read.
        encode: Returns a value of the documented set for an object.
        decode: Returns the object for that value.

    Raises:
        ValueError: The name is taken by another class.
    """
    taken = _by_name.get(name)
    if taken is not None and taken.cls is not cls:
        raise ValueError(f"{name!r} is registered for {name_of(taken.cls)} already")
    _by_class[cls] = _by_name[name] = Registered(cls, name, encode, decode)


def register_class(cls: type) -> type:
    """Allows a dataclass, namedtuple, Enum or tensor subclass that is not importable by name.

    Usable as a decorator. Returns ``cls``.
    """
    _known[name_of(cls)] = cls
    return cls


def registered(cls: type) -> Registered | None:
    """Returns how ``cls`` was registered, or None."""
    return _by_class.get(cls)


def by_registered_name(name: str, path: str) -> Registered:
    """Returns the class registered under ``name``.

    Raises:
        UnsupportedError: Nothing is registered under it in this process.
    """
    if not isinstance(name, str):
        raise FormatError(f"{path}: the name of a value type must be text")
    found = _by_name.get(name)
    if found is None:
        raise UnsupportedError(
            f"{path}: needs the value type {str(name)[:80]!r}; call waypost.register_value for it "
            f"first",
            path=path,
        )
    return found


def name_of(cls: type) -> str:
    """Returns ``module:qualified.name``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find(name: object, path: str) -> type:
    """Returns the class called ``name`` without importing anything.

    Raises:
        UnsupportedError: Its module is not imported, or has no such class.
    """
    found = lookup(name)
    if found is None:
        raise UnsupportedError(
            f"{path}: needs the class {str(name)[:120]!r}; import its module first, or call "
            f"waypost.register_class",
            path=path,
        )
    return found


def lookup(name: object) -> type | None:
    """Returns the class called ``name`` if it is registered or its module is imported."""
    if not isinstance(name, str):
        return None
    if name in _known:
        return _known[name]
    module_name, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for piece in qualified.split("."):
        found = vars(found).get(piece) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def check_reachable(cls: type, path: str) -> None:
    """Makes sure that ``cls`` can be found by its name again.

    Raises:
        UnsupportedError: It cannot, because it is local to a function or shadowed.
    """
    if lookup(name_of(cls)) is not cls:
        raise UnsupportedError(
            f"{path}: the class {name_of(cls)} cannot be found again by its name; define it at the "
            f"top of a module, or call waypost.register_class",
            path=path,
        )


def members(value: Any, path: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the tag and the fields of a namedtuple or dataclass, or None for other objects.

    Raises:
        UnsupportedError: The object has attributes that are not fields.
    """
    cls = type(value)
    if isinstance(value, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        check_reachable(cls, path)
        return "$namedtuple", dict(zip(cls._fields, value, strict=True))
    if not dataclasses.is_dataclass(value) or not _is_plain(cls):
        return None
    check_reachable(cls, path)
    names = [field.name for field in dataclasses.fields(value)]
    extra = set(getattr(value, "__dict__", {})) - set(names)
    if extra:
        raise UnsupportedError(
            f"{path}: the dataclass {name_of(cls)} has attributes that are not fields: "
            f"{', '.join(sorted(extra))}",
            path=path,
        )
    absent = [name for name in names if not hasattr(value, name)]
    if absent:
        raise UnsupportedError(
            f"{path}: the dataclass {name_of(cls)} has fields without a value: {', '.join(absent)}",
            path=path,
        )
    return "$dataclass", {name: getattr(value, name) for name in names}


def make_namedtuple(name: object, fields: Mapping[str, Any], path: str) -> Any:
    """Returns a namedtuple of class ``name`` with ``fields``, without calling its constructor."""
    cls = find(name, path)
    expected = getattr(cls, "_fields", None)
    if not issubclass(cls, tuple) or not isinstance(expected, tuple):
        raise FormatError(f"{path}: {name} is not a namedtuple")
    _check_fields(name, set(expected), set(fields), path)
    return tuple.__new__(cls, [fields[field] for field in expected])


def make_dataclass(name: object, fields: Mapping[str, Any], path: str) -> Any:
    """Returns a dataclass object of class ``name`` with ``fields``, without calling its code."""
    cls = find(name, path)
    if not dataclasses.is_dataclass(cls) or not _is_plain(cls):
        raise FormatError(f"{path}: {name} is not a plain dataclass")
    _check_fields(name, {field.name for field in dataclasses.fields(cls)}, set(fields), path)
    made = object.__new__(cls)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def check_tree(node: Any, path: str) -> None:
    """Makes sure that every class that a tree names is here, with the fields that it had.

    Raises:
        UnsupportedError: One is not; names it.
    """
    if isinstance(node, list):
        for item in node:
            check_tree(item, path)
    elif isinstance(node, dict):
        for tag, payload in node.items():
            if tag in _CLASS_TAGS and len(node) == 1:
                _check_class(tag, payload, path)
            check_tree(payload, path)


_CLASS_TAGS = ("$enum", "$namedtuple", "$dataclass", "$registered")


def _check_class(tag: str, payload: Any, path: str) -> None:
    if not isinstance(payload, list) or len(payload) != 2:
        raise FormatError(f"{path}: bad value node {tag}")
    name, members = payload
    if tag == "$registered":
        by_registered_name(name, path)
        return
    cls = find(name, path)
    if tag == "$namedtuple" and isinstance(members, dict):
        _check_fields(name, set(getattr(cls, "_fields", ())), set(members), path)
    if tag == "$dataclass" and isinstance(members, dict) and dataclasses.is_dataclass(cls):
        _check_fields(name, {field.name for field in dataclasses.fields(cls)}, set(members), path)


def _check_fields(name: object, expected: set[str], actual: set[str], path: str) -> None:
    if not actual <= expected or expected - actual:
        raise UnsupportedError(
            f"{path}: the class {name} has the fields {sorted(expected)}, the snapshot holds "
            f"{sorted(actual)}",
            path=path,
        )


def _is_plain(cls: type) -> bool:
    """Tells whether an object is made of its fields alone, with no builtin base under it."""
    return all(base is object or base.__module__ != "builtins" for base in cls.__mro__)
