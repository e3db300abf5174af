"""SIGKILL at every storage call of save, overwrite and prune: old or new, whole, every time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, in_child
from _kit.faults import at, calls_of, faulty
from _kit.invariants import (
    advance,
    check_debris,
    check_latest,
    check_next_save,
    check_run,
    quiet,
    read_state,
    sample_state,
)

pytestmark = pytest.mark.slow


def _save_next(place: Any) -> None:
    """The normal save of a run: two steps on, through a Checkpointer."""
    advance(place, 12)


def _save_and_prune(place: Any) -> None:
    advance(place, 12, keep=waypost.KeepLast(1))


def _prune(place: Any) -> None:
    waypost.prune(place, keep=waypost.KeepLast(1), dry_run=False)


def _prepare(run: str) -> None:
    advance(run, 5)
    advance(run, 10)


Action = Callable[[Any], None]
ACTIONS: dict[str, tuple[Action, set[int], set[int]]] = {
    "save": (_save_next, {5, 10}, {5, 10, 12}),
    "save_and_prune": (_save_and_prune, set(), {5, 10, 12}),
    "prune": (_prune, {10}, {5, 10}),
}


def _calls(name: str, tmp_path: Path) -> list[str]:
    run = str(tmp_path / "reference")
    _prepare(run)
    calls = calls_of(run, ACTIONS[name][0])
    assert len(calls) > 3
    return calls


@pytest.mark.parametrize("name", ACTIONS)
def test_killed_before_every_storage_call(name: str, tmp_path: Path) -> None:
    """S1 to S8 after a SIGKILL at call k, for every k."""
    quiet()
    action, must, may = ACTIONS[name]
    for k in range(1, len(_calls(name, tmp_path)) + 1):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        (Path(run) / "notes.txt").write_text("mine")
        outcome = in_child(lambda run=run, k=k: action(faulty(run, at(k, "kill"))))
        assert outcome.was_killed, f"call {k} was not reached: {outcome}"
        steps = check_run(run, must=must, may=may)
        assert steps, f"nothing is left after a kill at call {k}"
        assert max(steps) >= 10
        assert (Path(run) / "notes.txt").read_text() == "mine"
        check_next_save(run, 40)
        check_debris(run)


@pytest.mark.parametrize("name", ["save", "prune"])
def test_killed_twice_in_a_row(name: str, tmp_path: Path) -> None:
    """A kill during the repair of an earlier kill is survived as well."""
    quiet()
    action, must, may = ACTIONS[name]
    count = len(_calls(name, tmp_path))
    for k in range(2, count + 1, 3):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        for again in (k, max(1, k - 2)):
            in_child(lambda run=run, again=again: action(faulty(run, at(again, "kill"))))
            check_run(run, must=must, may=may)
        check_next_save(run, 40)
        check_debris(run)


def test_overwrite_killed_before_every_storage_call(tmp_path: Path) -> None:
    """Overwriting one snapshot: the old state or the new one, never a mixture, never nothing."""
    quiet()
    new = {"model": {"w": torch.full((50,), 9.0)}, "added": {"x": 1}}
    reference = str(tmp_path / "reference" / "step-000000010")
    waypost.save(reference, sample_state(10), step=10)
    overwrite: Action = lambda place: waypost.save(  # noqa: E731
        place, new, step=10, overwrite=True
    )
    count = len(calls_of(reference, overwrite))
    seen = set()
    for k in range(1, count + 1):
        run = tmp_path / f"run-{k}"
        url = str(run / "step-000000010")
        waypost.save(url, sample_state(10), step=10)
        outcome = in_child(lambda url=url, k=k: overwrite(faulty(url, at(k, "kill"))))
        assert outcome.was_killed, f"call {k} was not reached: {outcome}"
        assert waypost.open(url).verify().ok
        found = read_state(url)
        seen.add("added" in found)
        assert_same(found, new if "added" in found else sample_state(10), f"kill at {k}")
        check_latest(str(run))
        waypost.save(url, sample_state(11), step=10, overwrite=True)
        assert_same(read_state(url), sample_state(11), "the next save")
        check_debris(str(run))
    assert seen == {True, False}


def test_the_first_save_of_a_run_killed_before_every_storage_call(tmp_path: Path) -> None:
    """With nothing before it: no snapshot or the whole one; the run starts again by itself."""
    quiet()

    def first(place: Any) -> None:
        advance(place, 1)

    count = len(calls_of(str(tmp_path / "reference"), first))
    seen = set()
    for k in range(1, count + 1):
        run = str(tmp_path / f"run-{k}")
        outcome = in_child(lambda run=run, k=k: first(faulty(run, at(k, "kill"))))
        assert outcome.was_killed
        steps = check_run(run, must=set(), may={1}) if Path(run).exists() else set()
        seen.add(bool(steps))
        check_next_save(run, 3)
        check_debris(run)
    assert seen == {True, False}


def test_debris_does_not_grow_with_the_number_of_crashes(tmp_path: Path) -> None:
    """Ten crashes at the same place leave one bounded heap that the next prune takes away."""
    quiet()
    run = str(tmp_path / "run")
    _prepare(run)
    count = len(_calls("save", tmp_path))
    for _ in range(10):
        in_child(lambda: _save_next(faulty(run, at(count // 2, "kill"))))
    check_run(run, must={5, 10}, may={5, 10, 12})
    check_next_save(run, 40)
    check_debris(run)
