"""What must hold after every fault (S1 to S8 of the scenarios), checked from outside."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import waypost
from _kit.compare import assert_same
from _kit.places import files_under


def sample_state(step: int) -> dict[str, Any]:
    """A small state that depends on the step in every leaf."""
    maker = torch.Generator().manual_seed(step)
    return {
        "model": {
            "w": torch.randn(33, 5, generator=maker),
            "b": torch.full((7,), float(step), dtype=torch.bfloat16),
        },
        "progress": {"step": step, "log": [f"line {step}"]},
    }


def snapshot_url(run: str, step: int) -> str:
    """Where the run keeps the snapshot of the step."""
    return f"{run}/step-{step:09d}"


def save_step(run: str, step: int, **arguments: Any) -> Any:
    """One snapshot of `sample_state` saved into the run."""
    return waypost.save(snapshot_url(run, step), sample_state(step), step=step, **arguments)


def put(state: dict[str, Any], step: int) -> None:
    """Makes `state` the sample state of the step, in place."""
    wanted = sample_state(step)
    for name, tensor in wanted["model"].items():
        state["model"][name].copy_(tensor)
    state["progress"].update(wanted["progress"])


def advance(run: Any, to: int, *, save: bool = True, **arguments: Any) -> waypost.Checkpointer:
    """Resumes the run and trains it to the step `to`, then saves; the closed Checkpointer."""
    arguments.setdefault("save_on", ())
    state = sample_state(0)
    with waypost.Checkpointer(run, state, **arguments) as checkpointer:
        while checkpointer.step < to:
            put(state, checkpointer.step + 1)
            checkpointer.step_done()
        if save and checkpointer.last_saved != to:
            checkpointer.save()
    return checkpointer


def read_state(url: str) -> dict[str, Any]:
    """All entries of the snapshot."""
    snapshot = waypost.open(url)
    return {entry: snapshot.state_dict(entry) for entry in snapshot.entries}


def committed(run: str) -> dict[int, str]:
    """Step to URL of everything that the run lists as committed."""
    return {record.step: record.url for record in waypost.snapshots(run) if record.problem is None}


def check_listed(run: str, expected: Mapping[int, dict[str, Any]]) -> set[int]:
    """S2: each listed snapshot verifies and has exactly the state of its step."""
    listed = committed(run)
    for step, url in listed.items():
        assert step in expected, f"step {step} is listed and was never saved"
        report = waypost.open(url).verify()
        assert report.ok, report.problems
        assert_same(read_state(url), expected[step], f"step {step}")
    return set(listed)


def check_latest(run: str) -> None:
    """S3: `latest` is the newest committed snapshot, or nothing where there is none."""
    listed = committed(run)
    latest = waypost.latest(run)
    if not listed:
        assert latest is None
        return
    assert latest is not None
    assert waypost.open(latest).step == max(listed)


def check_run(run: str, *, must: set[int], may: set[int]) -> set[int]:
    """S1, S2, S3: all of `must` are there, nothing beyond `may`, all whole; returns the steps."""
    steps = check_listed(run, {step: sample_state(step) for step in must | may})
    assert must <= steps, f"lost {must - steps}"
    check_latest(run)
    return steps


def check_next_save(run: str, step: int) -> None:
    """S5: the next save works without help, and is the newest."""
    advance(run, step)
    assert step in committed(run)
    check_latest(run)


def check_debris(run: str) -> None:
    """S8: one command reclaims what failed attempts left, and nothing else."""
    before = committed(run)
    waypost.prune(run, keep=None, debris=True, dry_run=False)
    assert committed(run) == before
    for step_dir in Path(run).glob("step-*"):
        if not step_dir.is_dir():
            continue
        assert (step_dir / "manifest.json").is_file(), f"{step_dir.name} is still there"
        attempts = list((step_dir / "data").iterdir())
        assert len(attempts) == 1, [path.name for path in attempts]
    odd = [path.name for path in files_under(run) if "tmp" in path.name.lower()]
    assert odd == []


def quiet() -> None:
    """Keeps the log lines of a sweep out of the report."""
    logging.getLogger("waypost").setLevel(logging.CRITICAL)
