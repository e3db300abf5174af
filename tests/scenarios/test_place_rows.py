"""Permissions, storage, moved folders.

B072 B108 B162 B166, and folders that are moved, copied, tarred or mounted read-only
"""

import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import waypost
from _kit import assert_same, in_child, tree_of
from _kit.invariants import (
    advance,
    check_next_save,
    check_run,
    committed,
    quiet,
    read_state,
    sample_state,
    save_step,
    snapshot_url,
)


def _modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077, 0o027], ids=oct)
def test_b162_modes_follow_the_umask(mask: int, tmp_path: Path) -> None:
    """Files 0666 and directories 0777 without the umask's bits; never 0600 of a temporary file."""
    run = tmp_path / "run"

    def action() -> None:
        os.umask(mask)
        advance(str(run), 10)
        save_step(str(run), 20)
        save_step(str(run), 20, overwrite=True)

    in_child(action).expect_result()
    for name, mode in _modes(run).items():
        wanted = (0o777 if (run / name).is_dir() else 0o666) & ~mask
        assert mode & 0o777 == wanted, f"{name} has mode {mode:o}"


def test_b162_a_setgid_directory_hands_its_group_on(tmp_path: Path) -> None:
    """New directories below a setgid directory are setgid as the system makes them."""
    base = tmp_path / "shared"
    base.mkdir()
    base.chmod(0o2775)
    (base / "probe").mkdir()
    inherits = bool((base / "probe").stat().st_mode & stat.S_ISGID)
    in_child(lambda: (os.umask(0o002), advance(str(base / "run"), 1))[0]).expect_result()
    for path in [path for path in (base / "run").rglob("*") if path.is_dir()]:
        assert bool(path.stat().st_mode & stat.S_ISGID) == inherits


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Shows a folder read-only: by a mount where that is permitted, else by modes."""
    undo: list[Callable[[], Any]] = []

    def show(folder: Path) -> Path:
        view = tmp_path / "read-only"
        view.mkdir()
        commands = [
            ["mount", "--bind", str(folder), str(view)],
            ["mount", "-o", "remount,ro,bind", str(view)],
        ]
        if shutil.which("mount") and all(
            subprocess.run(command, capture_output=True, check=False).returncode == 0
            for command in commands
        ):
            undo.append(lambda: subprocess.run(["umount", "-l", str(view)], check=True))
            return view
        if os.geteuid() == 0:
            pytest.skip("root writes to read-only folders, and a mount is not permitted")
        for path in [folder, *folder.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
            undo.append(lambda path=path: path.chmod(path.stat().st_mode | 0o200))
        return folder

    yield show
    for action in undo:
        action()


@pytest.mark.slow
def test_b166_a_read_only_run_is_listed_verified_and_loaded(
    tmp_path: Path, read_only: Callable[[Path], Path]
) -> None:
    """Reading needs no lock file, no rebuild and no write."""
    run = tmp_path / "run"
    for step in (10, 20):
        advance(str(run), step)
    before = tree_of(run)
    view = str(read_only(run))
    assert sorted(committed(view)) == [10, 20]
    assert waypost.open(f"{view}@latest").step == 20
    assert waypost.open(snapshot_url(view, 10)).verify().ok
    target = sample_state(0)
    waypost.load(snapshot_url(view, 20), target)
    assert_same(target, sample_state(20))
    assert tree_of(run) == before


def test_b166_a_save_into_a_read_only_run_is_an_error_that_says_so(
    tmp_path: Path, read_only: Callable[[Path], Path]
) -> None:
    """A StorageError that names the place; what is there stays."""
    run = tmp_path / "run"
    save_step(str(run), 10)
    view = str(read_only(run))
    with pytest.raises(waypost.StorageError) as caught:
        save_step(view, 20)
    assert isinstance(caught.value, OSError)
    assert view in str(caught.value)
    assert list(committed(view)) == [10]


def _moved(source: Path, how: str, tmp_path: Path) -> Path:
    target = tmp_path / "elsewhere" / "copy of run"
    target.parent.mkdir()
    if how == "move":
        source.rename(target)
    elif how == "cp":
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    elif how == "rsync":
        if shutil.which("rsync") is None:
            pytest.skip("rsync is not installed")
        subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True)
    else:
        archive = tmp_path / "run.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(source, target.name)
        with tarfile.open(archive) as packed:
            packed.extractall(target.parent, filter="data")
    if how != "move":
        shutil.rmtree(source)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("how", ["move", "cp", "rsync", "tar"])
def test_a_moved_run_works_and_goes_on(how: str, tmp_path: Path) -> None:
    """No absolute path inside, no symlink: moved, copied or packed, it loads and resumes."""
    source = tmp_path / "run"
    for step in (10, 20):
        advance(str(source), step)
    run = str(_moved(source, how, tmp_path))
    check_run(run, must={10, 20}, may={10, 20})
    assert waypost.latest(run) == snapshot_url(run, 20)
    advance(run, 30, keep=waypost.KeepLast(2))
    assert sorted(committed(run)) == [20, 30]
    assert not source.exists(), "something was written to the old place"


def test_a_moved_snapshot_works_alone(tmp_path: Path) -> None:
    """One snapshot directory, taken out of its run and renamed, is complete."""
    save_step(str(tmp_path / "run"), 10)
    Path(snapshot_url(str(tmp_path / "run"), 10)).rename(tmp_path / "best model")
    assert_same(read_state(str(tmp_path / "best model")), sample_state(10))
    assert waypost.open(str(tmp_path / "best model")).verify().ok


def test_no_absolute_path_is_stored(tmp_path: Path) -> None:
    """Neither the place of the run nor the working directory is in any file of a snapshot."""
    run = tmp_path / "a-very-peculiar-folder-name"
    save_step(str(run), 10)
    for file in run.rglob("*"):
        if file.is_file():
            assert b"a-very-peculiar-folder-name" not in file.read_bytes(), file


def test_b072_a_directory_that_cannot_be_synced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a directory is refused, as on Windows: saved all the same, or reported."""
    quiet()
    run = str(tmp_path / "run")
    save_step(run, 10)
    real_open = os.open

    def refusing(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if os.path.isdir(path) and not keywords.get("dir_fd"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refusing)
    try:
        save_step(run, 20)
        saved = True
    except waypost.StorageError:
        saved = False
    monkeypatch.undo()
    check_run(run, must={10, 20} if saved else {10}, may={10, 20})
    check_next_save(run, 30)


@pytest.mark.slow
def test_b072_a_rename_that_is_refused_at_first_is_tried_again_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.replace, os.rename and os.link fail three times, as with an open reader on Windows."""
    quiet()
    run = str(tmp_path / "run")
    save_step(run, 10)
    failures = {"left": 3}
    for name in ("replace", "rename", "link"):
        real = getattr(os, name)

        def refusing(*arguments: Any, real: Any = real, **keywords: Any) -> Any:
            if failures["left"]:
                failures["left"] -= 1
                raise PermissionError(13, "Permission denied")
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, name, refusing)
    try:
        advance(run, 20)
        saved = True
    except waypost.StorageError:
        saved = False
    monkeypatch.undo()
    check_run(run, must={10, 20} if saved else {10}, may={10, 20})
    check_next_save(run, 30)


def test_b108_mkdir_that_claims_the_directory_exists_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EEXIST for a directory that cannot be seen yet (network file systems): retried, saved."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    real_mkdir = os.mkdir
    failures = {"left": 2}

    def lying(path: Any, *arguments: Any, **keywords: Any) -> None:
        real_mkdir(path, *arguments, **keywords)
        if failures["left"]:
            failures["left"] -= 1
            raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(os, "mkdir", lying)
    save_step(run, 20)
    assert failures["left"] == 0
    monkeypatch.undo()
    check_run(run, must={10, 20}, may={10, 20})
