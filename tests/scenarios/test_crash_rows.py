"""Crash, kill or full disk in the middle of a save.

B001 B003 B004 B008 B010 B018 B019 B028 B042 (B011 is in crash/test_full_disk.py)
"""

import errno
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same, files_under, in_child
from _kit.faults import Fault, at, calls_of, faulty
from _kit.invariants import (
    advance,
    check_debris,
    check_listed,
    check_next_save,
    check_run,
    committed,
    quiet,
    sample_state,
    save_step,
    snapshot_url,
)


def _heavy(step: int) -> dict[str, Any]:
    """A model with Adam state, large enough for several writes."""
    torch.manual_seed(step)
    model = nn.Linear(600, 500)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.slow
def test_b001_a_kill_during_the_write_never_lists_the_step(tmp_path: Path) -> None:
    """Killed at 10, 50 and 99 % of the writes and before the publish: 10 is latest, bit-exact."""
    quiet()
    states = {step: _heavy(step) for step in (10, 20)}
    reference = str(tmp_path / "reference" / "step-000000020")
    calls = calls_of(reference, lambda place: waypost.save(place, states[20], step=20))
    writes = [k for k, op in enumerate(calls, 1) if op == "write"]
    publish = max(k for k, op in enumerate(calls, 1) if op == "publish")
    points = {writes[int(len(writes) * share)] for share in (0.1, 0.5, 0.99)} | {publish}
    for k in sorted(points):
        run = str(tmp_path / f"run-{k}")
        waypost.save(snapshot_url(run, 10), states[10], step=10)
        target = snapshot_url(run, 20)
        outcome = in_child(
            lambda target=target, k=k: waypost.save(
                faulty(target, at(k, "kill")), states[20], step=20
            )
        )
        assert outcome.was_killed
        assert set(committed(run)) == {10}
        assert waypost.latest(run) == committed(run)[10]
        restored = _heavy(99)
        waypost.load(waypost.latest(run), restored)
        assert_same(restored["model"].state_dict(), states[10]["model"].state_dict())
        check_debris(run)


@pytest.mark.slow
def test_b003_one_flipped_byte_zeroed_block_or_lost_byte_is_named(
    tmp_path: Path, seed: int
) -> None:
    """In each data file in turn: `verify` names file and tensor, `load` refuses."""
    chooser = random.Random(seed)
    url = snapshot_url(str(tmp_path), 10)
    state = {name: {f"{name}.w": torch.rand(4000)} for name in ("model", "ema")}
    waypost.save(url, state, step=10)
    for file in [path for path in files_under(url) if path.suffix == ".safetensors"]:
        content = file.read_bytes()
        entry = "model" if file.name.startswith("model") else "ema"
        spot = chooser.randrange(4096, len(content))
        block = 4096 + 4096 * chooser.randrange((len(content) - 4096) // 4096)
        for damaged in (
            content[:spot] + bytes([content[spot] ^ 16]) + content[spot + 1 :],
            content[:block] + bytes(4096) + content[block + 4096 :],
            content[:-1],
        ):
            file.write_bytes(damaged)
            report = waypost.open(url).verify()
            assert not report.ok
            assert {problem.leaf for problem in report.problems} == {f"{entry}/{entry}.w"}
            assert all(file.name in problem.file for problem in report.problems)
            target = {"w": {f"{entry}.w": torch.zeros(4000)}}
            with pytest.raises(waypost.CorruptionError, match=f"{entry}.w"):
                waypost.load(url, {entry: target["w"]})
        file.write_bytes(content)


@pytest.mark.slow
def test_b004_resume_picks_the_newest_complete_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed after each storage call of the save, over and over: the job advances unattended."""
    reference = str(tmp_path / "reference")
    advance(reference, 10)
    count = len(calls_of(reference, lambda place: advance(place, 11)))
    run = str(tmp_path / "run")
    advance(run, 10)
    for k in range(1, count + 1):
        newest = max(committed(run))
        in_child(lambda k=k, newest=newest: advance(faulty(run, at(k, "kill")), newest + 1))
        assert max(committed(run)) in (newest, newest + 1)
    advance(run, max(committed(run)) + 1)
    assert max(committed(run)) > 10
    check_listed(run, {step: sample_state(step) for step in range(100)})


@pytest.mark.parametrize("look", ["empty", "half", "nul"])
def test_b008_a_broken_commit_record_is_skipped_with_a_reason(
    look: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty, half or NUL-filled manifest: the previous snapshot is used, no JSON traceback."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    save_step(run, 20)
    manifest = Path(snapshot_url(run, 20)) / "manifest.json"
    content = manifest.read_bytes()
    half = content[: len(content) // 2]
    manifest.write_bytes({"empty": b"", "half": half, "nul": bytes(len(content))}[look])
    assert set(committed(run)) == {10}
    caplog.set_level("INFO", logger="waypost")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        assert checkpointer.step == 10
    assert_same(state, sample_state(10))
    skipped = [record.getMessage() for record in caplog.records if "000020" in record.getMessage()]
    assert skipped, "the skipped snapshot is not in the log"
    check_next_save(run, 30)


def test_b008_a_run_whose_snapshots_are_all_broken_does_not_restart_from_zero(
    tmp_path: Path,
) -> None:
    """Snapshots exist and none can be used: ResumeError with a reason for each."""
    run = str(tmp_path / "run")
    for step in (10, 20):
        save_step(run, step)
        (Path(snapshot_url(run, step)) / "manifest.json").write_bytes(b"")
    with pytest.raises(waypost.ResumeError) as caught:
        waypost.Checkpointer(run, sample_state(0)).__enter__()
    assert len(caught.value.skipped) == 2
    assert all(reason for _, reason in caught.value.skipped)
    assert "step-000000010" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["middle", "last"])
def test_b010_a_full_disk_at_a_save_leaves_the_others_and_training_goes_on(
    failing: str, tmp_path: Path
) -> None:
    """ENOSPC in the third save: StorageFullError, earlier ones whole, the next save works."""
    quiet()
    run = str(tmp_path / "run")
    keep = waypost.KeepLast(2)
    reference = str(tmp_path / "reference")
    for step in (1, 2):
        advance(run, step, keep=keep)
        advance(reference, step, keep=keep)
    calls = calls_of(reference, lambda place: advance(place, 3, keep=keep))
    writes = [k for k, op in enumerate(calls, 1) if op == "write"]
    k = writes[len(writes) // 2] if failing == "middle" else writes[0]
    with pytest.raises(waypost.StorageFullError) as caught:
        advance(faulty(run, at(k, "error", errno.ENOSPC)), 3, keep=keep)
    assert caught.value.needed_bytes > 0
    assert caught.value.free_bytes is not None
    check_run(run, must={1, 2}, may={1, 2})
    advance(run, 4, keep=keep)
    assert set(committed(run)) == {2, 4}
    check_debris(run)


@pytest.mark.slow
def test_b018_a_write_that_fails_once_leaves_no_garbage_in_front(tmp_path: Path) -> None:
    """One write error, then none: the error surfaces or the result verifies; the retry does."""
    quiet()
    for op_call in range(1, 4):
        run = str(tmp_path / f"run-{op_call}")
        fault = Fault(op="write", call=op_call, action="error", errno=errno.EIO)
        url = snapshot_url(run, 10)
        try:
            waypost.save(faulty(url, fault), sample_state(10), step=10)
        except waypost.StorageError:
            assert committed(run) == {}
            save_step(run, 10)
        check_run(run, must={10}, may={10})


def _is_found(url: str, name: str) -> bool:
    """Whether `open` or `verify` reports damage of the named file."""
    try:
        problems = waypost.open(url).verify().problems
    except waypost.CorruptionError as error:
        return name in str(error)
    return bool(problems) and all(name in problem.file for problem in problems)


def test_b019_a_page_lost_at_a_power_cut_is_found_by_its_digest(tmp_path: Path) -> None:
    """Zeros in place of a page, with the file's name and size right: found, and named."""
    url = snapshot_url(str(tmp_path), 10)
    waypost.save(url, {"model": {"w": torch.rand(8192)}}, step=10)
    for file in [path for path in files_under(url) if path.suffix == ".safetensors"]:
        content = file.read_bytes()
        for page in range(0, len(content), 4096):
            file.write_bytes(content[:page] + bytes(4096) + content[page + 4096 :])
            assert _is_found(url, file.name), f"{file.name}, page at {page}"
        file.write_bytes(bytes(len(content)))
        assert _is_found(url, file.name)
        file.write_bytes(content)


def test_b028_the_old_snapshot_goes_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    """keep=1 and a failing second save, with a foreign folder in the run: the first one stays."""
    quiet()
    run = str(tmp_path / "run")
    keep = waypost.KeepLast(1)
    advance(run, 1, keep=keep)
    (Path(run) / "notes").mkdir()
    (Path(run) / "notes" / "a.txt").write_text("mine")
    reference = str(tmp_path / "reference")
    advance(reference, 1, keep=keep)
    calls = calls_of(reference, lambda place: advance(place, 2, keep=keep))
    publish = calls.index("publish") + 1
    for k in range(1, publish + 1):
        try:
            advance(faulty(run, at(k, "error", errno.ENOSPC)), 2, keep=keep)
        except waypost.WaypostError:
            assert 1 in committed(run)
        else:
            break
    advance(run, 3, keep=keep)
    assert set(committed(run)) == {3}
    assert (Path(run) / "notes" / "a.txt").read_text() == "mine"


def test_b042_failed_saves_do_not_count_towards_the_quota(tmp_path: Path) -> None:
    """keep=2; 10 is good; 20, 30 and 40 fail before their commit: 10 survives."""
    quiet()
    run = str(tmp_path / "run")
    keep = waypost.KeepLast(2)
    advance(run, 10, keep=keep)
    for step in (20, 30, 40):
        fault = Fault(op="publish", call=1, action="error", errno=errno.EIO)
        url = snapshot_url(run, step)
        with pytest.raises(waypost.WaypostError):
            waypost.save(faulty(url, fault), sample_state(step), step=step)
        waypost.prune(run, keep=keep, dry_run=False)
        assert set(committed(run)) == {10}
    check_run(run, must={10}, may={10})
    advance(run, 50, keep=keep)
    assert set(committed(run)) == {10, 50}
