"""Dictionary keys of any kind stay apart, and every leaf has one path that finds it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import PLACES, assert_same, assert_same_tensor, new_place
from _kit.values import ODD_KEYS, Level, Phase, Point


@pytest.mark.parametrize("place", PLACES)
def test_keys_of_different_types_stay_apart(place: str, tmp_path: Path) -> None:
    """0 and "0", True and 1.5, a tuple and None are different keys and return as such."""
    made: dict[Any, Any] = {0: "a", "0": "b", (1, 2): "c", None: "d", True: "e", 1.5: "f"}
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


@pytest.mark.parametrize("place", PLACES)
def test_tensors_under_keys_of_different_types_stay_apart(place: str, tmp_path: Path) -> None:
    """The same keys with a tensor below each: six leaves, six paths, six values."""
    keys: list[Any] = [0, "0", (1, 2), None, True, 1.5]
    made = {key: torch.full((3,), float(index)) for index, key in enumerate(keys)}
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": made})
    snapshot = waypost.open(url)
    assert_same(snapshot.state_dict("x"), made)
    paths = [leaf.path for leaf in snapshot.leaves("x/**") if leaf.kind == "tensor"]
    assert len(set(paths)) == 6
    values = sorted(snapshot.read(path)[0].item() for path in paths)
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert {"x/0", "x/~0", "x/~null", "x/~true", "x/~1.5"} <= set(paths)


@pytest.mark.parametrize(
    "key",
    [1, 1.0, True, False, 0.0, -0.0, 2**70, b"k", (), ("a", (1, None)), frozenset({1}), 1j],
    ids=repr,
)
def test_one_key_of_each_kind_keeps_its_type(key: Any, tmp_path: Path) -> None:
    """Keys that Python calls equal (1, 1.0, True) keep the type they had."""
    made = {key: torch.ones(1), "value": {key: "text"}}
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


@pytest.mark.parametrize("key", [Phase.MAIN, Level.LOW, Point(1, 2)], ids=repr)
def test_keys_of_known_classes_return(key: Any, tmp_path: Path) -> None:
    """An enum member or a namedtuple as a key."""
    made = {key: 1, "t": {key: torch.ones(2)}}
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


@pytest.mark.parametrize("place", PLACES)
def test_odd_text_keys_return_side_by_side(place: str, tmp_path: Path) -> None:
    """Slashes, dots, percent signs, newlines, emoji, 300 characters, "", "~x" and "$x"."""
    made: dict[str, Any] = {key: index for index, key in enumerate(ODD_KEYS.values())}
    made["tensors"] = {
        key: torch.full((2,), float(index)) for index, key in enumerate(ODD_KEYS.values())
    }
    url = new_place(place, tmp_path)
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


@pytest.mark.parametrize("name", ODD_KEYS)
def test_each_odd_key_has_a_path_that_reads_it(name: str, tmp_path: Path) -> None:
    """The listed path of the leaf is one segment below its container and reads the tensor."""
    tensor = torch.arange(5.0)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {ODD_KEYS[name]: tensor}})
    snapshot = waypost.open(url)
    (leaf,) = snapshot.leaves()
    assert leaf.path.count("/") == 1
    assert leaf.path.startswith("x/")
    assert leaf.path.isprintable()
    assert_same_tensor(snapshot.read(leaf.path), tensor)


@pytest.mark.parametrize("name", ODD_KEYS)
def test_each_odd_key_loads_in_place(name: str, tmp_path: Path) -> None:
    """A target with the same odd key is matched and filled."""
    url = new_place("memory", tmp_path)
    waypost.save(url, {"x": {ODD_KEYS[name]: torch.arange(5.0)}})
    target = torch.zeros(5)
    waypost.load(url, {"x": {ODD_KEYS[name]: target}})
    assert torch.equal(target, torch.arange(5.0))


def test_dots_and_nesting_do_not_collide(tmp_path: Path) -> None:
    """{"a.b": …} and {"a": {"b": …}} and {"a/b": …} are three different things."""
    made = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a/b": torch.full((1,), 2.0)}
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": made})
    assert_same(waypost.open(url).state_dict("x"), made)


def test_entries_that_look_alike_do_not_collide(tmp_path: Path) -> None:
    """Entry names that differ in case, dots or prefixes keep their own values."""
    state: dict[str, Any] = {
        name: {"w": torch.full((2,), float(index))}
        for index, name in enumerate(["model", "Model", "model.r00000", "model-000", "model_"])
    }
    url = new_place("disk", tmp_path)
    waypost.save(url, state)
    snapshot = waypost.open(url)
    assert set(snapshot.entries) == set(state)
    for name, entry in state.items():
        assert_same(snapshot.state_dict(name), entry, name)


@pytest.mark.parametrize(
    "name", ["../x", "..", ".", "a/b", "", "/abs", "a\x00b", "x" * 300, "\U0001f4a9", "a b", "con"]
)
def test_odd_entry_names_return_or_are_refused_and_never_escape(name: str, tmp_path: Path) -> None:
    """An entry name is data: it chooses no file outside the snapshot."""
    url = str(tmp_path / "run" / "snap")
    state = {name: {"w": torch.arange(4.0)}}
    try:
        waypost.save(url, state)
    except (ValueError, waypost.WaypostError):
        assert not list((tmp_path / "run").rglob("manifest.json"))
    else:
        assert_same(waypost.open(url).state_dict(name), state[name])
        assert waypost.open(url).verify().ok
    outside = [path for path in tmp_path.iterdir() if path.name != "run"]
    assert outside == []


@pytest.mark.parametrize("key", [3, None, ("a",), b"x", True], ids=repr)
def test_entry_names_are_text(key: Any, tmp_path: Path) -> None:
    """A state whose top-level key is not a string is refused at once."""
    with pytest.raises((TypeError, ValueError)):
        waypost.save(new_place("memory", tmp_path), {key: torch.ones(1)})
