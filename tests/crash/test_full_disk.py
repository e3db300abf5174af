"""A real file system without space: a small tmpfs."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, files_under
from _kit.invariants import committed, quiet

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many bytes; needs the right to mount."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if not sys.platform.startswith("linux") or shutil.which("mount") is None:
            pytest.skip("mounting a tmpfs needs Linux")
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _state(step: int, size: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((size // 4,), float(step))}, "progress": {"step": step}}


def test_a_full_disk_is_reported_and_earlier_snapshots_stay(
    small_disk: Callable[[int], Path],
) -> None:
    """The third save does not fit: needed and free bytes, old ones whole, no leftovers."""
    quiet()
    run = small_disk(2 * MIB + MIB // 2) / "run"
    for step in (1, 2):
        waypost.save(str(run / f"step-{step:09d}"), _state(step, MIB), step=step)
    before = shutil.disk_usage(run).free
    with pytest.raises(waypost.StorageFullError) as caught:
        waypost.save(str(run / "step-000000003"), _state(3, MIB), step=3)
    assert caught.value.needed_bytes >= MIB
    assert 0 <= caught.value.free_bytes < MIB
    assert set(committed(str(run))) == {1, 2}
    for step in (1, 2):
        snapshot = waypost.open(str(run / f"step-{step:09d}"))
        assert snapshot.verify().ok
        assert_same(snapshot.state_dict("model"), _state(step, MIB)["model"])
    assert shutil.disk_usage(run).free >= before - 64 * 1024, "the failed attempt still takes space"


def test_after_space_is_made_the_same_save_works(small_disk: Callable[[int], Path]) -> None:
    """Training goes on: prune, save again, done."""
    quiet()
    run = str(small_disk(2 * MIB + MIB // 2) / "run")
    for step in (1, 2):
        waypost.save(f"{run}/step-{step:09d}", _state(step, MIB), step=step)
    with pytest.raises(waypost.StorageFullError):
        waypost.save(f"{run}/step-000000003", _state(3, MIB), step=3)
    waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)
    waypost.save(f"{run}/step-000000003", _state(3, MIB), step=3)
    assert set(committed(run)) == {2, 3}


@pytest.mark.slow
def test_whatever_space_is_left_the_outcome_is_whole_or_absent(
    small_disk: Callable[[int], Path],
) -> None:
    """The disk ends in the data, in the index, in the manifest, or nowhere: never in between."""
    quiet()
    disk = small_disk(400 * 1024)
    ballast = disk / "ballast"
    outcomes = set()
    for filled in range(0, 400 * 1024, 12 * 1024):
        run = disk / "run"
        shutil.rmtree(run, ignore_errors=True)
        ballast.unlink(missing_ok=True)
        waypost.save(str(run / "step-000000001"), _state(1, 8192), step=1)
        free = shutil.disk_usage(disk).free
        ballast.write_bytes(bytes(min(filled, free)))
        try:
            waypost.save(str(run / "step-000000002"), _state(2, 64 * 1024), step=2)
            saved = True
        except waypost.StorageFullError:
            saved = False
        outcomes.add(saved)
        ballast.unlink()
        assert set(committed(str(run))) == ({1, 2} if saved else {1})
        for url in committed(str(run)).values():
            assert waypost.open(url).verify().ok
        waypost.save(str(run / "step-000000003"), _state(3, 8192), step=3)
    assert outcomes == {True, False}


def test_b011_a_small_temporary_directory_is_not_used(
    small_disk: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR on a 1 MiB disk: a save of 5 MiB elsewhere succeeds and writes nothing there."""
    temporary = small_disk(MIB)
    monkeypatch.setenv("TMPDIR", str(temporary))
    url = str(tmp_path / "run" / "step-000000001")
    waypost.save(url, _state(1, 5 * MIB), step=1)
    assert waypost.open(url).verify().ok
    assert files_under(temporary) == []
