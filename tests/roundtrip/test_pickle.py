"""Pickle only when both sides ask for it; otherwise not one byte is unpickled."""

from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import files_under, new_place

ALLOWED = waypost.Options(allow_pickle=True)


def _touch(path: str, number: int) -> "Trap":
    Path(path).touch()
    return Trap(path, number)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: str, number: int) -> None:
        self.path, self.number = path, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _touch, (self.path, self.number)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """The file that unpickling creates."""
    return tmp_path / "sprung"


def _saved(tmp_path: Path, sprung: Path, place: str = "disk") -> str:
    url = new_place(place, tmp_path)
    state = {"trap": {"inner": [Trap(str(sprung), 41)]}, "model": {"w": torch.ones(2)}}
    waypost.save(url, state, options=ALLOWED)
    assert not sprung.exists(), "saving must not unpickle either"
    return url


def test_without_the_option_at_save_it_is_refused_by_name(tmp_path: Path, sprung: Path) -> None:
    """The default writes no pickle at all."""
    url = new_place("disk", tmp_path)
    with pytest.raises(waypost.UnsupportedError) as caught:
        waypost.save(url, {"trap": {"inner": [Trap(str(sprung), 1)]}})
    assert caught.value.path == "trap/inner/0"
    assert "allow_pickle" in str(caught.value)
    assert not files_under(tmp_path)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_with_the_option_on_both_sides_it_returns(place: str, tmp_path: Path, sprung: Path) -> None:
    """Both sides asked: the object is back."""
    url = _saved(tmp_path, sprung, place)
    restored = waypost.open(url, options=ALLOWED).state_dict("trap")["inner"][0]
    assert type(restored) is Trap
    assert restored.number == 41
    assert sprung.exists()


def test_load_with_the_option_on_both_sides_replaces_the_value(
    tmp_path: Path, sprung: Path
) -> None:
    """`load` takes the option too."""
    url = _saved(tmp_path, sprung)
    into: dict[str, Any] = {"trap": {"inner": [None]}, "model": {"w": torch.zeros(2)}}
    waypost.load(url, into, options=ALLOWED)
    assert into["trap"]["inner"][0].number == 41


def test_load_without_the_option_unpickles_nothing(tmp_path: Path, sprung: Path) -> None:
    """The loader did not ask: refused by name, nothing run, nothing moved."""
    url = _saved(tmp_path, sprung)
    target = torch.zeros(2)
    with pytest.raises(waypost.UnsupportedError, match="trap"):
        waypost.load(url, {"trap": {"inner": [None]}, "model": {"w": target}})
    assert not sprung.exists()
    assert torch.equal(target, torch.zeros(2))


def test_open_without_the_option_unpickles_nothing(tmp_path: Path, sprung: Path) -> None:
    """Looking, listing, verifying and reading other entries work; the pickled one is refused."""
    url = _saved(tmp_path, sprung)
    snapshot = waypost.open(url)
    assert snapshot.leaves()
    assert snapshot.verify().ok
    assert torch.equal(snapshot.state_dict("model")["w"], torch.ones(2))
    with pytest.raises(waypost.UnsupportedError, match="trap"):
        snapshot.state_dict("trap")
    assert not sprung.exists()


def test_other_entries_load_without_the_option(tmp_path: Path, sprung: Path) -> None:
    """A pickled entry that the caller does not want is no obstacle."""
    url = _saved(tmp_path, sprung)
    target = torch.zeros(2)
    waypost.load(url, {"model": {"w": target}})
    assert torch.equal(target, torch.ones(2))
    assert not sprung.exists()


def test_the_loaders_argument_wins_over_the_environment(
    tmp_path: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allow_pickle=False` in code stays False, whatever the environment says."""
    url = _saved(tmp_path, sprung)
    monkeypatch.setenv("WAYPOST_ALLOW_PICKLE", "1")
    with pytest.raises(waypost.UnsupportedError):
        waypost.open(url, options=waypost.Options(allow_pickle=False)).state_dict("trap")
    assert not sprung.exists()


def test_no_pickle_is_written_when_none_is_needed(tmp_path: Path) -> None:
    """The option alone changes nothing for values of the documented set."""
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {"a": 1, "w": torch.ones(2)}}, options=ALLOWED)
    assert waypost.open(url).state_dict("x")["a"] == 1
