"""Plain dictionaries and lists of a target: their tensors, and their update in place."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from waypost.format import jsontext, paths, values
from waypost.state.extensions import small_node


def tensors(container: Any, path: str) -> dict[str, torch.Tensor]:
    """Returns the tensors below a container by path, spelled as at save."""
    found: dict[str, torch.Tensor] = {}
    encoder = values.Encoder(small_node)
    _collect(container, path, encoder, found, frozenset())
    return found


def update(target: Any, value: Any, *, strict: bool) -> Any:
    """Gives ``target`` the content of ``value`` and returns it.

    Containers of the same type are updated in place, all the way down, so that whoever holds one
    sees the new content; everything else is replaced.

    Args:
        target: What is there.
        value: What was loaded.
        strict: Remove keys that ``value`` does not have.
    """
    if target is value or type(target) is not type(value):
        return value
    if isinstance(target, MutableMapping):
        if strict:
            for key in [key for key in target if key not in value]:
                del target[key]
        for key, item in value.items():
            target[key] = update(target[key], item, strict=strict) if key in target else item
        return target
    if isinstance(target, list):
        kept = len(target)
        target[:] = [
            update(target[number], item, strict=strict) if number < kept else item
            for number, item in enumerate(value)
        ]
        return target
    return value


def _collect(
    value: Any,
    path: str,
    encoder: values.Encoder,
    found: dict[str, torch.Tensor],
    above: frozenset[int],
) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
        return
    if id(value) in above:
        return
    above = above | {id(value)}
    for key, item in _members(value):
        _collect(item, _below(path, key, encoder), encoder, found, above)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns keys and items of whatever a state keeps as a container; numbers for sequences."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple, deque)):
        return ((_Number(number), item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return ()


class _Number(int):
    """A position in a sequence, which is spelled unlike an integer key."""


def _below(path: str, key: Any, encoder: values.Encoder) -> str:
    if type(key) is _Number:
        return f"{path}/{key}"
    if type(key) is str:
        return f"{path}/{paths.segment(key)}"
    text = jsontext.dump(encoder.node(key, f"{path}/~key")).decode("utf-8", "surrogatepass")
    return f"{path}/{paths.key_segment(text)}"
