"""Retention deletes the wrong thing.

B022 (without best) B026 B032 B038 B040 B041 B060 B132
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same, files_under, tree_of
from _kit.invariants import (
    advance,
    check_latest,
    check_next_save,
    committed,
    put,
    sample_state,
    save_step,
    snapshot_url,
)


@pytest.mark.slow
def test_b022_the_oldest_go_first(tmp_path: Path) -> None:
    """keep_last=3, saved one by one: at each point the newest three are on disk."""
    run = str(tmp_path / "run")
    saved: list[int] = []
    state = sample_state(0)
    policy = waypost.EverySteps(1)
    with waypost.Checkpointer(
        run, state, save_every=policy, keep=waypost.KeepLast(3), save_on=()
    ) as checkpointer:
        for step in range(1, 9):
            put(state, step)
            checkpointer.step_done()
            saved.append(step)
            assert sorted(committed(run)) == saved[-3:]


@pytest.mark.slow
def test_b022_quotas_are_a_union(tmp_path: Path) -> None:
    """KeepLast(2) | KeepEvery(steps=4): what either keeps stays."""
    run = str(tmp_path / "run")
    keep = waypost.KeepLast(2) | waypost.KeepEvery(steps=4)
    state = sample_state(0)
    with waypost.Checkpointer(
        run, state, save_every=waypost.EverySteps(1), keep=keep, save_on=()
    ) as checkpointer:
        for step in range(1, 12):
            put(state, step)
            checkpointer.step_done()
    assert sorted(committed(run)) == [4, 8, 10, 11]


def test_b026_only_what_waypost_made_is_ever_removed(tmp_path: Path) -> None:
    """Look-alikes next to the snapshots are neither counted nor touched (S4)."""
    run = tmp_path / "run"
    foreign = [
        "step-500-keep",
        "step-500.bak",
        "my-step-500",
        ".ipynb_checkpoints",
        "step-",
        "step-abc",
        "step-000000005.old",
        "backup of step-000000005",
        "notes",
    ]
    for step in (1, 2, 3):
        save_step(str(run), step)
    for name in foreign:
        (run / name).mkdir()
        (run / name / "file.txt").write_text(name)
    (run / "step-40").write_text("a file with the name of a step")
    (run / "step-000000041").write_text("another one")
    shutil.copytree(snapshot_url(str(run), 1), run / "step-000000001.bak")
    before = {name: tree_of(run / name) for name in [*foreign, "step-000000001.bak"]}
    waypost.prune(str(run), keep=waypost.KeepLast(1), debris=True, dry_run=False)
    assert sorted(committed(str(run))) == [3]
    assert {name: tree_of(run / name) for name in before} == before
    assert (run / "step-40").read_text() == "a file with the name of a step"
    assert (run / "step-000000041").read_text() == "another one"
    check_next_save(str(run), 60)


def test_b026_a_folder_of_the_right_name_that_waypost_did_not_fill_is_left_alone(
    tmp_path: Path,
) -> None:
    """`step-000000030/` with the user's own file inside survives every prune."""
    run = tmp_path / "run"
    save_step(str(run), 10)
    save_step(str(run), 20)
    mine = run / "step-000000005" / "my-notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    inside = Path(snapshot_url(str(run), 10)) / "annotated.txt"
    inside.write_text("also mine")
    waypost.prune(str(run), keep=waypost.KeepLast(1), debris=True, dry_run=False)
    assert mine.read_text() == "mine"
    assert inside.read_text() == "also mine"
    assert sorted(committed(str(run))) == [20]


def test_b026_a_dry_run_removes_nothing_and_tells_the_same(tmp_path: Path) -> None:
    """The dry run names what the real one removes, with a reason for each that stays."""
    run = str(tmp_path / "run")
    for step in (1, 2, 3):
        save_step(run, step)
    before = tree_of(run)
    planned = waypost.prune(run, keep=waypost.KeepLast(1), dry_run=True)
    assert tree_of(run) == before
    done = waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)
    assert list(planned.removed) == list(done.removed)
    assert len(done.removed) == 2
    assert len(planned.kept) == 1
    assert "last" in str(planned.kept).lower()


def test_b032_the_snapshot_resumed_from_stays_until_a_newer_one_is_there(tmp_path: Path) -> None:
    """keep=1: resumed from 100, nothing may remove it before 110 is committed."""
    run = str(tmp_path / "run")
    for step in (50, 100):
        save_step(run, step)
    state = sample_state(0)
    keep = waypost.KeepLast(1)
    with waypost.Checkpointer(run, state, keep=keep, save_on=()) as checkpointer:
        assert checkpointer.step == 100
        assert checkpointer.resumed_from is not None
        assert 100 in committed(run)
        while checkpointer.step < 110:
            put(state, checkpointer.step + 1)
            checkpointer.step_done()
            assert 100 in committed(run)
        checkpointer.save()
        assert sorted(committed(run)) == [110]


def test_b032_resuming_from_an_older_step_protects_it(tmp_path: Path) -> None:
    """resume=50 in a run that has 100, keep=1: 50 is not pruned while nothing newer came of it."""
    run = str(tmp_path / "run")
    for step in (50, 100):
        save_step(run, step)
    state = sample_state(0)
    with waypost.Checkpointer(
        run, state, resume=50, keep=waypost.KeepLast(1), save_on=()
    ) as checkpointer:
        assert checkpointer.step == 50
        put(state, 51)
        checkpointer.step_done()
        assert 50 in committed(run)


def test_b032_another_runs_snapshot_is_never_removed(tmp_path: Path) -> None:
    """Started from a pretrained snapshot elsewhere: retention counts its own run only (I9)."""
    pretrained = snapshot_url(str(tmp_path / "pretrained"), 7)
    waypost.save(pretrained, {"model": nn.Linear(2, 2)}, step=7)
    before = tree_of(tmp_path / "pretrained")
    run = str(tmp_path / "run")
    for step in (1, 2):
        with waypost.Checkpointer(
            run, {"model": nn.Linear(2, 2)}, keep=waypost.KeepLast(1), init_from=pretrained
        ) as checkpointer:
            checkpointer.step_done()
        assert sorted(committed(run)) == [step]
    assert tree_of(tmp_path / "pretrained") == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["delete", "rename", "file", "empty", "manifest"])
def test_b038_a_snapshot_that_a_human_changed_does_not_stop_the_run(
    how: str, tmp_path: Path
) -> None:
    """Deleted, renamed, replaced by a file, emptied or robbed of its manifest: training goes on."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(
        run, state, save_every=waypost.EverySteps(1), keep=waypost.KeepLast(2), save_on=()
    ) as checkpointer:
        for step in (1, 2):
            put(state, step)
            checkpointer.step_done()
        victim = Path(snapshot_url(run, 1))
        if how == "manifest":
            (victim / "manifest.json").unlink()
        elif how == "rename":
            victim.rename(victim.with_name("kept-by-hand"))
        else:
            shutil.rmtree(victim)
        if how == "file":
            victim.write_text("a file now")
        if how == "empty":
            victim.mkdir()
        for step in (3, 4, 5):
            put(state, step)
            checkpointer.step_done()
    assert sorted(committed(run)) == [4, 5]
    check_latest(run)
    if how == "file":
        assert victim.read_text() == "a file now"
    if how == "rename":
        renamed = victim.with_name("kept-by-hand")
        assert waypost.open(str(renamed)).verify().ok


def test_b040_files_do_not_grow_with_the_number_of_resumes(tmp_path: Path) -> None:
    """Run, stop, resume, stop, resume with keep=1: as many files after the fifth as after one."""
    run = str(tmp_path / "run")
    advance(run, 1, keep=waypost.KeepLast(1))
    count = len(files_under(run))
    for step in range(2, 6):
        advance(run, step, keep=waypost.KeepLast(1))
        assert sorted(committed(run)) == [step]
        assert len(files_under(run)) == count
        check_latest(run)


@pytest.mark.slow
def test_b041_preemption_saves_fall_under_retention(tmp_path: Path) -> None:
    """Ten times preempted and resumed with keep=2: two snapshots are on disk, not ten."""
    run = str(tmp_path / "run")

    def preempted_at_once() -> None:
        state = sample_state(0)
        with waypost.Checkpointer(run, state, keep=waypost.KeepLast(2)) as checkpointer:
            put(state, checkpointer.step + 1)
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step_done()

    for expected in range(1, 11):
        with pytest.raises(waypost.Preempted) as caught:
            preempted_at_once()
        assert caught.value.step == expected
    assert sorted(committed(run)) == [9, 10]
    records = {record.step: record.reason for record in waypost.snapshots(run)}
    assert "SIGTERM" in records[10] or "signal" in records[10] or "preempt" in records[10]


def test_b060_latest_never_dangles_and_needs_no_link(tmp_path: Path) -> None:
    """Prune what LATEST named: it names the survivor; there is no symlink in the run."""
    run = str(tmp_path / "run")
    advance(run, 20)
    advance(run, 30, keep=waypost.KeepLast(1))
    check_latest(run)
    waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)
    check_latest(run)
    assert sorted(committed(run)) == [30]
    assert not [path for path in Path(run).rglob("*") if path.is_symlink()]
    shutil.rmtree(snapshot_url(run, 30))
    assert waypost.latest(run) is None


def test_b132_a_reader_of_a_pruned_snapshot_finishes_or_hears_that_it_is_gone(
    tmp_path: Path,
) -> None:
    """The trainer prunes what an eval job has open: whole numbers or a clear error, no crash."""
    run = str(tmp_path / "run")
    for step in (10, 20):
        save_step(run, step)
    reader = waypost.open(snapshot_url(run, 10))
    first = reader.read("model/b")
    waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)
    assert torch.equal(first, sample_state(10)["model"]["b"])
    try:
        restored = reader.state_dict("model")
    except waypost.NotFoundError as gone:
        assert "step-000000010" in str(gone)  # noqa: PT017
    else:
        assert_same(restored, sample_state(10)["model"])


def test_b132_a_directory_that_cannot_be_emptied_does_not_stop_the_trainer(tmp_path: Path) -> None:
    """A foreign file keeps the directory of a pruned snapshot: a warning, and training goes on."""
    run = str(tmp_path / "run")
    advance(run, 10)
    left = Path(snapshot_url(run, 10)) / "data" / ".nfs0001"
    left.write_text("held open elsewhere")
    advance(run, 20, keep=waypost.KeepLast(1))
    advance(run, 30, keep=waypost.KeepLast(1))
    assert sorted(committed(run)) == [30]
    assert left.read_text() == "held open elsewhere"
