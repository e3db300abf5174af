"""A job under `torchrun`: save, load, resume on another number of ranks, SIGKILL, SIGTERM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import torchrun_job
from _kit.invariants import committed
from _kit.torchrun_job import TIMEOUT_S, full_weight

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS_MAX = 280


def torchrun(ranks: int, command: str, folder: Path, *numbers: int) -> subprocess.Popen[str]:
    """Starts the job as a user starts it, on this machine alone."""
    for report in folder.glob("report-*.json"):
        report.unlink()
    path = [entry for entry in sys.path if entry]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks)),
            *(str(torchrun_job.__file__), command, str(folder), *map(str, numbers)),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_job(
    ranks: int, command: str, folder: Path, *numbers: int
) -> tuple[int, dict[int, Any], str]:
    """Runs the job to its end: the launcher's exit code, the ranks' reports, the output."""
    job = torchrun(ranks, command, folder, *numbers)
    try:
        output, _ = job.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        job.terminate()  # the launcher ends its ranks
        output, _ = job.communicate()
        pytest.fail(f"{command} on {ranks} ranks did not end in {SECONDS_MAX} s\n{output}")
    print(output)
    reports = {
        int(path.stem.removeprefix("report-")): json.loads(path.read_text())
        for path in sorted(folder.glob("report-*.json"))
    }
    return job.returncode, reports, output


def check_whole(url: str, step: int) -> None:
    """The snapshot is undamaged and has the full matrix of the step."""
    snapshot = waypost.open(url)
    report = snapshot.verify()
    assert report.ok, report.problems
    assert snapshot.step == step
    model = snapshot.state_dict("model")
    assert torch.equal(model["weight"], full_weight(step))
    assert int(model["steps"]) == step


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (4, 2)])
def test_a_rank_that_is_killed_in_a_save_ends_the_others(
    ranks: int, victim: int, tmp_path: Path
) -> None:
    """They name it in time, nothing is published, and a restarted job goes on."""
    code, reports, _ = run_job(ranks, "save_and_load", tmp_path, 1)
    assert code == 0
    assert reports == {key: {"code": 0, "saved": 1, "after": True} for key in range(ranks)}
    check_whole(str(tmp_path / "snap-1"), 1)

    code, reports, output = run_job(ranks, "lose_a_rank", tmp_path, 2, victim)
    assert code != 0
    assert sorted(reports) == [rank for rank in range(ranks) if rank != victim]
    for report in reports.values():
        assert report["error"] in {"CoordinationTimeoutError", "PeerError"}, report
        assert victim in report["named"], report
        assert str(victim) in report["text"], report
        assert report["waited_s"] < 3 * TIMEOUT_S, report
    assert "Signal 9 (SIGKILL)" in output
    with pytest.raises(waypost.NotFoundError):
        waypost.open(str(tmp_path / "snap-2"))
    check_whole(str(tmp_path / "snap-1"), 1)

    restarted = 6 - ranks
    code, reports, _ = run_job(restarted, "save_and_load", tmp_path, 2)
    assert code == 0
    seen = {"code": 0, "before": True, "saved": 2, "after": True}
    assert reports == dict.fromkeys(range(restarted), seen)
    check_whole(str(tmp_path / "snap-2"), 2)


def test_sigterm_to_one_rank_saves_one_step_on_all(tmp_path: Path) -> None:
    """All ranks end with 143 after the same step; four ranks resume there what two saved."""
    code, reports, output = run_job(2, "train", tmp_path, torchrun_job.STEPS_MAX, 4, 1)
    assert code != 0
    assert sorted(reports) == [0, 1]
    stopped = reports[0]["saved"]
    assert 4 <= stopped < torchrun_job.STEPS_MAX
    seen = {"code": 143, "first": 0, "is_right": True, "last": stopped, "saved": stopped}
    assert reports == {0: seen, 1: seen}
    assert "exitcode  : 143" in output
    assert "exitcode  : -" not in output
    run = str(tmp_path / "run")
    assert sorted(committed(run)) == [stopped]
    check_whole(committed(run)[stopped], stopped)

    until = stopped + 2
    code, reports, _ = run_job(4, "train", tmp_path, until, -1, -1)
    assert code == 0
    seen = {"code": 0, "first": stopped, "is_right": True, "last": until}
    assert reports == dict.fromkeys(range(4), seen)
    assert sorted(committed(run)) == [stopped, until]
    check_whole(committed(run)[until], until)
