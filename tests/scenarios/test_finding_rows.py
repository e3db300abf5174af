"""Finding the latest; names, links, moved folders, odd steps.

B056 B059 B064 B066 B068 B069 B071 B074 B095 B169
"""

import math
import os
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waypost
from _kit import PLACES, assert_same, new_place
from _kit.invariants import (
    advance,
    check_latest,
    check_next_save,
    committed,
    read_state,
    sample_state,
    save_step,
    snapshot_url,
)


@pytest.mark.parametrize("place", PLACES)
def test_b056_steps_are_ordered_as_numbers(place: str, tmp_path: Path) -> None:
    """9, 10, 99, 100, 1000 and beyond the padding: listed, pruned and resumed in that order."""
    run = new_place(place, tmp_path, "run")
    steps = [9, 10, 99, 100, 1000, 2 * 10**9, 10**12]
    for step in reversed(steps):
        save_step(run, step)
    listed = [record.step for record in waypost.snapshots(run)]
    assert listed in (steps, steps[::-1])
    check_latest(run)
    waypost.prune(run, keep=waypost.KeepLast(3), dry_run=False)
    assert sorted(committed(run)) == [1000, 2 * 10**9, 10**12]


@pytest.mark.parametrize("written", ["step-9", "step-00010", "step-100"])
def test_b056_names_without_padding_are_numbers_too(written: str, tmp_path: Path) -> None:
    """A snapshot saved under a shorter name of the same form counts by its number."""
    run = tmp_path / "run"
    number = int(written.split("-")[1])
    waypost.save(str(run / written), sample_state(number), step=number)
    save_step(str(run), 50)
    assert sorted(committed(str(run))) == sorted([number, 50])
    check_latest(str(run))


@pytest.mark.parametrize("alias", ["itself", "chain"])
def test_b059_links_that_lead_in_a_circle_do_no_harm(alias: str, tmp_path: Path) -> None:
    """A symlink loop beside the snapshots: listing works, opening it is a clear error."""
    run = tmp_path / "run"
    save_step(str(run), 10)
    loop = run / "step-000000020"
    if alias == "itself":
        loop.symlink_to(loop.name)
    else:
        (run / "step-000000030").symlink_to(loop.name)
        loop.symlink_to("step-000000030")
    assert list(committed(str(run))) == [10]
    check_latest(str(run))
    with pytest.raises(waypost.WaypostError):
        waypost.open(str(loop))
    check_next_save(str(run), 40)


def test_b064_an_unfinished_newer_directory_is_not_the_latest(tmp_path: Path) -> None:
    """Committed 10; 20 empty, 25 with data and no manifest: `latest` is 10."""
    run = tmp_path / "run"
    advance(str(run), 10)
    (run / "step-000000020").mkdir()
    data = run / "step-000000025" / "data" / "abc"
    data.mkdir(parents=True)
    (data / "model.r00000-000.safetensors").write_bytes(b"half")
    assert waypost.latest(str(run)) == committed(str(run))[10]
    assert waypost.open(f"{run}@latest").step == 10
    state = sample_state(0)
    with waypost.Checkpointer(str(run), state, save_on=()) as checkpointer:
        assert checkpointer.step == 10
    check_next_save(str(run), 20)


POINTERS: dict[str, bytes | None] = {
    "deleted": None,
    "empty": b"",
    "nul": b"\0" * 64,
    "garbage": b"\xff\xfe not json",
    "other_json": b"[1, 2]",
    "absolute": b'{"name": "/etc/passwd", "step": 99}',
    "outside": b'{"name": "../other/step-000000099", "step": 99}',
    "itself": b'{"name": "LATEST", "step": 99}',
    "plain_name": b"step-000000010",
}


@pytest.mark.parametrize("pointer", POINTERS)
def test_b066_the_pointer_is_a_hint(pointer: str, tmp_path: Path) -> None:
    """Edited or deleted by hand: `latest` is what is on disk (I4)."""
    run = tmp_path / "run"
    for step in (10, 20):
        advance(str(run), step)
    content = POINTERS[pointer]
    (run / "LATEST").unlink()
    if content is not None:
        (run / "LATEST").write_bytes(content)
    assert waypost.latest(str(run)) == committed(str(run))[20]
    assert waypost.open(f"{run}@latest").step == 20
    check_next_save(str(run), 30)


def test_b066_a_pointer_to_an_older_or_removed_step_is_corrected(tmp_path: Path) -> None:
    """The pointer of an earlier time, put back: the newest committed snapshot counts."""
    run = tmp_path / "run"
    advance(str(run), 10)
    old = (run / "LATEST").read_bytes()
    advance(str(run), 20, keep=waypost.KeepLast(1))
    assert sorted(committed(str(run))) == [20]
    (run / "LATEST").write_bytes(old)
    assert waypost.latest(str(run)) == committed(str(run))[20]


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "absent"])
def test_b068_auto_starts_fresh_and_says_so(
    exists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """resume="auto" where nothing is: step 0, one log line."""
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    caplog.set_level("INFO", logger="waypost")
    with waypost.Checkpointer(str(run), sample_state(0), save_on=()) as checkpointer:
        assert checkpointer.step == 0
        assert checkpointer.resumed_from is None
    assert any("run" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "absent"])
@pytest.mark.parametrize("resume", ["must", "latest", 5])
def test_b068_must_needs_a_snapshot(resume: Any, exists: bool, tmp_path: Path) -> None:
    """resume="must", "latest" or a step where nothing is: NotFoundError."""
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    with pytest.raises(waypost.NotFoundError):
        waypost.Checkpointer(str(run), sample_state(0), resume=resume).__enter__()


def test_b068_false_refuses_a_run_that_has_snapshots(tmp_path: Path) -> None:
    """resume=False never starts over on top of somebody's run."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    with pytest.raises(waypost.AlreadyExistsError):
        waypost.Checkpointer(run, sample_state(0), resume=False).__enter__()
    assert list(committed(run)) == [10]


NAMES = ["val/loss", "a\\b", "x:y", "..", "", "n" * 300, "a\nb", "\U0001f4a9", "%s", "{step}", "."]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_b069_metric_names_are_data(name: str, tmp_path: Path) -> None:
    """Any metric name returns as it was, or is refused at the call; none becomes a path."""
    run = tmp_path / "run"
    url = snapshot_url(str(run), 10)
    try:
        waypost.save(url, sample_state(10), step=10, metrics={name: 0.5})
    except ValueError:
        assert committed(str(run)) == {}
    else:
        assert dict(waypost.open(url).metrics) == {name: 0.5}
        (record,) = waypost.snapshots(str(run))
        assert dict(record.metrics) == {name: 0.5}
    assert [path.name for path in tmp_path.iterdir()] in (["run"], [])


def test_b069_metrics_of_any_number_type_keep_their_value(tmp_path: Path) -> None:
    """Python, NumPy and 0-d tensor numbers; NaN and infinities; the manifest stays valid JSON."""
    url = snapshot_url(str(tmp_path), 1)
    metrics = {
        "python": 0.1,
        "int": 3,
        "numpy": np.float32(0.5),
        "tensor": torch.tensor(0.25),
        "nan": float("nan"),
        "inf": float("inf"),
        "minus": float("-inf"),
        "tiny": 5e-324,
    }
    waypost.save(url, sample_state(1), step=1, metrics=metrics)
    read = waypost.open(url).metrics
    assert list(read) == list(metrics)
    assert math.isnan(read["nan"])
    assert read["inf"] == math.inf
    assert read["minus"] == -math.inf
    assert (read["python"], read["int"], read["numpy"], read["tensor"]) == (0.1, 3, 0.5, 0.25)
    assert read["tiny"] == 5e-324


@pytest.mark.parametrize("value", ["0.5", None, [1], 1j], ids=repr)
def test_b069_a_metric_that_is_no_number_is_refused(value: Any, tmp_path: Path) -> None:
    """Refused at the call, by name."""
    url = snapshot_url(str(tmp_path), 1)
    with pytest.raises((TypeError, ValueError), match="loss"):
        waypost.save(url, sample_state(1), step=1, metrics={"loss": value})
    assert committed(str(tmp_path)) == {}


PATHS = [
    "测试/тест/\U0001f4a9",
    unicodedata.normalize("NFC", "\u00e9t\u00e9"),
    unicodedata.normalize("NFD", "\u00e9t\u00e9"),
    "with spaces and *?[x]",
    "percent %20 %s {step}",
    "quote'\"",
    "a#b;c&d",
    "-dash",
    "@at",
    "colon:x",
]


@pytest.mark.parametrize("name", PATHS)
def test_b071_any_path_works(name: str, tmp_path: Path) -> None:
    """Non-ASCII, globs, spaces, percent signs: save, list, latest, load, verify, prune."""
    run = str(tmp_path / name)
    for step in (1, 2):
        save_step(run, step)
    assert sorted(committed(run)) == [1, 2]
    check_latest(run)
    assert_same(read_state(snapshot_url(run, 2)), sample_state(2))
    assert waypost.open(snapshot_url(run, 2)).verify().ok
    waypost.prune(run, keep=waypost.KeepLast(1), dry_run=False)
    assert sorted(committed(run)) == [2]
    advance(run, 3)
    assert sorted(committed(run)) == [2, 3]


def test_b071_paths_may_be_objects_relative_or_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Path, a relative path and a file URL name the same snapshot."""
    monkeypatch.chdir(tmp_path)
    waypost.save(tmp_path / "snap", sample_state(1), step=1)
    for url in (
        tmp_path / "snap",
        "snap",
        "./snap",
        f"file://{tmp_path}/snap",
        f"{tmp_path}/snap/",
    ):
        assert waypost.open(url).step == 1
    waypost.save("relative/run/step-000000002", sample_state(2), step=2)
    os.chdir("/")
    assert waypost.open(tmp_path / "relative/run/step-000000002").step == 2


def test_b074_a_metric_that_was_not_given_is_absent(tmp_path: Path) -> None:
    """No made-up zero: what was not measured is not there."""
    run = str(tmp_path / "run")
    save_step(run, 10, metrics={"loss": 0.5})
    save_step(run, 20)
    by_step = {record.step: dict(record.metrics) for record in waypost.snapshots(run)}
    assert by_step == {10: {"loss": 0.5}, 20: {}}


def test_b095_numbering_continues_after_a_load(tmp_path: Path) -> None:
    """Saved three times, resumed, saved: no clash with what is there."""
    run = str(tmp_path / "run")
    for step in (1, 2, 3):
        advance(run, step)
    advance(run, 4)
    assert sorted(committed(run)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "number"),
    [(0, 0), (10**18, 10**18), (np.int64(5), 5), (np.uint8(7), 7), (torch.tensor(5), 5)],
    ids=repr,
)
def test_b169_whole_numbers_of_any_kind_are_steps(given: Any, number: int, tmp_path: Path) -> None:
    """0, large ones, NumPy integers and integer tensors; stored as a plain int."""
    url = str(tmp_path / "snap")
    waypost.save(url, sample_state(1), step=given)
    assert waypost.open(url).step == number
    assert type(waypost.open(url).step) is int


@pytest.mark.parametrize(
    "given", [-1, 2**63, 5.0, True, "5", np.float32(5), torch.tensor(5.0), torch.ones(2)], ids=repr
)
def test_b169_everything_else_is_refused_before_anything_is_written(
    given: Any, tmp_path: Path
) -> None:
    """Negative, too large, float, bool, text, tensors of other kinds: ValueError."""
    with pytest.raises(ValueError, match="step"):
        waypost.save(str(tmp_path / "snap"), sample_state(1), step=given)
    assert list(tmp_path.iterdir()) == []


def test_b169_the_same_place_twice_needs_overwrite(tmp_path: Path) -> None:
    """A second save is refused and touches nothing; overwrite=True replaces."""
    run = str(tmp_path / "run")
    save_step(run, 10)
    with pytest.raises(waypost.AlreadyExistsError) as caught:
        waypost.save(snapshot_url(run, 10), sample_state(11), step=10)
    assert isinstance(caught.value, FileExistsError)
    assert_same(read_state(snapshot_url(run, 10)), sample_state(10))
    waypost.save(snapshot_url(run, 10), sample_state(11), step=10, overwrite=True)
    assert_same(read_state(snapshot_url(run, 10)), sample_state(11))


def test_b169_going_back_is_possible_and_defined(tmp_path: Path) -> None:
    """Step 5 after step 10: both are there; the newest by number is the latest."""
    run = str(tmp_path / "run")
    for step in (10, 5):
        save_step(run, step)
    assert sorted(committed(run)) == [5, 10]
    check_latest(run)


@pytest.mark.parametrize("name", ["memory", "disk"])
def test_a_named_step_is_found_by_its_number(name: str, tmp_path: Path) -> None:
    """`run@1200` names a snapshot wherever one can be named; an absent one is not found."""
    run = new_place(name, tmp_path, "run")
    for step in (1100, 1200):
        save_step(run, step)
    assert waypost.open(f"{run}@1100").step == 1100
    with pytest.raises(waypost.NotFoundError):
        waypost.open(f"{run}@1150")
    target = sample_state(0)
    waypost.load(f"{run}@latest", target)
    assert_same(target, sample_state(1200))
