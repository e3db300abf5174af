"""Loading is all or nothing: every difference in one error, and not one tensor touched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same_tensor, new_place, raw


def _net(width: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def _saved(tmp_path: Path, state: dict[str, Any], **arguments: Any) -> str:
    url = new_place("disk", tmp_path)
    waypost.save(url, state, **arguments)
    return url


def _found(caught: Any) -> set[tuple[str, str]]:
    return {(difference.kind, difference.path) for difference in caught.value.differences}


def test_all_differences_are_in_one_error_and_nothing_is_touched(tmp_path: Path) -> None:
    """Missing, unexpected, shape and dtype together; the target keeps every byte."""
    url = _saved(
        tmp_path,
        {
            "model": {
                "same": torch.ones(3),
                "gone": torch.ones(3),
                "shape": torch.ones(3),
                "dtype": torch.ones(3),
            },
            "other": {"fine": torch.ones(2)},
        },
    )
    target = {
        "same": torch.zeros(3),
        "new": torch.zeros(3),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(3, dtype=torch.float16),
    }
    other = {"fine": torch.zeros(2)}
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"other": other, "model": target})
    assert _found(caught) == {
        ("missing", "model/new"),
        ("unexpected", "model/gone"),
        ("shape", "model/shape"),
        ("dtype", "model/dtype"),
    }
    assert isinstance(caught.value, ValueError)
    for tensor in [*target.values(), other["fine"]]:
        assert not tensor.any()
    for path in ("model/new", "model/gone", "model/shape", "model/dtype"):
        assert path in str(caught.value)


def test_a_difference_says_expected_and_actual(tmp_path: Path) -> None:
    """Expected is what the target wants, actual is what the snapshot holds."""
    url = _saved(tmp_path, {"x": {"w": torch.ones(3), "v": torch.ones(2)}})
    target = {"w": torch.zeros(4), "v": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"x": target})
    by_kind = {difference.kind: difference for difference in caught.value.differences}
    assert "4" in str(by_kind["shape"].expected)
    assert "3" in str(by_kind["shape"].actual)
    assert "float64" in str(by_kind["dtype"].expected)
    assert "float32" in str(by_kind["dtype"].actual)


def test_a_model_of_another_width_is_untouched(tmp_path: Path) -> None:
    """The error comes after the last check, not in the middle of the copy."""
    url = _saved(tmp_path, {"model": _net(4)})
    target = _net(5, seed=1)
    before = {name: raw(tensor) for name, tensor in target.state_dict().items()}
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target})
    assert {kind for kind, _ in _found(caught)} == {"shape"}
    assert len(caught.value.differences) == 7
    assert {name: raw(tensor) for name, tensor in target.state_dict().items()} == before


def test_a_missing_entry_is_a_difference(tmp_path: Path) -> None:
    """What the caller asks for and the snapshot lacks is missing; the rest is not loaded."""
    url = _saved(tmp_path, {"model": _net()})
    target, extra = _net(seed=1), {"w": torch.zeros(2)}
    before = raw(target[0].weight)
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target, "ema": extra})
    kinds = {difference.kind for difference in caught.value.differences}
    assert kinds == {"missing"}
    assert all(difference.path.startswith("ema") for difference in caught.value.differences)
    assert raw(target[0].weight) == before


def test_entries_that_nobody_asks_for_are_ignored_and_reported(tmp_path: Path) -> None:
    """Loading only the model of a full snapshot is normal."""
    url = _saved(tmp_path, {"model": _net(), "data": {"w": torch.ones(2)}}, step=12)
    target = _net(seed=1)
    report = waypost.load(url, {"model": target})
    assert report.step == 12
    assert set(report.loaded) == {f"model/{name}" for name in target.state_dict()}
    assert report.missing == ()
    assert report.unexpected == ()
    assert any(path.startswith("data") for path in report.ignored)
    assert report.nbytes == sum(tensor.nbytes for tensor in target.state_dict().values())


def test_not_strict_loads_what_agrees_and_reports_the_rest(tmp_path: Path) -> None:
    """Missing and unexpected leaves are allowed and listed; the others are loaded."""
    url = _saved(tmp_path, {"x": {"both": torch.ones(2), "saved": torch.ones(2)}})
    target = {"both": torch.zeros(2), "wanted": torch.full((2,), 5.0)}
    report = waypost.load(url, {"x": target}, strict=False)
    assert torch.equal(target["both"], torch.ones(2))
    assert torch.equal(target["wanted"], torch.full((2,), 5.0))
    assert report.missing == ("x/wanted",)
    assert report.unexpected == ("x/saved",)
    assert "x/both" in report.loaded


@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_not_strict_still_refuses_shapes_and_dtypes(kind: str, tmp_path: Path) -> None:
    """strict=False is about names, never about numbers."""
    url = _saved(tmp_path, {"x": {"a": torch.ones(2), "b": torch.ones(2)}})
    wrong = torch.zeros(3) if kind == "shape" else torch.zeros(2, dtype=torch.int32)
    target = {"a": torch.zeros(2), "b": wrong}
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"x": target}, strict=False)
    assert _found(caught) == {(kind, "x/b")}
    assert not target["a"].any()


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_in_common_is_always_an_error(strict: bool, tmp_path: Path) -> None:
    """A load that would load nothing does not pass for a success."""
    url = _saved(tmp_path, {"model": {"a.weight": torch.ones(2)}})
    target = {"b.weight": torch.zeros(2)}
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"model": target}, strict=strict)
    assert not target["b.weight"].any()


@pytest.mark.parametrize("strict", [True, False])
def test_no_common_entry_is_always_an_error(strict: bool, tmp_path: Path) -> None:
    """Also when not even an entry name agrees."""
    url = _saved(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"network": {"w": torch.zeros(2)}}, strict=strict)


def test_include_loads_only_what_it_names(tmp_path: Path) -> None:
    """Globs over leaf paths: the rest of the target stays as it is."""
    url = _saved(tmp_path, {"model": _net()})
    source = waypost.open(url)
    for glob, wanted in {
        "model/0.*": {"0.weight", "0.bias"},
        "model/*.bias": {"0.bias", "1.bias", "2.bias"},
        "model/**": set(_net().state_dict()),
        "model": set(_net().state_dict()),
    }.items():
        target = _net(seed=1)
        before = {name: raw(tensor) for name, tensor in target.state_dict().items()}
        waypost.load(url, {"model": target}, include=glob)
        for name, tensor in target.state_dict().items():
            expected = raw(source.read(f"model/{name}")) if name in wanted else before[name]
            assert raw(tensor) == expected, (glob, name)


def test_exclude_leaves_out_what_it_names(tmp_path: Path) -> None:
    """A head of another size is left out and keeps its fresh weights."""
    url = _saved(tmp_path, {"model": _net()})
    target = _net(seed=1)
    target[2] = nn.Linear(4, 10)
    head = raw(target[2].weight)
    report = waypost.load(url, {"model": target}, exclude=["model/2.*"])
    assert raw(target[2].weight) == head
    assert raw(target[0].weight) == raw(waypost.open(url).read("model/0.weight"))
    assert "model/2.weight" not in report.loaded


def test_include_and_exclude_combine(tmp_path: Path) -> None:
    """Excluded wins over included."""
    url = _saved(tmp_path, {"model": _net(), "x": {"w": torch.ones(1)}})
    target, beside = _net(seed=1), {"w": torch.zeros(1)}
    report = waypost.load(
        url, {"model": target, "x": beside}, include=["model/**"], exclude="model/*.bias"
    )
    assert not any(path.endswith(".bias") for path in report.loaded)
    assert "model/0.weight" in report.loaded
    assert not beside["w"].any()


@pytest.mark.parametrize("glob", ["nothing/**", "model/layer*"])
def test_an_include_that_names_nothing_is_an_error(glob: str, tmp_path: Path) -> None:
    """A typing mistake in a glob does not become an empty load."""
    url = _saved(tmp_path, {"model": _net()})
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"model": _net()}, include=glob)


def test_a_star_stays_within_one_segment(tmp_path: Path) -> None:
    """`*` does not cross a slash, `**` does."""
    state = {"x": {"a": torch.ones(1), "deep": {"a": torch.ones(1)}}}
    snapshot = waypost.open(_saved(tmp_path, state))
    assert [leaf.path for leaf in snapshot.leaves("x/*")] == ["x/a"]
    assert {leaf.path for leaf in snapshot.leaves("x/**")} == {"x/a", "x/deep/a"}
    assert {leaf.path for leaf in snapshot.leaves("**/a")} == {"x/a", "x/deep/a"}


def test_rename_by_prefix_takes_the_longest(tmp_path: Path) -> None:
    """Prefixes are mapped from saved to target paths; the longest one wins."""
    saved = {"encoder.0.w": torch.ones(2), "encoder.head.w": torch.full((2,), 2.0)}
    url = _saved(tmp_path, {"model": saved})
    target = {"backbone.0.w": torch.zeros(2), "classifier.w": torch.zeros(2)}
    waypost.load(
        url,
        {"model": target},
        rename={"model/encoder.": "model/backbone.", "model/encoder.head.": "model/classifier."},
    )
    assert torch.equal(target["backbone.0.w"], torch.ones(2))
    assert torch.equal(target["classifier.w"], torch.full((2,), 2.0))


def test_rename_by_function(tmp_path: Path) -> None:
    """A callable maps each saved path to a target path."""
    url = _saved(tmp_path, {"model": {"gamma": torch.ones(2), "beta": torch.full((2,), 2.0)}})
    names = {"model/gamma": "model/weight", "model/beta": "model/bias"}
    target = {"weight": torch.zeros(2), "bias": torch.zeros(2)}
    waypost.load(url, {"model": target}, rename=lambda path: names.get(path, path))
    assert torch.equal(target["weight"], torch.ones(2))
    assert torch.equal(target["bias"], torch.full((2,), 2.0))


def test_rename_moves_an_entry(tmp_path: Path) -> None:
    """The EMA of a run becomes the model of another."""
    source = _net()
    url = _saved(tmp_path, {"ema": source})
    target = _net(seed=1)
    waypost.load(url, {"model": target}, rename={"ema/": "model/"})
    for name, tensor in source.state_dict().items():
        assert_same_tensor(target.state_dict()[name], tensor, name)


def test_two_saved_leaves_renamed_to_one_target_are_refused(tmp_path: Path) -> None:
    """A rename that makes two leaves one is an error, whichever would win."""
    url = _saved(tmp_path, {"x": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}})
    target = {"c": torch.zeros(2)}
    with pytest.raises(ValueError, match="c"):
        waypost.load(url, {"x": target}, rename={"x/a": "x/c", "x/b": "x/c"}, strict=False)
    assert not target["c"].any()


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.int64, torch.int32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.complex64, torch.complex128),
        (torch.int32, torch.float32),
    ],
    ids=str,
)
def test_cast_converts_as_torch_does(
    saved: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    """`cast=True` gives the target's dtype, reports it, and equals `tensor.to`."""
    tensor = torch.arange(-3, 4).to(saved)
    url = _saved(tmp_path, {"x": {"w": tensor}})
    target = torch.zeros(7, dtype=wanted)
    report = waypost.load(url, {"x": {"w": target}}, cast=True)
    assert_same_tensor(target, tensor.to(wanted))
    assert tuple(report.cast) == ("x/w",)


def test_cast_does_not_bend_shapes(tmp_path: Path) -> None:
    """A shape difference stays an error under cast=True."""
    url = _saved(tmp_path, {"x": {"w": torch.ones(4)}})
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"x": {"w": torch.zeros(2, 2)}}, cast=True)


def test_a_value_where_the_target_wants_a_tensor_is_a_type_difference(tmp_path: Path) -> None:
    """A number does not become a tensor, nor a tensor a number, without a word."""
    url = _saved(tmp_path, {"x": {"w": 1.0, "t": torch.ones(1)}})
    target = {"w": torch.zeros(()), "t": torch.zeros(1)}
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"x": target})
    assert any(difference.path == "x/w" for difference in caught.value.differences)
    assert not target["t"].any()


def test_the_number_of_listed_tensors_matters(tmp_path: Path) -> None:
    """A list of two tensors does not load into a list of three."""
    url = _saved(tmp_path, {"x": [torch.ones(1), torch.ones(1)]})
    target = [torch.zeros(1) for _ in range(3)]
    with pytest.raises(waypost.MismatchError):
        waypost.load(url, {"x": target})
    assert not any(tensor.any() for tensor in target)


def test_an_object_with_load_state_dict_gets_its_state(tmp_path: Path) -> None:
    """Any object with the two methods is an entry."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "nested": (1, [2])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["nested"] == (1, [2])
            self.count = state["count"]

    source, target = Counter(), Counter()
    source.count = 9
    waypost.load(_saved(tmp_path, {"c": source}), {"c": target})
    assert target.count == 9


def test_a_missing_snapshot_is_not_found(tmp_path: Path) -> None:
    """NotFoundError is a FileNotFoundError and names the place."""
    with pytest.raises(waypost.NotFoundError, match="absent") as caught:
        waypost.load(str(tmp_path / "absent"), {"x": torch.zeros(1)})
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(f"memory://{tmp_path.name}/absent")


def test_a_missing_leaf_is_a_key_error(tmp_path: Path) -> None:
    """LeafNotFoundError is a KeyError and names the leaf."""
    snapshot = waypost.open(_saved(tmp_path, {"x": {"w": torch.ones(1)}}))
    with pytest.raises(waypost.LeafNotFoundError, match="x/v"):
        snapshot.read("x/v")
    with pytest.raises(KeyError):
        snapshot.state_dict("y")
