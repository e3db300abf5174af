"""When to save, what to keep, how to begin: the Checkpointer's arguments, one by one."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import PLACES, assert_same, new_place
from _kit.invariants import advance, committed, put, read_state, sample_state, save_step
from _kit.invariants import snapshot_url as url_of


def _train(run: str, until: int, **arguments: Any) -> waypost.Checkpointer:
    state = sample_state(0)
    with waypost.Checkpointer(run, state, **arguments) as checkpointer:
        while checkpointer.step < until:
            put(state, checkpointer.step + 1)
            checkpointer.step_done()
    return checkpointer


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (lambda: waypost.EverySteps(3), [3, 6, 9]),
        (lambda: waypost.AtSteps([2, 7]), [2, 7]),
        (lambda: waypost.EverySteps(4) | waypost.AtSteps([4, 5]), [4, 5, 8]),
        (lambda: waypost.EverySteps(100), []),
        (lambda: None, []),
    ],
    ids=["every", "at", "union", "never", "none"],
)
def test_save_every(policy: Any, saved: list[int], place: str, tmp_path: Path) -> None:
    """The steps saved are those of the policy, each with its own state."""
    run = new_place(place, tmp_path, "run")
    _train(run, 10, save_every=policy(), save_on=())
    assert sorted(committed(run)) == saved
    for step, url in committed(run).items():
        assert_same(read_state(url), sample_state(step))


def test_every_steps_goes_on_in_phase_after_a_resume(tmp_path: Path) -> None:
    """Saved at multiples, whatever step the run was resumed at."""
    run = str(tmp_path / "run")
    _train(run, 4, save_every=waypost.EverySteps(3))
    _train(run, 10, save_every=waypost.EverySteps(3), save_on=())
    assert sorted(committed(run)) == [3, 4, 6, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: waypost.EverySteps(0),
        lambda: waypost.EverySteps(-1),
        lambda: waypost.EveryMinutes(0),
        lambda: waypost.EveryEpochs(0),
        lambda: waypost.KeepLast(0),
        lambda: waypost.KeepLast(-1),
        lambda: waypost.KeepEvery(),
        lambda: waypost.KeepEvery(steps=0),
        lambda: waypost.KeepEvery(steps=1, minutes=1),
    ],
)
def test_policies_that_make_no_sense_are_refused(make: Any) -> None:
    """Zero, negative and contradictory arguments are a ValueError when they are made."""
    with pytest.raises(ValueError, match=r"."):
        make()


def test_policies_are_values() -> None:
    """Equal arguments make equal policies, with a readable form."""
    assert waypost.EverySteps(5) == waypost.EverySteps(5)
    assert waypost.KeepLast(2) == waypost.KeepLast(2)
    assert waypost.KeepLast(2) != waypost.KeepLast(3)
    assert "5" in repr(waypost.EverySteps(5))


@pytest.mark.parametrize("place", PLACES)
def test_resume_from_a_chosen_step(place: str, tmp_path: Path) -> None:
    """resume=<int> takes exactly that one."""
    run = new_place(place, tmp_path, "run")
    for step in (5, 10, 15):
        save_step(run, step)
    state = sample_state(0)
    with waypost.Checkpointer(run, state, resume=10, save_on=()) as checkpointer:
        assert checkpointer.step == 10
        assert checkpointer.resumed_from == url_of(run, 10)
    assert_same(state, sample_state(10))


@pytest.mark.parametrize("how", ["path", "at_step", "at_latest"])
def test_resume_from_another_run(how: str, tmp_path: Path) -> None:
    """A snapshot of another run, by path or by run@name: the step goes on, the other run stays."""
    other, run = str(tmp_path / "other"), str(tmp_path / "run")
    save_step(other, 8)
    named = {"path": url_of(other, 8), "at_step": f"{other}@8", "at_latest": f"{other}@latest"}
    state = sample_state(0)
    with waypost.Checkpointer(run, state, resume=named[how], save_on=()) as checkpointer:
        assert checkpointer.step == 8
        put(state, 9)
        checkpointer.step_done()
        checkpointer.save()
    assert sorted(committed(run)) == [9]
    assert sorted(committed(other)) == [8]


def test_resume_latest_does_not_fall_back(tmp_path: Path) -> None:
    """resume="latest": the newest committed or an error, never an older one."""
    run = str(tmp_path / "run")
    for step in (1, 2):
        save_step(run, step)
    _damage(run, 2)
    with pytest.raises((waypost.CorruptionError, waypost.ResumeError)):
        waypost.Checkpointer(run, sample_state(0), resume="latest").__enter__()


def _damage(run: str, step: int) -> None:
    """Flips the last byte of the model's numbers."""
    (file,) = Path(url_of(run, step)).rglob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_auto_and_must_fall_back_over_damage_and_say_why(
    resume: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two damaged ones are skipped, each with a line; the state is that of the third."""
    run = str(tmp_path / "run")
    for step in (1, 2, 3):
        save_step(run, step)
    for step in (2, 3):
        _damage(run, step)
    caplog.set_level(logging.INFO, logger="waypost")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, resume=resume, save_on=()) as checkpointer:
        assert checkpointer.step == 1
    assert_same(state, sample_state(1))
    said = [record.getMessage() for record in caplog.records]
    for name in ("step-000000002", "step-000000003"):
        assert any(name in line for line in said), said


def test_a_mismatch_is_never_fallen_back_over(tmp_path: Path) -> None:
    """The model in the code changed: that is the user's to know, not a damaged snapshot."""
    run = str(tmp_path / "run")
    for step in (1, 2):
        save_step(run, step)
    state = sample_state(0)
    state["model"]["w"] = torch.zeros(3, 3)
    with pytest.raises(waypost.MismatchError):
        waypost.Checkpointer(run, state).__enter__()
    assert not state["model"]["w"].any()


def test_training_over_a_damaged_step_replaces_it(tmp_path: Path) -> None:
    """Fallen back from 3 to 1, trained to 3 again: the damaged one is replaced by the new one."""
    run = str(tmp_path / "run")
    for step in (1, 3):
        save_step(run, step)
    _damage(run, 3)
    advance(run, 3)
    assert_same(read_state(url_of(run, 3)), sample_state(3))
    assert waypost.open(url_of(run, 3)).verify().ok


def test_saves_and_deletions_are_one_log_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step, place and reason of each save; name and reason of each deletion."""
    caplog.set_level(logging.INFO, logger="waypost")
    run = str(tmp_path / "run")
    policy = waypost.EverySteps(1)
    _train(run, 3, save_every=policy, keep=waypost.KeepLast(1), save_on=())
    said = [record.getMessage() for record in caplog.records if record.name.startswith("waypost")]
    for step in (1, 2, 3):
        name = f"step-{step:09d}"
        saves = [line for line in said if name in line and line.startswith(f"step {step} ")]
        assert len(saves) == 1, said
    for step in (1, 2):
        lines = [line for line in said if f"step-{step:09d}" in line]
        assert len(lines) == 2, lines
    assert not any("\n" in line for line in said)


def test_metrics_and_reason_are_listed(tmp_path: Path) -> None:
    """What `step_done` and `save` are told travels with the snapshot."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    policy = waypost.EverySteps(1)
    with waypost.Checkpointer(run, state, save_every=policy, save_on=()) as checkpointer:
        put(state, 1)
        checkpointer.step_done(metrics={"loss": 0.5})
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        put(state, 2)
        checkpointer.step_done()
        receipt = checkpointer.save(metrics={"loss": 0.25}, reason="before the change")
    records = {record.step: record for record in waypost.snapshots(run)}
    assert dict(records[1].metrics) == {"loss": 0.5}
    assert dict(records[2].metrics) == {"loss": 0.25}
    assert records[2].reason == "before the change"
    assert records[2].is_latest
    assert not records[1].is_latest
    assert receipt.step == 2
    assert receipt.url == url_of(run, 2)
    assert receipt.nbytes == records[2].nbytes


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    """After close, stepping and saving are ClosedError; closing again is nothing."""
    checkpointer = waypost.Checkpointer(str(tmp_path / "run"), sample_state(0), save_on=())
    checkpointer.__enter__()
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(waypost.ClosedError):
        checkpointer.step_done()
    with pytest.raises(waypost.ClosedError):
        checkpointer.save()


def test_saving_over_a_run_one_has_loaded_from_is_safe(tmp_path: Path) -> None:
    """Loaded, changed, overwritten under the same name: the new numbers, and nothing torn."""
    url = url_of(str(tmp_path / "run"), 1)
    waypost.save(url, {"model": {"w": torch.arange(100_000.0)}}, step=1)
    held = waypost.open(url).state_dict("model")
    kept = held["w"].clone()
    held["w"] += 1
    waypost.save(url, {"model": held}, step=1, overwrite=True)
    assert torch.equal(held["w"], kept + 1)
    assert torch.equal(waypost.open(url).read("model/w"), kept + 1)
    again = waypost.open(url).state_dict("model")
    waypost.save(url, {"model": again}, step=1, overwrite=True)
    assert torch.equal(waypost.open(url).read("model/w"), kept + 1)


def test_a_snapshot_tells_what_it_is(tmp_path: Path) -> None:
    """Step, metrics, metadata, time in UTC, size, entries."""
    url = str(tmp_path / "snap")
    metadata = {"config": {"lr": 0.1, "layers": [1, 2]}, "tags": ("a", "b")}
    receipt = waypost.save(url, sample_state(4), step=4, metrics={"loss": 1.5}, metadata=metadata)
    snapshot = waypost.open(url)
    assert (snapshot.step, dict(snapshot.metrics)) == (4, {"loss": 1.5})
    assert_same(snapshot.metadata, metadata)
    assert snapshot.created.utcoffset().total_seconds() == 0
    assert snapshot.nbytes == receipt.nbytes == 33 * 5 * 4 + 7 * 2
    assert snapshot.attempt == receipt.attempt
    assert tuple(snapshot.entries) == ("model", "progress")
    assert receipt.seconds > 0
    assert receipt.digest
    waypost.save(str(tmp_path / "plain"), sample_state(4))
    assert waypost.open(str(tmp_path / "plain")).step is None


def test_the_newest_stay_also_after_one_was_overwritten_from_outside(tmp_path: Path) -> None:
    """Step 1 replaced by `save(overwrite=True)`, then 2 and 3: KeepLast(2) keeps 2 and 3."""
    run = str(tmp_path / "run")
    advance(run, 1)
    waypost.save(url_of(run, 1), sample_state(7), step=1, overwrite=True)
    advance(run, 2)
    advance(run, 3)
    waypost.prune(run, keep=waypost.KeepLast(2), dry_run=False)
    assert sorted(committed(run)) == [2, 3]
