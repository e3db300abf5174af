"""A deep comparison that accepts only the same types and the same bits."""

import collections
import dataclasses
import datetime
import decimal
import enum
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import waypost
from _kit.tensors import assert_same_tensor


def _same_mapping(actual: Any, expected: Any, at: str) -> None:
    assert len(actual) == len(expected), (at, list(actual), list(expected))
    pairs = zip(actual.items(), expected.items(), strict=True)
    for (key, value), (wanted_key, wanted) in pairs:
        assert_same(key, wanted_key, f"{at} key {wanted_key!r}")
        assert_same(value, wanted, f"{at}[{wanted_key!r}]")
    if isinstance(expected, collections.defaultdict):
        assert actual.default_factory is expected.default_factory, at


def _same_sequence(actual: Any, expected: Any, at: str) -> None:
    assert len(actual) == len(expected), at
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_same(ours, theirs, f"{at}[{index}]")
    if isinstance(expected, collections.deque):
        assert actual.maxlen == expected.maxlen, at


def _order(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)


def _same_generator(actual: Any, expected: Any, at: str) -> None:
    if isinstance(expected, torch.Generator):
        assert torch.equal(actual.get_state(), expected.get_state()), at
    elif isinstance(expected, random.Random):
        assert actual.getstate() == expected.getstate(), at
    elif isinstance(expected, np.random.Generator):
        assert type(actual.bit_generator) is type(expected.bit_generator), at
        assert_same(actual.bit_generator.state, expected.bit_generator.state, at)
    else:
        assert_same(actual.get_state(), expected.get_state(), at)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def assert_same(actual: Any, expected: Any, at: str = "value") -> None:
    """Fails unless `actual` has the type, structure and bits of `expected`, at every depth."""
    assert type(actual) is type(expected), (at, type(actual), type(expected))
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(actual, expected, at)
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype, (at, actual.dtype, expected.dtype)
        assert actual.shape == expected.shape, at
        assert actual.tobytes() == expected.tobytes(), at
    elif isinstance(expected, np.generic):
        assert actual.dtype == expected.dtype, at
        assert actual.tobytes() == expected.tobytes(), at
    elif isinstance(expected, GENERATORS):
        _same_generator(actual, expected, at)
    elif isinstance(expected, enum.Enum):
        assert actual is expected, at
    elif isinstance(expected, float):
        assert struct.pack("<d", actual) == struct.pack("<d", expected), (at, actual, expected)
    elif isinstance(expected, complex):
        parts = (actual.real, actual.imag), (expected.real, expected.imag)
        assert struct.pack("<dd", *parts[0]) == struct.pack("<dd", *parts[1]), at
    elif isinstance(expected, dict):
        _same_mapping(actual, expected, at)
    elif isinstance(expected, (list, tuple, collections.deque)):
        _same_sequence(actual, expected, at)
    elif isinstance(expected, (set, frozenset)):
        _same_sequence(sorted(actual, key=_order), sorted(expected, key=_order), at)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            name = field.name
            assert_same(getattr(actual, name), getattr(expected, name), f"{at}.{name}")
    elif isinstance(expected, decimal.Decimal):
        assert actual.as_tuple() == expected.as_tuple(), (at, actual, expected)
    elif isinstance(expected, (datetime.datetime, datetime.time)):
        assert actual == expected and repr(actual) == repr(expected), (at, actual, expected)
        assert actual.fold == expected.fold, at
    else:
        assert actual == expected, (at, actual, expected)
        assert repr(actual) == repr(expected), (at, actual, expected)


def refusal(action: Callable[[], Any]) -> waypost.UnsupportedError | None:
    """The UnsupportedError of the action, or None when it was done."""
    try:
        action()
    except waypost.UnsupportedError as error:
        return error
    return None
