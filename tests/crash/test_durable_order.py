"""The real system calls of a save: data durable before the manifest, directories after."""

import os
from pathlib import Path

import pytest
import torch

import waypost
from _kit.invariants import advance, save_step, snapshot_url
from _kit.syscalls import CREATES, PUBLISHES, REMOVES, SYNCS, WRITES, Call, traced

pytestmark = [pytest.mark.strace, pytest.mark.slow]


def _publish(calls: list[Call], manifest: str) -> Call:
    """The one call that gives the manifest its name."""
    found = [call for call in calls if call.name in PUBLISHES and call.paths[-1:] == [manifest]]
    assert len(found) == 1, f"{len(found)} calls publish {manifest}"
    return found[0]


def _is_synced(calls: list[Call], path: str, after: int, before: int) -> bool:
    return any(
        call.name in SYNCS and call.on == path and after < call.begun and call.ended < before
        for call in calls
    )


def _last_write(calls: list[Call], path: str) -> int:
    writes = [call.ended for call in calls if call.name in WRITES and call.on == path]
    assert writes, f"no write to {path} was seen"
    return max(writes)


def _made_in(calls: list[Call], root: str) -> dict[str, int]:
    """Directory to the line of the last call that put a new name into it."""
    made: dict[str, int] = {}
    for call in calls:
        creates = "mkdir" in call.name or "O_CREAT" in call.arguments
        if not (call.name in PUBLISHES or (call.name in CREATES and creates)):
            continue
        target = call.paths[-1]
        if target.startswith(root):
            made[os.path.dirname(target)] = call.ended
    return made


def _check_save(calls: list[Call], root: str, snapshot: str) -> None:
    publish = _publish(calls, f"{snapshot}/manifest.json")
    source = publish.paths[0]
    assert _is_synced(calls, source, _last_write(calls, source), publish.begun), "manifest"
    data = [str(path) for path in Path(snapshot, "data").rglob("*") if path.is_file()]
    assert data
    written = {call.on for call in calls if call.name in WRITES}
    for path in data:
        if path in written:
            assert _is_synced(calls, path, _last_write(calls, path), publish.begun), path
    assert [path for path in data if path in written], "no data file was written in this trace"
    end = 10**9
    for folder, line in _made_in(calls, root).items():
        assert _is_synced(calls, folder, line, end), f"{folder} changed and was not synced"
    before = [call for call in calls if call.ended < publish.begun]
    for folder, line in _made_in(before, root).items():
        if folder.startswith(f"{snapshot}/data") or not folder.startswith(snapshot):
            assert _is_synced(calls, folder, line, publish.begun), f"{folder} before the commit"


def test_data_is_durable_before_the_manifest_and_directories_after(tmp_path: Path) -> None:
    """write, sync, publish, sync the directories: in a run that did not exist before."""
    root = str(tmp_path / "new" / "deeper" / "run")
    outcome, calls = traced(lambda: save_step(root, 10), tmp_path)
    assert outcome.expect_result().nbytes > 0
    _check_save(calls, str(tmp_path / "new"), snapshot_url(root, 10))
    parents = {call.on for call in calls if call.name in SYNCS}
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "deeper")} <= parents


def test_large_files_are_durable_too(tmp_path: Path) -> None:
    """The path of large tensors (direct I/O, several writers) keeps the same order."""
    snapshot = str(tmp_path / "big")
    state = {"model": {"w": torch.arange(3_000_000.0)}, "ema": {"w": torch.ones(2_000_000)}}
    outcome, calls = traced(lambda: waypost.save(snapshot, state), tmp_path)
    outcome.expect_result()
    _check_save(calls, snapshot, snapshot)


def test_overwrite_publishes_before_the_old_data_goes(tmp_path: Path) -> None:
    """The new manifest is durable before one byte of the old attempt is removed."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    snapshot = snapshot_url(run, 10)
    old = {str(path) for path in Path(snapshot, "data").rglob("*") if path.is_file()}
    outcome, calls = traced(lambda: save_step(run, 10, overwrite=True), tmp_path)
    outcome.expect_result()
    _check_save(calls, run, snapshot)
    publish = _publish(calls, f"{snapshot}/manifest.json")
    removed = [call for call in calls if call.name in REMOVES and set(call.paths) & old]
    assert len(removed) == len(old)
    assert all(call.begun > publish.ended for call in removed)
    first = min(call.begun for call in removed)
    assert _is_synced(calls, snapshot, publish.ended, first), "swap not durable before removal"


def test_i3_prune_removes_the_manifest_first(tmp_path: Path) -> None:
    """Manifest away, made durable, then the data: never a manifest without its data."""
    run = str(tmp_path / "run")
    for step in (10, 20, 30):
        save_step(run, step)
    snapshot = snapshot_url(run, 10)
    data = {str(path) for path in Path(snapshot, "data").rglob("*") if path.is_file()}
    action = lambda: waypost.prune(run, keep=waypost.KeepLast(2), dry_run=False)  # noqa: E731
    outcome, calls = traced(action, tmp_path)
    outcome.expect_result()
    manifest = f"{snapshot}/manifest.json"
    gone = [
        call
        for call in calls
        if (call.name in REMOVES or call.name in PUBLISHES) and call.paths[:1] == [manifest]
    ]
    removed = [call for call in calls if call.name in REMOVES and set(call.paths) & data]
    assert len(gone) == 1
    assert len(removed) == len(data)
    first = min(call.begun for call in removed)
    assert gone[0].ended < first
    assert _is_synced(calls, snapshot, gone[0].ended, first), "removal of the manifest not durable"


def test_i2_a_named_file_is_never_written_again(tmp_path: Path) -> None:
    """Later saves, an overwrite of another step and a prune leave the files of step 20 alone."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    save_step(run, 20)
    kept = snapshot_url(run, 20)

    def later() -> None:
        save_step(run, 10, overwrite=True)
        advance(run, 30, keep=waypost.KeepLast(2))

    outcome, calls = traced(later, tmp_path)
    outcome.expect_result()
    touched = [call for call in calls if call.name in WRITES and call.on.startswith(f"{kept}/")]
    opened = [
        call
        for call in calls
        if call.name in CREATES
        and any(path.startswith(f"{kept}/data") for path in call.paths)
        and ("O_WRONLY" in call.arguments or "O_RDWR" in call.arguments)
    ]
    assert touched == []
    assert opened == []


def test_not_durable_means_no_sync_of_data(tmp_path: Path) -> None:
    """`durable=False` is honoured: the trace shows no sync of a data file."""
    snapshot = str(tmp_path / "fast")
    options = waypost.Options(durable=False)
    state = {"model": {"w": torch.ones(100)}}
    outcome, calls = traced(lambda: waypost.save(snapshot, state, options=options), tmp_path)
    outcome.expect_result()
    assert not [call for call in calls if call.name in SYNCS and "/data/" in call.on]
    assert waypost.open(snapshot).verify().ok
