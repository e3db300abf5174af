"""Metrics and what is kept because of them: B024, B030, B034, B047, B049, and B119 beside them."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from waypost.storage import Location, MemoryStorage


def _train(run: str, values: list[float], keep: Any, name: str = "score") -> list[int]:
    """Saves one snapshot for each value and returns the steps that are there in the end."""
    state = {"model": torch.nn.Linear(1, 1)}
    with waypost.Checkpointer(
        run, state, save_every=waypost.EverySteps(1), keep=keep, save_on=()
    ) as ckpt:
        for value in values:
            ckpt.step_done(metrics={name: value})
    return [record.step for record in waypost.snapshots(run)]


def test_b024_best_and_last_are_two_quotas(tmp_path: Path) -> None:
    """One best and one last: with 0.5, 0.9, 0.7, 0.8 the second and the fourth stay."""
    keep = waypost.KeepLast(1) | waypost.KeepBest(1, "score", "max")
    assert _train(str(tmp_path / "run"), [0.5, 0.9, 0.7, 0.8], keep) == [2, 4]


def test_b024_one_snapshot_may_fill_both_quotas(tmp_path: Path) -> None:
    """The newest is the best: it is enough."""
    keep = waypost.KeepLast(1) | waypost.KeepBest(1, "score", "max")
    assert _train(str(tmp_path / "run"), [0.5, 0.7, 0.9], keep) == [3]


def test_b030_nearly_equal_values_are_separate_snapshots(tmp_path: Path) -> None:
    """0.701 and 0.704 are the same when rounded, and different here; none is removed twice."""
    keep = waypost.KeepBest(2, "score", "max")
    assert _train(str(tmp_path / "run"), [0.701, 0.704, 0.9, 0.95], keep) == [3, 4]


def test_b034_ranks_come_from_stored_numbers(tmp_path: Path) -> None:
    """Negative, tiny and huge values keep their order, since they are never parsed from names."""
    values = [-1.5, -0.7, -0.9, 1e-7, 1e20]
    assert _train(str(tmp_path / "run"), values, waypost.KeepBest(2, "score", "max")) == [4, 5]
    stored = [
        waypost.open(record.url).metrics["score"] for record in waypost.snapshots(tmp_path / "run")
    ]
    assert stored == [1e-7, 1e20]


@pytest.mark.parametrize(
    ("mode", "count", "values", "best"),
    [
        ("max", 1, [math.nan, 0.1, 0.9, math.nan, 0.5], [3]),
        ("max", 2, [math.nan, 0.1, 0.9, math.nan, 0.5], [3, 5]),
        ("min", 1, [math.nan, 0.1, 0.9, math.nan, 0.5], [2]),
        ("max", 1, [math.inf, 0.1, -math.inf, 0.2], [1]),
        ("min", 1, [math.inf, 0.1, -math.inf, 0.2], [3]),
        ("max", 1, [0.0, -0.1], [1]),
    ],
)
def test_b047_nan_is_never_best(
    mode: Any, count: int, values: list[float], best: list[int], tmp_path: Path
) -> None:
    """It ranks last, infinities rank where they belong, and 0.0 is a number; the newest stays."""
    kept = _train(str(tmp_path / "run"), values, waypost.KeepBest(count, "score", mode))
    assert kept == sorted({*best, len(values)})


def test_b047_of_equal_values_the_newer_is_better(tmp_path: Path) -> None:
    """Ties are decided in one way everywhere."""
    kept = _train(str(tmp_path / "run"), [0.5, 0.5, 0.1], waypost.KeepBest(1, "score", "max"))
    assert kept == [2, 3]


def test_b049_which_way_is_better_is_never_guessed() -> None:
    """A metric without a mode is refused at once."""
    with pytest.raises(TypeError):
        waypost.KeepBest(1, "val/nll")  # type: ignore[call-arg]  # that is the point
    with pytest.raises(ValueError, match="mode"):
        waypost.KeepBest(1, "val/nll", "auto")  # type: ignore[arg-type]  # that is the point


class _SlowStorage(MemoryStorage):
    """Stops before a manifest is published, until it is let go."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.is_waiting = threading.Event()
        self.may_go = threading.Event()

    def publish(self, path: str, data: bytes, *, replace: bool, durable: bool) -> None:
        if path.endswith("manifest.json"):
            self.is_waiting.set()
            assert self.may_go.wait(30)
        super().publish(path, data, replace=replace, durable=durable)


def test_b119_a_reader_beside_a_save_gets_the_previous_snapshot() -> None:
    """Until the commit the run's newest is the old one, whole; after it, the new one."""
    storage = _SlowStorage()
    run = Location(storage)
    storage.make_folder("step-000000001", durable=False)
    storage.may_go.set()
    waypost.save(run / "step-000000001", {"w": torch.ones(2)}, step=1)
    storage.may_go.clear()
    storage.is_waiting.clear()
    saving = threading.Thread(
        target=waypost.save,
        args=(run / "step-000000002", {"w": torch.zeros(2)}),
        kwargs={"step": 2},
    )
    saving.start()
    assert storage.is_waiting.wait(30)
    assert waypost.latest(run) == (run / "step-000000001").url
    into = {"w": torch.full((2,), 5.0)}
    assert waypost.load(run / "step-000000001", into).step == 1
    assert into["w"].tolist() == [1.0, 1.0]
    storage.may_go.set()
    saving.join(30)
    assert waypost.latest(run) == (run / "step-000000002").url
