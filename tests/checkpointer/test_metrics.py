"""Metrics are checked where they are given, and never cost a snapshot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waypost
from _kit.invariants import committed, put, sample_state

BAD: dict[str, Any] = {
    "text": "bad",
    "none": None,
    "list": [1.0],
    "dict": {"x": 1.0},
    "complex": 1j,
    "two numbers": torch.tensor([1.0, 2.0]),
    "array": np.array([1.0, 2.0]),
    "object": object(),
}
GOOD: dict[str, Any] = {
    "float": 0.5,
    "int": 3,
    "long int": 10**400,
    "nan": float("nan"),
    "infinity": float("inf"),
    "tensor": torch.tensor(1.5),
    "tensor with gradient": torch.tensor(1.5, requires_grad=True),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "numpy": np.float32(1.5),
    "numpy int": np.int64(3),
    "numpy scalar array": np.array(2.0),
}


def _done(checkpointer: waypost.Checkpointer, boundary: str, metrics: Any) -> None:
    if boundary == "step":
        checkpointer.step_done(metrics)
    else:
        checkpointer.epoch_done(metrics)


@pytest.mark.parametrize("boundary", ["step", "epoch"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("due", [True, False], ids=["save due", "no save due"])
def test_a_metric_that_is_no_number_is_refused_at_once(
    bad: Any, boundary: str, due: bool, tmp_path: Path
) -> None:
    """By name, whether a save is due or not."""
    policy = waypost.EverySteps(1) | waypost.EveryEpochs(1) if due else None
    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, sample_state(0), save_every=policy, save_on=()) as checkpointer:
        with pytest.raises(ValueError, match="accuracy"):
            _done(checkpointer, boundary, {"loss": 1.0, "accuracy": bad})
        assert committed(run) == {}


@pytest.mark.parametrize("boundary", ["step", "epoch"])
def test_training_goes_on_after_a_refused_metric(boundary: str, tmp_path: Path) -> None:
    """A program that catches the error has lost nothing."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state) as checkpointer:
        with pytest.raises(ValueError, match="loss"):
            _done(checkpointer, boundary, {"loss": "bad"})
        put(state, 1)
        _done(checkpointer, boundary, {"loss": 0.25})
        expected = (checkpointer.step, checkpointer.epoch)
    with waypost.Checkpointer(run, sample_state(0), save_on=()) as checkpointer:
        assert (
            (checkpointer.step, checkpointer.epoch)
            == expected
            == ((1, 0) if boundary == "step" else (0, 1))
        )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("boundary", ["step", "epoch"])
def test_the_exception_save_is_made_in_spite_of_the_metric(
    bad: Any, boundary: str, tmp_path: Path
) -> None:
    """The error that ends the training does not take the training with it."""
    run = str(tmp_path / "run")
    state = sample_state(0)

    def program() -> None:
        with waypost.Checkpointer(run, state) as checkpointer:
            for step in (1, 2):
                put(state, step)
                checkpointer.step_done({"loss": 1.0 / step})
            _done(checkpointer, boundary, {"loss": bad})

    with pytest.raises(ValueError, match="loss"):
        program()
    (record,) = waypost.snapshots(run)
    assert record.problem is None
    assert record.step >= 2
    assert record.reason == "exception"
    assert waypost.open(record.url).verify().ok


@pytest.mark.parametrize("metrics", [5, "loss", [("loss", 1.0)], {1: 2.0}], ids=repr)
def test_what_is_no_mapping_of_names_is_refused(metrics: Any, tmp_path: Path) -> None:
    """Before it is counted."""
    with waypost.Checkpointer(str(tmp_path / "run"), sample_state(0), save_on=()) as checkpointer:
        with pytest.raises((TypeError, ValueError), match="metric"):
            checkpointer.step_done(metrics)
        assert checkpointer.step == 0


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_one_number_of_any_kind_is_a_metric(good: Any, tmp_path: Path) -> None:
    """As a plain int or float in the listing."""
    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, sample_state(0)) as checkpointer:
        checkpointer.step_done({"m": good})
    (record,) = waypost.snapshots(run)
    metrics: Mapping[str, int | float] = record.metrics
    assert type(metrics["m"]) in (int, float)
    plain = good.item() if hasattr(good, "item") else good
    assert metrics["m"] == plain or (metrics["m"] != metrics["m"] and plain != plain)


def test_save_refuses_a_bad_metric_and_saves_without_it(tmp_path: Path) -> None:
    """Asked for by hand: an error by name, nothing saved, and the next save works."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        put(state, 1)
        checkpointer.step_done()
        with pytest.raises(ValueError, match="loss"):
            checkpointer.save({"loss": "bad"})
        assert committed(run) == {}
        checkpointer.save({"loss": 0.5})
    assert sorted(committed(run)) == [1]
