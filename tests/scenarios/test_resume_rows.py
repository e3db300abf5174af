"""Resume at the wrong place; data, schedule, scaler, RNG; signals, fork, owners.

B053 B077 B079 B083 B085 B088 B089 B097 B100 B121 B124 B126 B129
"""

import copy
import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waypost
from _kit import assert_same, die, in_child, raw
from _kit.invariants import (
    advance,
    check_next_save,
    committed,
    put,
    sample_state,
    save_step,
    snapshot_url,
)
from _kit.training import BATCH_SIZE, BATCHES_PER_EPOCH, FakeScaler, Job, Shuffled


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Children that fork safely."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("boundary", [1, 2])
def test_b077_an_epoch_that_is_done_is_not_done_again(boundary: int, tmp_path: Path) -> None:
    """Stopped exactly at the end of an epoch: the samples seen are those of one whole run."""
    run = str(tmp_path / "run")
    total = 3 * BATCHES_PER_EPOCH
    stop = boundary * BATCHES_PER_EPOCH
    seen: list[list[int]] = []

    def train(until: int) -> None:
        loader = Shuffled()
        with waypost.Checkpointer(
            run, {"data": loader}, save_every=waypost.EverySteps(BATCHES_PER_EPOCH), save_on=()
        ) as checkpointer:
            for _ in range(checkpointer.step, until):
                seen.append(loader.next_batch())
                checkpointer.step_done()

    train(stop)
    train(total)
    whole = Shuffled()
    assert seen == [whole.next_batch() for _ in range(total)]


def test_b077_every_epochs_saves_at_the_boundaries(tmp_path: Path) -> None:
    """`EveryEpochs(1)` saves when `epoch_done` is called, and counts no step."""
    run = str(tmp_path / "run")
    with waypost.Checkpointer(
        run, sample_state(0), save_every=waypost.EveryEpochs(1), save_on=()
    ) as checkpointer:
        for _ in range(2):
            for _ in range(3):
                checkpointer.step_done()
            checkpointer.epoch_done()
        assert checkpointer.step == 6
    assert sorted(committed(run)) == [3, 6]


def test_b079_a_loader_saved_at_the_end_of_an_epoch_gives_a_whole_next_one(tmp_path: Path) -> None:
    """Fully iterated, saved, loaded: the next epoch has all its samples."""
    loader = Shuffled()
    for _ in range(BATCHES_PER_EPOCH):
        loader.next_batch()
    url = str(tmp_path / "snap")
    waypost.save(url, {"data": loader})
    restored = Shuffled()
    waypost.load(url, {"data": restored})
    epoch = [sample for _ in range(BATCHES_PER_EPOCH) for sample in restored.next_batch()]
    assert sorted(epoch) == list(range(BATCHES_PER_EPOCH * BATCH_SIZE))
    assert epoch == [s for _ in range(BATCHES_PER_EPOCH) for s in loader.next_batch()]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_b079_a_real_stateful_loader_gives_a_whole_next_epoch(tmp_path: Path) -> None:
    """torchdata's StatefulDataLoader, saved at the end and in the middle of an epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(list(range(20)), batch_size=4, num_workers=0)

    ended = loader()
    assert len(list(ended)) == 5
    url = str(tmp_path / "snap")
    middle = loader()
    reading = iter(middle)
    first = [next(reading), next(reading)]
    waypost.save(url, {"ended": ended, "middle": middle})
    restored = {"ended": loader(), "middle": loader()}
    waypost.load(url, restored)
    assert len(list(restored["ended"])) == 5
    rest = [batch.tolist() for batch in restored["middle"]]
    assert [batch.tolist() for batch in first] + rest == [
        list(range(k, k + 4)) for k in range(0, 20, 4)
    ]


def test_b083_a_second_resume_within_an_epoch_does_not_drift(tmp_path: Path) -> None:
    """Save at 3, resume, save 2 later, resume: the next batch is the sixth."""
    run = str(tmp_path / "run")

    def train(until: int) -> Shuffled:
        loader = Shuffled()
        with waypost.Checkpointer(run, {"data": loader}, save_on=("end",)) as checkpointer:
            for _ in range(checkpointer.step, until):
                loader.next_batch()
                checkpointer.step_done()
        return loader

    train(3)
    train(5)
    resumed = train(5)
    whole = Shuffled()
    for _ in range(5):
        whole.next_batch()
    assert resumed.next_batch() == whole.next_batch()


def test_b085_any_object_with_state_is_captured_and_a_missing_one_is_an_error(
    tmp_path: Path,
) -> None:
    """The scaler returns; a snapshot without it does not load quietly into a state that has it."""
    scaler = FakeScaler()
    for overflow in (True, False, True, False):
        scaler.update(overflow)
    url = str(tmp_path / "with")
    waypost.save(url, {"scaler": scaler, "model": {"w": torch.ones(1)}})
    restored = FakeScaler()
    waypost.load(url, {"scaler": restored})
    assert_same(restored.state_dict(), scaler.state_dict())
    without = str(tmp_path / "without")
    waypost.save(without, {"model": {"w": torch.ones(1)}})
    target = {"model": {"w": torch.zeros(1)}, "scaler": FakeScaler()}
    with pytest.raises(waypost.MismatchError, match="scaler"):
        waypost.load(without, target)
    assert not target["model"]["w"].any()


def test_b088_a_new_learning_rate_in_code_can_be_kept(tmp_path: Path) -> None:
    """Loaded in full, the saved lr counts; excluded, the one in the code does."""
    model = nn.Linear(2, 2)
    saved = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": model, "optimizer": saved})

    def load(**arguments: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.5)
        waypost.load(url, {"model": model, "optimizer": optimizer}, **arguments)
        moment = optimizer.state[model.weight]["exp_avg"]
        assert raw(moment) == raw(saved.state[model.weight]["exp_avg"])
        return optimizer

    assert load().param_groups[0]["lr"] == 1e-3
    kept = load(exclude="optimizer/param_groups/**").param_groups[0]
    assert (kept["lr"], kept["weight_decay"]) == (1e-4, 0.5)
    partly = load(exclude="optimizer/param_groups/*/lr").param_groups[0]
    assert (partly["lr"], partly["weight_decay"]) == (1e-4, 1e-2)


def test_b089_dropout_after_a_mid_epoch_resume_is_the_same(tmp_path: Path) -> None:
    """The next five losses are equal bit for bit: the RNG comes back after the loader did."""
    run = str(tmp_path / "run")
    job = Job(3)
    with waypost.Checkpointer(run, job.state(), save_on=()) as checkpointer:
        for _ in range(4):
            job.step()
            checkpointer.step_done()
        checkpointer.save()
        for _ in range(5):
            job.step()
    resumed = Job(8)
    state = dict(reversed(resumed.state().items()))
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        assert checkpointer.step == 4
        for _ in range(5):
            resumed.step()
    assert resumed.tape == job.tape[4:]


def test_b097_the_end_of_the_run_is_saved(tmp_path: Path) -> None:
    """A total that the interval does not divide, with a resume on the way: a final snapshot."""
    run = str(tmp_path / "run")
    for until, saved in ((7, [5, 7]), (13, [5, 7, 10, 13])):
        state = sample_state(0)
        with waypost.Checkpointer(run, state, save_every=waypost.EverySteps(5)) as checkpointer:
            while checkpointer.step < until:
                put(state, checkpointer.step + 1)
                checkpointer.step_done()
        assert sorted(committed(run)) == saved
        assert checkpointer.last_saved == until


def test_b097_nothing_new_is_not_saved_twice(tmp_path: Path) -> None:
    """The last step was saved by the interval: the end adds nothing."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_every=waypost.EverySteps(5)) as checkpointer:
        for _ in range(5):
            put(state, checkpointer.step + 1)
            checkpointer.step_done()
        attempt = waypost.open(snapshot_url(run, 5)).attempt
    assert waypost.open(snapshot_url(run, 5)).attempt == attempt
    with waypost.Checkpointer(run, sample_state(0)) as checkpointer:
        assert checkpointer.step == 5
    assert waypost.open(snapshot_url(run, 5)).attempt == attempt


def test_an_exception_is_saved_with_its_reason_and_goes_on(tmp_path: Path) -> None:
    """The state at the exception is kept; the exception itself reaches the caller."""
    run = str(tmp_path / "run")

    def train() -> None:
        state = sample_state(0)
        with waypost.Checkpointer(run, state) as checkpointer:
            for _ in range(3):
                put(state, checkpointer.step + 1)
                checkpointer.step_done()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    (record,) = waypost.snapshots(run)
    assert record.step == 3
    assert "exception" in record.reason


def test_b100_model_and_average_are_both_restored(tmp_path: Path) -> None:
    """Raw weights, averaged weights and the averaging counter, each its own."""
    job = Job(1)
    for _ in range(3):
        job.step()
    url = str(tmp_path / "snap")
    waypost.save(url, {"model": job.model, "ema": job.ema})
    other = Job(2)
    waypost.load(url, {"model": other.model, "ema": other.ema})
    assert_same(other.model.state_dict(), job.model.state_dict())
    assert_same(other.ema.state_dict(), job.ema.state_dict())
    assert other.ema.n_averaged.item() == 3
    assert raw(other.model.embed.weight) != raw(other.ema.module.embed.weight)


def test_b053_init_from_takes_weights_and_nothing_else(tmp_path: Path) -> None:
    """A new run from pretrained weights: step 0, fresh optimizer, no metric; resume keeps all."""
    old = Job(1)
    for _ in range(3):
        old.step()
    pretrained = str(tmp_path / "pretrained")
    waypost.save(snapshot_url(pretrained, 3), old.state(), step=3, metrics={"loss": 0.001})
    run = str(tmp_path / "run")
    new = Job(2)
    scheduled = copy.deepcopy(new.schedule.state_dict())
    with waypost.Checkpointer(
        run, new.state(), init_from=snapshot_url(pretrained, 3), save_on=()
    ) as checkpointer:
        assert checkpointer.step == 0
        assert_same(new.model.state_dict(), old.model.state_dict())
        assert new.optimizer.state_dict()["state"] == {}
        assert repr(new.schedule.state_dict()) == repr(scheduled)
        assert new.loader.position == 0
        new.step()
        checkpointer.step_done()
        checkpointer.save()
    assert sorted(committed(run)) == [1]
    (record,) = waypost.snapshots(run)
    assert dict(record.metrics) == {}
    again = Job(3)
    with waypost.Checkpointer(
        run, again.state(), init_from=snapshot_url(pretrained, 3), save_on=()
    ) as checkpointer:
        assert checkpointer.step == 1, "a run that has snapshots resumes from them"
    assert_same(again.model.state_dict(), new.model.state_dict())


def _resident_bytes() -> int:
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_b121_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    """Fifty saves of 10 MB: resident memory after 50 is that after 10, give or take one state."""
    run = str(tmp_path / "run")
    state = {"model": {"w": torch.ones(2_500_000)}}
    sizes = {}
    with waypost.Checkpointer(
        run, state, save_every=waypost.EverySteps(1), keep=waypost.KeepLast(1), save_on=()
    ) as checkpointer:
        for step in range(1, 51):
            checkpointer.step_done()
            if step in (10, 50):
                sizes[step] = _resident_bytes()
    assert sizes[50] - sizes[10] < 12_000_000


def test_b124_only_the_owner_reacts_to_a_signal_to_the_group(tmp_path: Path) -> None:
    """SIGTERM to the trainer and its forked worker: one final save, by the trainer."""
    run = str(tmp_path / "run")

    def trainer() -> tuple[int, bool]:
        os.setpgid(0, 0)
        state = sample_state(0)
        ready, said = os.pipe()
        preempted = False
        with waypost.Checkpointer(run, state) as checkpointer:
            worker = os.fork()
            if worker == 0:
                os.write(said, b"x")
                while True:
                    signal.pause()
            os.read(ready, 1)
            os.killpg(0, signal.SIGTERM)
            put(state, 1)
            try:
                checkpointer.step_done()
            except waypost.Preempted:
                preempted = True
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        return checkpointer.step, preempted

    assert in_child(trainer).expect_result() == (1, True)
    assert sorted(committed(run)) == [1]
    assert_same(waypost.open(snapshot_url(run, 1)).state_dict("progress")["step"], 1)


def test_b126_a_forked_child_does_not_act_for_its_parent(tmp_path: Path) -> None:
    """A child that saves is refused or independent; its exit leaves the parent's run intact."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=("end",)) as checkpointer:
        put(state, 1)
        checkpointer.step_done()

        def child() -> str:
            try:
                checkpointer.save()
            except waypost.WaypostError as error:
                return type(error).__name__
            finally:
                checkpointer.close()
            return "saved"

        outcome = in_child(child)
        outcome.expect_result()

        def second() -> None:
            waypost.Checkpointer(run, sample_state(0)).__enter__()

        assert "AlreadyOwnedError" in in_child(second).error
        put(state, 2)
        checkpointer.step_done()
        checkpointer.save()
    assert 2 in committed(run)
    check_next_save(run, 5)


def test_b129_a_second_owner_is_refused_and_told_who_has_the_run(tmp_path: Path) -> None:
    """Two processes in one directory: the second hears host and pid; nothing is mixed."""
    run = str(tmp_path / "run")
    state = sample_state(0)

    def intruder() -> str:
        try:
            waypost.Checkpointer(run, sample_state(0)).__enter__()
        except waypost.AlreadyOwnedError as error:
            return str(error)
        return ""

    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        said = in_child(intruder).expect_result()
        assert str(os.getpid()) in said
        assert socket.gethostname() in said
        put(state, 1)
        checkpointer.step_done()
        checkpointer.save()
    assert sorted(committed(run)) == [1]
    assert in_child(intruder).expect_result() == ""


def test_b129_a_killed_owner_is_succeeded(tmp_path: Path) -> None:
    """The owner died without a word: the next process takes over by itself."""
    run = str(tmp_path / "run")
    save_step(run, 4)

    def owner() -> None:
        waypost.Checkpointer(run, sample_state(0)).__enter__()
        die()

    assert in_child(owner).was_killed
    assert advance(run, 5).step == 5
