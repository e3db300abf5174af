"""Plain values: the documented set returns type-exactly, everything else is refused by name."""

import collections
import dataclasses
import pathlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waypost
from _kit import PLACES, assert_same, new_place, refusal, tree_of
from _kit.values import documented_values, innermost, nested

VALUES = documented_values()


@pytest.mark.parametrize("place", PLACES)
def test_the_documented_set_returns_in_one_entry(place: str, tmp_path: Path) -> None:
    """All kinds of values side by side return with their types and bits."""
    url = new_place(place, tmp_path)
    made = documented_values()
    waypost.save(url, {"values": made})
    assert_same(waypost.open(url).state_dict("values"), made)


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_returns_five_containers_deep(kind: str, tmp_path: Path) -> None:
    """Depth changes nothing: the value and each container around it return type-exactly."""
    made = nested(documented_values()[kind])
    url = new_place("memory", tmp_path)
    waypost.save(url, {"values": made})
    restored = waypost.open(url).state_dict("values")
    assert_same(innermost(restored), innermost(made))
    assert_same(restored, made)


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_is_an_entry_of_its_own(kind: str, tmp_path: Path) -> None:
    """A plain value as an entry: `load` puts the saved one in its place."""
    made = documented_values()[kind]
    url = new_place("memory", tmp_path)
    waypost.save(url, {"entry": made})
    assert_same(waypost.open(url).state_dict("entry"), made)


def test_restored_generators_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    """A generator's next draws after a restore are the draws that were to come."""
    made = documented_values()
    url = new_place("memory", tmp_path)
    waypost.save(url, {"values": made})
    restored = waypost.open(url).state_dict("values")
    assert_same(
        torch.rand(5, generator=restored["torch_generator"]),
        torch.rand(5, generator=made["torch_generator"]),
    )
    for name in ("numpy_generator", "numpy_philox", "numpy_legacy"):
        assert_same(restored[name].normal(size=5), made[name].normal(size=5), name)
    ours, theirs = restored["python_random"], made["python_random"]
    assert [ours.gauss(0, 1) for _ in range(5)] == [theirs.gauss(0, 1) for _ in range(5)]


def test_load_replaces_plain_values_and_keeps_containers(tmp_path: Path) -> None:
    """Containers are updated in place; the plain values in them become the saved ones."""
    url = new_place("memory", tmp_path)
    waypost.save(url, {"loop": {"epoch": 7, "log": [{"loss": 0.5}], "name": "a"}, "best": 0.25})
    loop: dict[str, Any] = {"epoch": 0, "log": [], "name": "b"}
    into: dict[str, Any] = {"loop": loop, "best": None}
    waypost.load(url, into)
    assert into["loop"] is loop
    assert_same(into, {"loop": {"epoch": 7, "log": [{"loss": 0.5}], "name": "a"}, "best": 0.25})


def test_a_later_change_of_a_value_does_not_reach_the_snapshot(tmp_path: Path) -> None:
    """What was saved is a copy, on every storage."""
    for place in PLACES:
        log, array, tensor = [1], np.zeros(3), torch.zeros(3)
        url = new_place(place, tmp_path)
        waypost.save(url, {"x": {"log": log, "array": array, "tensor": tensor}})
        log.append(2)
        array[:] = 1
        tensor.fill_(1)
        restored = waypost.open(url).state_dict("x")
        assert_same(restored, {"log": [1], "array": np.zeros(3), "tensor": torch.zeros(3)})


class Unknown:
    """A class that nobody told Waypost about."""


class Registered:
    """A class that a test registers."""

    def __init__(self, number: int) -> None:
        self.number = number


def _local_dataclass() -> Any:
    @dataclasses.dataclass
    class Local:
        number: int

    return Local(3)


def _cycle() -> Any:
    made: list[Any] = []
    made.append({"again": made})
    return made


REFUSED: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 1,
    "function": lambda: _cycle,
    "builtin": lambda: print,
    "class": lambda: Unknown,
    "module": lambda: pathlib,
    "lock": threading.Lock,
    "generator": lambda: (number for number in range(3)),
    "unknown": Unknown,
    "local_dataclass": _local_dataclass,
    "object_array": lambda: np.array([1, "a", None], dtype=object),
    "object_field": lambda: np.array([(1, None)], dtype=[("a", "i4"), ("b", object)]),
    "defaultdict_lambda": lambda: collections.defaultdict(lambda: 3),
    "meta_tensor": lambda: torch.empty(3, device="meta"),
    "cycle": _cycle,
    "str_subclass": lambda: type("Text", (str,), {})("x"),
    "dict_subclass": lambda: type("Mapping", (dict,), {})(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_return_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Refused at save with the leaf's path, before anything is written."""
    url = new_place("disk", tmp_path)
    before = tree_of(tmp_path)
    state = {"good": {"a": torch.ones(2)}, "extra": {"fine": 1, "inner": [0, REFUSED[kind]()]}}
    with pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(url, state)
    assert isinstance(caught.value, TypeError)
    assert caught.value.path.startswith("extra/inner/1")
    assert "extra/inner/1" in str(caught.value)
    assert tree_of(tmp_path) == before


def test_an_open_file_is_refused_by_name(tmp_path: Path) -> None:
    """A file handle means nothing in another process."""
    with (tmp_path / "file").open("w") as stream, pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(new_place("memory", tmp_path), {"x": {"log": stream}})
    assert caught.value.path == "x/log"


def test_several_refused_leaves_do_not_hide_the_first(tmp_path: Path) -> None:
    """The message names at least one of them, with its class."""
    state = {"x": {"a": 1, "bad": Unknown(), "worse": threading.Lock()}}
    with pytest.raises(waypost.UnsupportedError, match=r"x/bad") as caught:
        waypost.save(new_place("memory", tmp_path), state)
    assert "Unknown" in str(caught.value)


def test_a_registered_value_returns(tmp_path: Path) -> None:
    """`register_value` teaches a class; the snapshot holds plain values only."""
    waypost.register_value(
        Registered,
        name="tests.registered",
        encode=lambda made: {"number": made.number},
        decode=lambda value: Registered(value["number"]),
    )
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {"r": Registered(41)}})
    restored = waypost.open(url).state_dict("x")["r"]
    assert type(restored) is Registered
    assert restored.number == 41


def test_a_registered_local_class_returns(tmp_path: Path) -> None:
    """`register_class` makes a dataclass known that cannot be imported by name."""
    made = _local_dataclass()
    waypost.register_class(type(made))
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {"d": made}})
    assert_same(waypost.open(url).state_dict("x")["d"], made)


def test_a_string_with_a_lone_surrogate_returns_or_is_refused(tmp_path: Path) -> None:
    """Text that UTF-8 cannot hold is not mangled."""
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    url = new_place("disk", tmp_path)
    refused = refusal(lambda: waypost.save(url, {"x": {"name": text}}))
    if refused is not None:
        assert refused.path == "x/name"
        return
    assert waypost.open(url).state_dict("x")["name"] == text


def test_shared_containers_return_equal(tmp_path: Path) -> None:
    """A list that appears twice is no cycle: both places hold its values."""
    shared = [1, 2]
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {"a": shared, "b": shared}})
    assert_same(waypost.open(url).state_dict("x"), {"a": [1, 2], "b": [1, 2]})
