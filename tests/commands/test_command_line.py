"""The command line as a script sees it: exit codes, JSON, no torch, no changes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import tree_of
from _kit.invariants import committed, save_step, snapshot_url

pytestmark = pytest.mark.slow


def _run(*arguments: str, code: int = 0, **environment: str) -> str:
    """Runs `waypost ARGUMENTS`; the exit code must be `code`; returns standard output."""
    found = subprocess.run(
        [sys.executable, "-m", "waypost", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        timeout=60,
        check=False,
    )
    assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    if code:
        assert found.stderr or found.stdout, "a failure says nothing"
    return found.stdout


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Three snapshots with metrics; a folder without manifest; a foreign file."""
    url = str(tmp_path / "run")
    for step in (10, 20, 30):
        save_step(url, step, metrics={"loss": step / 7})
    (tmp_path / "run" / "step-000000040").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    return url


def _damage(run: str, step: int) -> None:
    (file,) = Path(snapshot_url(run, step)).rglob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_ls_lists_steps_metrics_and_what_is_incomplete(run: str) -> None:
    """One line for each snapshot, with its metric; the JSON is for scripts."""
    text = _run("ls", run)
    for word in ("10", "20", "30", "loss", "latest"):
        assert word in text
    rows = json.loads(_run("ls", run, "--json"))
    rows = rows if isinstance(rows, list) else rows["snapshots"]
    steps = [row["step"] for row in rows if not row.get("problem")]
    assert sorted(steps) == [10, 20, 30]


def test_reading_commands_change_nothing(run: str) -> None:
    """ls, show, verify and resume-info leave every file as it was."""
    before = tree_of(run)
    _run("ls", run)
    _run("show", snapshot_url(run, 10))
    _run("verify", run)
    _run("resume-info", run)
    assert tree_of(run) == before


def test_show_names_leaves_with_dtype_and_shape(run: str) -> None:
    """All leaves, or those of a glob."""
    text = _run("show", snapshot_url(run, 10))
    for word in ("model/w", "model/b", "float32", "bfloat16", "33"):
        assert word in text
    assert "model/w" not in _run("show", snapshot_url(run, 10), "model/b")
    json.loads(_run("show", snapshot_url(run, 10), "--json"))


def test_show_stats_reads_the_numbers(tmp_path: Path) -> None:
    """Minimum, maximum and NaN count of each tensor."""
    url = str(tmp_path / "snap")
    waypost.save(url, {"x": {"w": torch.tensor([1.0, float("nan"), -2.5, 7.25])}})
    text = _run("show", url, "--stats")
    assert "-2.5" in text
    assert "7.25" in text


def test_verify_finds_damage_and_names_it(run: str) -> None:
    """0 for a sound run, 1 for a damaged one, with file and leaf."""
    _run("verify", run)
    _run("verify", snapshot_url(run, 20), "--quick")
    _damage(run, 20)
    text = _run("verify", run, code=1)
    assert "step-000000020" in text
    assert "model/" in text
    _run("verify", snapshot_url(run, 20), code=1)
    _run("verify", snapshot_url(run, 10))
    json.loads(_run("verify", snapshot_url(run, 20), "--json", code=1))


def test_verify_by_fractions_covers_everything(run: str) -> None:
    """1/3, 2/3 and 3/3 together find what one of them finds."""
    _damage(run, 30)
    codes = []
    for part in ("1/3", "2/3", "3/3"):
        found = subprocess.run(
            [sys.executable, "-m", "waypost", "verify", snapshot_url(run, 30), "--fraction", part],
            capture_output=True,
            check=False,
        )
        codes.append(found.returncode)
    assert 1 in codes
    assert set(codes) <= {0, 1}


@pytest.mark.parametrize("fraction", ["0/3", "4/3", "x", "1/0", "-1/3"])
def test_a_fraction_that_is_none_is_a_usage_error(fraction: str, run: str) -> None:
    """Exit code 2."""
    _run("verify", snapshot_url(run, 10), f"--fraction={fraction}", code=2)


def test_resume_info_says_what_auto_would_take_and_why_not_others(run: str) -> None:
    """The newest sound one; each skipped one with its reason."""
    assert "step-000000030" in _run("resume-info", run)
    (Path(snapshot_url(run, 30)) / "manifest.json").write_bytes(b"")
    text = _run("resume-info", run)
    assert "step-000000020" in text
    assert "step-000000030" in text
    json.loads(_run("resume-info", run, "--json"))
    for step in (10, 20):
        (Path(snapshot_url(run, step)) / "manifest.json").write_bytes(b"")
    _run("resume-info", run, code=1)


def test_prune_shows_first_and_deletes_only_with_yes(run: str) -> None:
    """A dry run by default."""
    before = tree_of(run)
    text = _run("prune", run, "--keep-last", "1")
    assert "step-000000010" in text
    assert tree_of(run) == before
    _run("prune", run, "--keep-last", "1", "--yes")
    assert sorted(committed(run)) == [30]
    assert (Path(run) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "resume-info"])
def test_what_is_not_there_is_exit_code_3(command: str, tmp_path: Path) -> None:
    """Not found, in words."""
    _run(command, str(tmp_path / "absent"), code=3)


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["ls"], ["ls", "--frobnicate", "x"]])
def test_a_wrong_call_is_exit_code_2(arguments: list[str]) -> None:
    """Usage errors, in words."""
    _run(*arguments, code=2)


def test_a_broken_manifest_is_exit_code_4(run: str) -> None:
    """Unreadable format."""
    (Path(snapshot_url(run, 30)) / "manifest.json").write_bytes(b"{")
    _run("show", snapshot_url(run, 30), code=4)


@pytest.mark.parametrize("command", ["ls", "show", "verify", "resume-info"])
def test_no_torch_is_imported(command: str, run: str, tmp_path: Path) -> None:
    """With a torch that cannot be imported, the commands work all the same."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "torch.py").write_text("raise ImportError('torch must not be imported')")
    (fake / "numpy.py").write_text("raise ImportError('numpy is not needed')")
    target = snapshot_url(run, 10) if command == "show" else run
    path = os.pathsep.join([str(fake), *filter(None, [os.environ.get("PYTHONPATH", "")]), "src"])
    _run(command, target, PYTHONPATH=path)


def test_json_is_the_only_output(run: str) -> None:
    """Scripts read standard output without looking for the beginning."""
    for arguments in (["ls", run], ["show", snapshot_url(run, 10)], ["verify", run]):
        document: Any = json.loads(_run(*arguments, "--json"))
        assert document
