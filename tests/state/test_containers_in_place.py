"""Containers as targets: every value arrives, tensors are filled where they lie, or all is refused.

A container may hold anything that can be saved next to its tensors; loading it into a container of
the same making must work, since that is what a resumed run does.
"""

import collections
import dataclasses
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import _kit.values
import waypost
from _kit import assert_same, new_place, raw, refusal
from _kit.values import Frozen, Level, Phase, Point, Settings


def _saved(state: dict[str, Any]) -> str:
    url = new_place("memory", Path())
    waypost.save(url, state)
    return url


def _tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "defaultdict": lambda **values: defaultdict(int, values),
}


@pytest.mark.parametrize("target", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize("saved", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_of_another_type_gets_every_value(
    saved: Callable[..., Any], target: Callable[..., Any]
) -> None:
    """What the snapshot holds is in `into`, of the saved type, in the target's own tensors."""
    source = saved(w=_tensor(1, 2), n=5, log=[1])
    tensor = _tensor(0, 0)
    into = {"c": target(w=tensor, n=0, log=[0])}
    report = waypost.load(_saved({"c": source}), into)
    assert_same(into["c"], source)
    assert into["c"]["w"] is tensor
    assert set(report.loaded) >= {"c/w", "c/n"}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((_tensor(1), 5), [_tensor(0), 0]),
        ([_tensor(1), 5], [_tensor(0), 0]),
        ({"in": OrderedDict(w=_tensor(1), n=5)}, {"in": {"w": _tensor(0), "n": 0}}),
        ({"in": {"w": _tensor(1), "n": 5}}, {"in": OrderedDict(w=_tensor(0), n=0)}),
        ({"in": (_tensor(1), 5)}, {"in": [_tensor(0), 0]}),
        ({"in": [_tensor(1), 5]}, {"in": (_tensor(0), 0)}),
    ],
    ids=["tuple-list", "list", "ordered-inside", "dict-inside", "tuple-inside", "list-inside"],
)
def test_a_sequence_or_inner_container_of_another_type_gets_every_value(
    source: Any, target: Any
) -> None:
    """Or the difference is an error and nothing changes; never a part without a word."""
    into = {"c": target}
    waypost.load(_saved({"c": source}), into)
    assert_same(into["c"], source)


def test_a_container_of_the_same_type_stays_the_same_object() -> None:
    """Others that hold it see the new values."""
    target = {"w": _tensor(0, 0), "n": 0}
    into = {"c": target}
    waypost.load(_saved({"c": {"w": _tensor(1, 2), "n": 5}}), into)
    assert into["c"] is target
    assert target["n"] == 5


@pytest.mark.parametrize("glob", ["c/**", "**", "c", "*/*"])
def test_an_include_of_everything_in_a_container_loads_its_values(glob: str) -> None:
    """Tensors and plain values alike."""
    target = {"w": _tensor(0, 0), "n": 0}
    waypost.load(_saved({"c": {"w": _tensor(1, 2), "n": 5}}), {"c": target}, include=glob)
    assert_same(target, {"w": _tensor(1, 2), "n": 5})


@pytest.mark.parametrize("strict", [True, False])
def test_excluded_values_keep_what_they_were(strict: bool) -> None:
    """The tensors are loaded."""
    target = {"w": _tensor(0, 0), "n": 0}
    url = _saved({"c": {"w": _tensor(1, 2), "n": 5}})
    report = waypost.load(url, {"c": target}, exclude="c/n", strict=strict)
    assert_same(target, {"w": _tensor(1, 2), "n": 0})
    assert "c/n" not in report.loaded


@pytest.mark.parametrize("strict", [True, False])
def test_an_excluded_tensor_keeps_what_it_was(strict: bool) -> None:
    """The values and the other tensors are loaded."""
    kept = _tensor(0)
    target = {"w": kept, "v": _tensor(0), "n": 0}
    url = _saved({"c": {"w": _tensor(1), "v": _tensor(2), "n": 5}})
    report = waypost.load(url, {"c": target}, exclude="c/w", strict=strict)
    assert_same(target, {"w": _tensor(0), "v": _tensor(2), "n": 5})
    assert target["w"] is kept
    assert "c/w" not in report.loaded


def test_an_include_of_one_tensor_leaves_the_values() -> None:
    """Nothing else of the container changes."""
    target = {"w": _tensor(0), "v": _tensor(0), "n": 0}
    url = _saved({"c": {"w": _tensor(1), "v": _tensor(2), "n": 5}})
    waypost.load(url, {"c": target}, include="c/w")
    assert_same(target, {"w": _tensor(1), "v": _tensor(0), "n": 0})


@pytest.mark.parametrize("choice", [{"include": ["c/w", "c/n"]}, {"exclude": "c/n"}])
def test_a_part_of_the_values_of_a_container_is_refused(choice: dict[str, Any]) -> None:
    """Plain values go together; a choice between them is an error, and nothing is touched."""
    target = {"w": _tensor(0), "n": 0, "k": 0}
    url = _saved({"c": {"w": _tensor(1), "n": 5, "k": 6}})
    with pytest.raises(ValueError, match="c"):
        waypost.load(url, {"c": target}, strict=False, **choice)
    assert_same(target, {"w": _tensor(0), "n": 0, "k": 0})


def test_a_rate_alone_of_an_optimizer_is_loaded_or_refused() -> None:
    """Asked for by name, it is not left out without a word."""
    model = nn.Linear(1, 1)
    url = _saved({"m": model, "o": torch.optim.Adam(model.parameters(), lr=0.1)})
    target = torch.optim.Adam(model.parameters(), lr=0.5)
    try:
        waypost.load(
            url, {"m": model, "o": target}, include=["m/**", "o/param_groups/*/lr"], strict=False
        )
    except ValueError:
        assert target.param_groups[0]["lr"] == 0.5
    else:
        assert target.param_groups[0]["lr"] == 0.1


def _numpy_generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


BESIDE_A_TENSOR: dict[str, Callable[[int], Any]] = {
    "array": lambda n: np.arange(3) + n,
    "array of text": lambda n: np.array(["a", "bb" * n]),
    "deque": lambda n: deque([_tensor(n)], maxlen=3),
    "deque of values": lambda n: deque(range(n)),
    "namedtuple": lambda n: Point(n, _tensor(n)),
    "dataclass": lambda n: Settings(0.5 * n, ["a"] * n, _tensor(n)),
    "set": lambda n: {n, "x"},
    "torch generator": lambda n: torch.Generator().manual_seed(n),
    "numpy generator": _numpy_generator,
    "numpy legacy": np.random.RandomState,
    "python random": random.Random,
    "tensor in a tuple": lambda n: (n, _tensor(n)),
    "tensor in a list": lambda n: [n, {"t": _tensor(n)}],
}


@pytest.mark.parametrize("make", BESIDE_A_TENSOR.values(), ids=BESIDE_A_TENSOR)
@pytest.mark.parametrize("at", ["beside", "below"])
def test_anything_may_stand_beside_a_tensor(make: Callable[[int], Any], at: str) -> None:
    """What was saved can be loaded into a container of the same making."""

    def state(number: int) -> dict[str, Any]:
        inner = make(number)
        return {"w": _tensor(number, 2), "a": inner if at == "beside" else [{"x": inner}]}

    target = state(2)
    tensor = target["w"]
    into = {"e": target}
    waypost.load(_saved({"e": state(1)}), into)
    assert_same(into["e"], state(1))
    assert into["e"]["w"] is tensor


ODD_KEYS = [np.int64(3), np.str_("k"), Level.LOW, Phase.MAIN, torch.float32, (1, "a"), 2.5, b"x"]


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_tensors_under_keys_of_any_kind_are_loaded(key: Any) -> None:
    """A key that can be saved can be loaded again."""
    target = {key: _tensor(0)}
    waypost.load(_saved({"v": {key: _tensor(1)}}), {"v": target})
    assert_same(target, {key: _tensor(1)})


def test_a_run_with_mixed_containers_resumes(tmp_path: Path) -> None:
    """A logger's arrays beside a tensor do not end a run."""

    def state(number: int) -> dict[str, Any]:
        return {"log": {"w": _tensor(number), "seen": np.arange(number), "last": deque([number])}}

    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, state(3)) as checkpointer:
        checkpointer.step_done()
    resumed = state(1)
    with waypost.Checkpointer(run, resumed) as checkpointer:
        assert checkpointer.step == 1
    assert_same(resumed, state(3))


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Hashable, with anything in it."""

    inner: Any


HIDDEN: dict[str, Callable[[], Any]] = {
    "slice of a tensor": lambda: {"s": slice(_tensor(1), None)},
    "slice of an array": lambda: {"s": slice(np.arange(3), None)},
    "key with a tensor": lambda: {(_tensor(1), 2): 3},
    "set with a tensor": lambda: {(_tensor(1), 2)},
    "frozenset with a tensor": lambda: frozenset({(_tensor(1), 2)}),
    "set with a dataclass": lambda: {Held(_tensor(1))},
    "set with a generator": lambda: {random.Random(3)},
    "set in a set": lambda: {frozenset({(_tensor(1),)})},
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
def test_what_is_saved_can_be_read_back(make: Callable[[], Any]) -> None:
    """Tensors in places that hash or slice: refused by name at the save, or read back."""
    url = new_place("memory", Path())
    refused = refusal(lambda: waypost.save(url, {"e": {"deep": [make()]}}))
    if refused is not None:
        assert refused.path.startswith("e/deep")
        return
    read = waypost.open(url).state_dict("e")["deep"][0]
    assert type(read) is type(make())
    assert len(repr(read)) > 0


@pytest.mark.parametrize("change", ["gone", "other fields", "another thing"])
@pytest.mark.parametrize("where", ["an entry of values", "beside a tensor", "a state"])
def test_a_class_that_is_gone_is_found_before_anything_is_filled(
    change: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model keeps its weights."""
    value: dict[str, Any] = {"k": Frozen(3, Phase.MAIN)}
    if where == "beside a tensor":
        value["w"] = _tensor(1)
    source = _Stateful(value) if where == "a state" else value
    url = _saved({"model": nn.Linear(1, 1), "other": source})
    if change == "gone":
        monkeypatch.delattr(_kit.values, "Frozen")
    elif change == "other fields":
        monkeypatch.setattr(_kit.values, "Frozen", _renamed_fields())
    else:
        monkeypatch.setattr(_kit.values, "Frozen", 5)
    target = nn.Linear(1, 1)
    before = raw(target.weight)
    other: Any = {"k": 0, "w": _tensor(0)} if where == "beside a tensor" else {"k": 0}
    with pytest.raises(waypost.UnsupportedError, match="Frozen"):
        waypost.load(
            url, {"model": target, "other": _Stateful({}) if source is not value else other}
        )
    assert raw(target.weight) == before


class _Stateful:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _renamed_fields() -> type:
    made = dataclasses.make_dataclass("Frozen", [("width", int)])
    made.__module__, made.__qualname__ = "_kit.values", "Frozen"
    return made


def test_a_tensor_that_cannot_be_written_is_found_before_others_are_filled() -> None:
    """A target made in inference mode may be refused; then the others are as they were."""
    with torch.inference_mode():
        frozen = torch.zeros(2, dtype=torch.float64)
    target = {"c": _tensor(0, 0), "a": frozen}
    url = _saved({"e": {"c": _tensor(5, 5), "a": _tensor(1, 2)}})
    try:
        waypost.load(url, {"e": target}, cast=True)
    except waypost.WaypostError:
        assert_same(target["c"], _tensor(0, 0))
    else:
        assert_same(target["c"], _tensor(5, 5))
        assert target["a"].tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_a_sparse_tensor_with_another_count_is_loaded_or_refused(layout: str) -> None:
    """The number of elements of a sparse tensor changes in training; no half-filled target."""
    convert = {
        "csr": torch.Tensor.to_sparse_csr,
        "csc": torch.Tensor.to_sparse_csc,
        "coo": torch.Tensor.to_sparse,
    }[layout]
    source = convert(torch.tensor([[1.0, 0], [0, 2]]))
    target = {"c": _tensor(0), "a": convert(torch.ones(2, 2))}
    url = _saved({"e": {"c": _tensor(1), "a": source}})
    try:
        waypost.load(url, {"e": target})
    except waypost.MismatchError:
        assert_same(target["c"], _tensor(0))
    else:
        assert_same(target["c"], _tensor(1))
        assert torch.equal(target["a"].to_dense(), source.to_dense())


def test_counters_keep_their_type_beside_tensors() -> None:
    """A Counter is a dict too."""
    source = {"w": _tensor(1), "seen": collections.Counter("aab")}
    into = {"c": {"w": _tensor(0), "seen": collections.Counter()}}
    waypost.load(_saved({"c": source}), into)
    assert_same(into["c"], source)
