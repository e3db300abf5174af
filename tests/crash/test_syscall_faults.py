"""Kills and errors at single system calls, injected by strace: a seeded sample of all of them."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit.invariants import (
    advance,
    check_debris,
    check_next_save,
    check_run,
    committed,
    quiet,
    save_step,
)
from _kit.syscalls import CREATES, PUBLISHES, REMOVES, SYNCS, WRITES, traced

pytestmark = [pytest.mark.strace, pytest.mark.slow]

SAMPLES = 14


def _save_20(run: str) -> None:
    advance(run, 20)


def _overwrite_10(run: str) -> None:
    save_step(run, 10, overwrite=True)


def _prune_10(run: str) -> None:
    waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)


def _prepare(run: str) -> None:
    for step in (5, 10):
        save_step(run, step)


ACTIONS: dict[str, tuple[Callable[[str], None], set[int], set[int]]] = {
    "save": (_save_20, {5, 10}, {5, 10, 20}),
    "overwrite": (_overwrite_10, {5, 10}, {5, 10}),
    "prune": (_prune_10, {10}, {5, 10}),
}


def _points(action: Callable[[str], Any], tmp_path: Path) -> list[tuple[str, int]]:
    """Every (system call, number) that the action makes, from a run where nothing fails."""
    run = str(tmp_path / "reference")
    _prepare(run)
    outcome, calls = traced(lambda: action(run), tmp_path)
    outcome.expect_result()
    counts = Counter(call.name for call in calls)
    names = WRITES | SYNCS | PUBLISHES | REMOVES | CREATES
    return [(name, k) for name in sorted(names) for k in range(1, counts[name] + 1)]


def _sample(points: list[tuple[str, int]], seed: int, count: int) -> list[tuple[str, int]]:
    """Some of each kind first (renames and syncs are few), then any."""
    chooser = random.Random(seed)
    rare = [point for point in points if point[0] in PUBLISHES | SYNCS | REMOVES]
    half = chooser.sample(rare, min(count // 2, len(rare)))
    rest = [point for point in points if point not in half]
    return half + chooser.sample(rest, min(count - len(half), len(rest)))


def _kill(name: str, points: list[tuple[str, int]], tmp_path: Path) -> None:
    action, must, may = ACTIONS[name]
    killed = 0
    for syscall, k in points:
        run = str(tmp_path / f"{name}-{syscall}-{k}")
        _prepare(run)
        inject = f"{syscall}:signal=KILL:when={k}"
        outcome, _ = traced(lambda run=run: action(run), tmp_path, inject=inject)
        killed += outcome.was_killed
        check_run(run, must=must, may=may)
        check_next_save(run, 40)
        check_debris(run)
    assert killed > len(points) // 3, f"only {killed} of {len(points)} points were reached"


@pytest.mark.parametrize("name", ACTIONS)
def test_killed_at_a_sample_of_system_calls(name: str, tmp_path: Path, seed: int) -> None:
    """SIGKILL as the k-th call begins: old or new, whole; the next save works."""
    quiet()
    points = _points(ACTIONS[name][0], tmp_path)
    assert len(points) > 5
    _kill(name, _sample(points, seed, SAMPLES), tmp_path)


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ACTIONS)
def test_killed_at_every_system_call(name: str, tmp_path: Path) -> None:
    """The whole sweep."""
    quiet()
    _kill(name, _points(ACTIONS[name][0], tmp_path), tmp_path)


def _fail(points: list[tuple[str, int]], error: str, tmp_path: Path) -> None:
    for syscall, k in points:
        run = str(tmp_path / f"{error}-{syscall}-{k}")
        _prepare(run)
        inject = f"{syscall}:error={error}:when={k}"
        outcome, _ = traced(lambda run=run: _save_20(run), tmp_path, inject=inject)
        steps = check_run(run, must={5, 10}, may={5, 10, 20})
        if outcome.error:
            assert "waypost" in outcome.error, outcome.error
            assert "Error" in outcome.error.splitlines()[-1], outcome.error
        else:
            assert 20 in steps, f"{syscall} {k}: success was reported and nothing is there"
        check_next_save(run, 40)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_errors_at_a_sample_of_system_calls(error: str, tmp_path: Path, seed: int) -> None:
    """The k-th call fails: an error at the caller or a whole snapshot, never neither."""
    quiet()
    points = [point for point in _points(_save_20, tmp_path) if point[0] != "openat"]
    _fail(_sample(points, seed, SAMPLES), error, tmp_path)


@pytest.mark.parametrize("syscall", ["fsync", "fdatasync"])
def test_a_failed_sync_fails_the_save(syscall: str, tmp_path: Path) -> None:
    """EIO at the first sync is never swallowed and never retried into a success."""
    run = str(tmp_path / "run")
    _prepare(run)
    counts = [point for point in _points(_save_20, tmp_path) if point[0] == syscall]
    if not counts:
        pytest.skip(f"a save makes no {syscall}")
    inject = f"{syscall}:error=EIO:when=1+"
    outcome, _ = traced(lambda: _save_20(run), tmp_path, inject=inject)
    assert "StorageError" in outcome.error or "CommitUnknownError" in outcome.error
    assert 20 not in committed(run)
    check_run(run, must={5, 10}, may={5, 10})


def test_interrupted_writes_are_repeated(tmp_path: Path) -> None:
    """EINTR is no failure: the write is done again and the snapshot is whole."""
    run = str(tmp_path / "run")
    _prepare(run)
    points = [point for point in _points(_save_20, tmp_path) if point[0] in WRITES]
    for syscall in sorted({name for name, _ in points}):
        if not syscall.startswith(("write", "pwrite")):
            continue
        inject = f"{syscall}:error=EINTR:when=1"
        outcome, _ = traced(lambda: _save_20(run), tmp_path, inject=inject)
        outcome.expect_result()
        check_run(run, must={5, 10, 20}, may={5, 10, 20})
