"""The demo as a user runs it, and that it fails when a resume is not exact."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import waypost
from waypost.demo import run
from waypost.demo.compare import compare_logs, first_difference, flatten
from waypost.demo.supervise import Moment, plan_disturbances, required_hits
from waypost.demo.watch import Incarnation, LoggedStep, newest_committed, open_attempts, read_log

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `waypost demo` in a process of its own, as from a shell."""
    source = str(Path(waypost.__file__).parents[1])
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    return subprocess.run(
        [sys.executable, "-m", "waypost", "demo", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([source, *inherited]), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_demo_ends_the_same(tmp_path):
    directory = tmp_path / "demo"
    demo = run_demo("--quick", "--keep", "--dir", str(directory))
    print(demo.stdout, demo.stderr)
    assert demo.returncode == 0
    assert "the same, bit for bit" in demo.stdout
    rows = [line for line in demo.stdout.splitlines() if line.startswith("│")]
    assert sum("SIGKILL" in row for row in rows) >= 3
    assert sum("saved, exit code 143" in row and "SIGTERM" in row for row in rows) == 2
    assert any("SIGKILL" in row and "inside a save" in row for row in rows)
    assert any("data order" in row and "same" in row for row in rows)
    assert any("step-000000300" in row and "latest" in row for row in rows)
    assert (directory / "loss.png").read_bytes().startswith(PNG_MAGIC)
    # What the demo says of itself is also true on disk.
    restarts = read_log(directory / "restarted" / "steps.log")
    assert len(read_log(directory / "undisturbed" / "steps.log")) == 1
    assert len(restarts) >= 5
    assert all(life.steps_done > 0 for life in restarts[2:])
    assert newest_committed(directory / "restarted" / "run") == 300


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_on_ranks_ends_the_same(tmp_path):
    """A sharded job: a rank killed, and moved from 2 ranks to 1 and to 4."""
    directory = tmp_path / "demo"
    demo = run_demo(
        *("--ranks", "2", "--steps", "30", "--kills", "1", "--keep", "--dir", str(directory))
    )
    print(demo.stdout, demo.stderr)
    assert demo.returncode == 0
    assert "On 2 ranks both runs are the same, bit for bit" in demo.stdout
    assert "SIGKILL to rank 0" in demo.stdout
    assert "losses on 2 → 1 → 4 ranks" in demo.stdout
    for name in ("undisturbed", "restarted", "moved"):
        assert newest_committed(directory / name / "run") == 30
    worlds = [
        line.split()[3]
        for line in (directory / "moved" / "rank-0.log").read_text().splitlines()
        if line.startswith("start")
    ]
    assert worlds == ["2", "1", "4"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_fails_when_the_resume_is_not_exact(tmp_path):
    directory = tmp_path / "demo"
    demo = run_demo("--kills", "1", "--steps", "80", "--forget", "rng", "--dir", str(directory))
    print(demo.stdout, demo.stderr)
    assert demo.returncode == 1
    assert "bit for bit." not in demo.stdout
    different = {
        line.removeprefix("DIFFERENT ").partition(":")[0]
        for line in demo.stdout.splitlines()
        if line.startswith("DIFFERENT ")
    }
    assert {"loss curve", "weights", "optimizer state", "random generators"} <= different
    assert not {"data order", "learning rate schedule", "restarts", "last step"} & different
    assert (directory / "restarted" / "run").is_dir()  # evidence stays


def test_a_directory_of_somebody_else_is_left_alone(tmp_path, capsys):
    letter = tmp_path / "restarted" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("dear reader")
    assert run(["--dir", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [letter]


@pytest.mark.parametrize(
    "arguments",
    [["--kills", "-1"], ["--steps", "30"], ["--unknown"], ["--forget", "nothing"]],
)
def test_wrong_arguments_touch_nothing(tmp_path, arguments):
    assert run(["--dir", str(tmp_path / "demo"), *arguments]) == 2
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("kills", [0, 1, 3, 12, 40])
@pytest.mark.parametrize("seed", [0, 7])
def test_plan_spreads_kills_over_the_training(kills, seed):
    steps = 20 * (kills + 2)
    plan = plan_disturbances(seed=seed, kills=kills, steps=steps)
    assert plan == plan_disturbances(seed=seed, kills=kills, steps=steps)
    assert sorted(item.signal.name for item in plan) == ["SIGKILL"] * kills + ["SIGTERM"]
    first_steps = [item.not_before_step for item in plan]
    assert first_steps == sorted(set(first_steps))
    assert first_steps[0] > 0
    assert first_steps[-1] <= 0.75 * steps
    saving = sum(item.moment is Moment.SAVING for item in plan)
    assert saving >= required_hits(kills)


QUIET_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000000"))[0]
OTHER_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.0, -0.0),
        (QUIET_NAN, OTHER_NAN),
        (1, 1.0),
        (1, True),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1}, {"b": 1}),
        ({1: 0}, {"1": 0}),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(3), -torch.zeros(3)),
        (torch.tensor(0), np.array(0)),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-45])),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros(2) * -1),
    ],
)
def test_comparison_sees_every_difference(left, right):
    ours, theirs = (list(flatten({"entry": {"leaf": value}}, "")) for value in (left, right))
    assert first_difference(ours, ours) is None
    assert "entry/leaf" in (first_difference(ours, theirs) or "")
    assert "entry/leaf" in (first_difference(theirs, ours) or "")


def test_comparison_refuses_what_it_cannot_compare():
    with pytest.raises(TypeError, match=r"entry/0: a object"):
        list(flatten([object()], "entry"))


def life(steps_done: int, *numbers: int, loss: str = "0x1p+0") -> Incarnation:
    steps = [LoggedStep(number=number, loss=loss, batch="b") for number in numbers]
    return Incarnation(steps_done=steps_done, steps=steps)


def problems(*restarted: Incarnation) -> list[str | None]:
    return [check.problem for check in compare_logs([life(0, 1, 2, 3, 4)], list(restarted))]


def test_logs_compare_every_life():
    assert problems(life(0, 1, 2, 3), life(2, 3, 4)) == [None, None]
    assert problems(life(0, 1, 2, 3, loss="0x1p+1"), life(0, 1, 2, 3, 4)) != [None, None]
    assert problems(life(0, 1, 3), life(3, 4)) != [None, None]  # a step left out in a life
    assert problems(life(0, 1, 2), life(3, 4)) != [None, None]  # and between two lives
    assert problems(life(0, 1, 2, 3)) != [None, None]  # never finished
    assert problems() != [None, None]


def test_an_unfinished_line_is_not_read(tmp_path):
    log = tmp_path / "steps.log"
    log.write_text("start 17 0\nstep 1 0x1p+0 aa\nstep 2 0x1p")
    assert read_log(log) == [
        Incarnation(steps_done=0, steps=[LoggedStep(number=1, loss="0x1p+0", batch="aa")])
    ]
    assert read_log(tmp_path / "absent.log") == []


def test_an_attempt_is_open_until_its_manifest(tmp_path):
    attempt = tmp_path / "step-000000005" / "data" / "abc"
    attempt.mkdir(parents=True)
    assert open_attempts(tmp_path) == {str(attempt)}
    assert newest_committed(tmp_path) == 0
    (tmp_path / "step-000000005" / "manifest.json").touch()
    assert open_attempts(tmp_path) == frozenset()
    assert newest_committed(tmp_path) == 5
