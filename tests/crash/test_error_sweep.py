"""Every storage call fails once, in every way: the caller knows, and nothing else is lost."""

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit.faults import ERRNOS, at, calls_of, faulty
from _kit.invariants import (
    advance,
    check_debris,
    check_next_save,
    check_run,
    committed,
    quiet,
    sample_state,
    save_step,
    snapshot_url,
)

pytestmark = pytest.mark.slow


def _save_12(place: Any) -> None:
    advance(place, 12)


def _prepare(run: str) -> None:
    for step in (5, 10):
        save_step(run, step)


def _count(tmp_path: Path) -> int:
    run = str(tmp_path / "reference")
    _prepare(run)
    return len(calls_of(run, _save_12))


def _attempt(run: str, k: int, action: str, number: int) -> BaseException | None:
    try:
        _save_12(faulty(run, at(k, action, number)))
    except waypost.WaypostError as error:
        return error
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("name", ERRNOS)
def test_every_call_fails_with(name: str, tmp_path: Path) -> None:
    """An error at the caller with its cause, or a whole snapshot; the next save works."""
    quiet()
    number = ERRNOS[name]
    failed = 0
    for k in range(1, _count(tmp_path) + 1):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        error = _attempt(run, k, "error", number)
        steps = check_run(run, must={5, 10}, may={5, 10, 12})
        if error is None:
            assert 12 in steps, f"call {k}: success was reported and nothing is there"
        else:
            failed += 1
            numbers = {cause.errno for cause in _chain(error) if isinstance(cause, OSError)}
            assert number in numbers, f"call {k}: {error!r} does not say {name}"
        check_next_save(run, 40)
        check_debris(run)
    assert failed >= 3


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT"])
def test_errors_about_space_say_needed_and_free(name: str, tmp_path: Path) -> None:
    """StorageFullError for every call that writes: bytes needed, bytes free, in the message too."""
    quiet()
    run = str(tmp_path / "reference")
    _prepare(run)
    calls = calls_of(run, _save_12)
    writing = [k for k, op in enumerate(calls, 1) if op == "write"]
    assert writing
    for k in writing:
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        error = _attempt(run, k, "error", ERRNOS[name])
        if error is None:
            assert 12 in committed(run)
            continue
        assert isinstance(error, waypost.StorageFullError), f"call {k}: {error!r}"
        assert isinstance(error, OSError)
        assert error.needed_bytes > 0
        assert error.free_bytes is not None
        assert str(error.needed_bytes) in str(error) or "B" in str(error)


def test_short_writes_are_completed_or_reported(tmp_path: Path) -> None:
    """A write that takes fewer bytes than given never passes for a whole one."""
    quiet()
    for k in range(1, _count(tmp_path) + 1):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        error = _attempt(run, k, "short", errno.EIO)
        steps = check_run(run, must={5, 10}, may={5, 10, 12})
        assert error is not None or 12 in steps, f"call {k}"
        check_next_save(run, 40)
        check_debris(run)


def test_i10_an_answer_that_is_lost_deletes_nothing(tmp_path: Path) -> None:
    """The call was done and its answer lost: old snapshots stay, the new one is whole or absent."""
    quiet()
    unknown = 0
    for k in range(1, _count(tmp_path) + 1):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        error = _attempt(run, k, "after", errno.EIO)
        steps = check_run(run, must={5, 10}, may={5, 10, 12})
        assert error is not None or 12 in steps, f"call {k}"
        unknown += error is not None and 12 in steps
        check_next_save(run, 40)
        check_debris(run)
    assert unknown <= 5


def test_overwrite_with_every_call_failing_keeps_old_or_new(tmp_path: Path) -> None:
    """An overwrite that fails leaves the old snapshot as it was, or the new one."""
    quiet()
    reference = snapshot_url(str(tmp_path / "reference"), 10)
    waypost.save(reference, sample_state(10), step=10)

    def overwrite(place: Any) -> None:
        waypost.save(place, sample_state(11), step=10, overwrite=True)

    for k in range(1, len(calls_of(reference, overwrite)) + 1):
        url = snapshot_url(str(tmp_path / f"run-{k}"), 10)
        waypost.save(url, sample_state(10), step=10)
        reported = True
        try:
            overwrite(faulty(url, at(k, "error", errno.EIO)))
        except waypost.WaypostError:
            reported = False
        assert waypost.open(url).verify().ok
        found = waypost.open(url).state_dict("progress")["step"]
        assert found == 11 if reported else found in (10, 11)
        waypost.save(url, sample_state(12), step=10, overwrite=True)
        assert waypost.open(url).state_dict("progress")["step"] == 12


def test_prune_with_every_call_failing_keeps_what_it_should(tmp_path: Path) -> None:
    """A prune that fails loses nothing it was to keep, and the next prune finishes the work."""
    quiet()
    reference = str(tmp_path / "reference")
    _prepare(reference)

    def prune(place: Any) -> None:
        waypost.prune(place, keep=waypost.KeepLast(1), dry_run=False)

    for k in range(1, len(calls_of(reference, prune)) + 1):
        run = str(tmp_path / f"run-{k}")
        _prepare(run)
        with contextlib.suppress(waypost.WaypostError):
            prune(faulty(run, at(k, "error", errno.EIO)))
        check_run(run, must={10}, may={5, 10})
        prune(run)
        assert set(committed(run)) == {10}
        check_debris(run)


@pytest.mark.parametrize("name", ["EIO", "EACCES"])
def test_load_with_every_call_failing_touches_nothing_or_says_what(
    name: str, tmp_path: Path
) -> None:
    """A read that fails is an error at the caller; a target is never quietly half loaded."""
    quiet()
    url = snapshot_url(str(tmp_path / "run"), 10)
    waypost.save(url, sample_state(10), step=10)

    def target() -> dict[str, Any]:
        into = sample_state(99)
        into["model"]["w"].zero_()
        into["model"]["b"].zero_()
        return into

    def load(place: Any) -> None:
        waypost.load(place, target())

    for k in range(1, len(calls_of(url, load)) + 1):
        into = target()
        with pytest.raises(waypost.WaypostError) as caught:
            waypost.load(faulty(url, at(k, "error", ERRNOS[name])), into)
        numbers = {cause.errno for cause in _chain(caught.value) if isinstance(cause, OSError)}
        assert ERRNOS[name] in numbers, f"call {k}: {caught.value!r}"
        waypost.load(url, into)
        assert into["progress"] == sample_state(10)["progress"]
