"""A killed and resumed run is the undisturbed run, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import die, in_child, new_place
from _kit.training import BATCHES_PER_EPOCH, Job, undisturbed

pytestmark = pytest.mark.slow

TOTAL = 17
NEXT_BATCHES = 50


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order, and children that fork safely."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _train(run: str, until: int, seed: int, **arguments: Any) -> Job:
    """A fresh process's worth of training: build, resume, step to `until`, stop without saving."""
    job = Job(seed)
    arguments.setdefault("save_every", waypost.EverySteps(1))
    with waypost.Checkpointer(run, job.state(), save_on=(), **arguments) as checkpointer:
        for _ in range(checkpointer.step, until):
            job.step()
            checkpointer.step_done()
    return job


def _expect_same(resumed: Job, whole: Job, from_step: int) -> None:
    assert resumed.tape == whole.tape[from_step:]
    ours, theirs = resumed.fingerprint(), whole.fingerprint()
    for part, value in theirs.items():
        assert ours[part] == value, f"{part} differs"
    batches = [resumed.loader.next_batch() for _ in range(NEXT_BATCHES)]
    assert batches == [whole.loader.next_batch() for _ in range(NEXT_BATCHES)]


@pytest.mark.parametrize(
    "stop", [1, 3, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 1, 2 * BATCHES_PER_EPOCH, TOTAL - 1]
)
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_stop_at_k_and_resume_equals_the_undisturbed_run(
    stop: int, place: str, tmp_path: Path
) -> None:
    """k steps, a new process, N − k steps: mid-epoch, at the end of one, right after one."""
    run = new_place(place, tmp_path, "run")
    _train(run, stop, seed=0)
    resumed = _train(run, TOTAL, seed=999)
    _expect_same(resumed, undisturbed(TOTAL), stop)


def test_two_resumes_equal_the_undisturbed_run(tmp_path: Path) -> None:
    """A second resume within one epoch does not drift."""
    run = new_place("disk", tmp_path, "run")
    _train(run, 9, seed=0)
    _train(run, 11, seed=5)
    resumed = _train(run, TOTAL, seed=6)
    _expect_same(resumed, undisturbed(TOTAL), 11)


def test_a_resume_that_stops_at_once_changes_nothing(tmp_path: Path) -> None:
    """Killed right after a resume, before a step: the next resume is still exact."""
    run = new_place("disk", tmp_path, "run")
    _train(run, 8, seed=0)
    _train(run, 8, seed=5)
    _train(run, 8, seed=6)
    resumed = _train(run, TOTAL, seed=7)
    _expect_same(resumed, undisturbed(TOTAL), 8)


def test_steps_after_the_last_save_are_done_again_with_the_same_numbers(tmp_path: Path) -> None:
    """Saved every 4 steps, stopped at 10: steps 9 and 10 are repeated, not skipped."""
    run = new_place("disk", tmp_path, "run")
    _train(run, 10, seed=0, save_every=waypost.EverySteps(4))
    resumed = _train(run, TOTAL, seed=1)
    _expect_same(resumed, undisturbed(TOTAL), 8)


def test_saving_does_not_disturb_the_run(tmp_path: Path) -> None:
    """A run that saves every step has the numbers of one that never does."""
    saved = _train(new_place("memory", tmp_path, "run"), TOTAL, seed=0)
    _expect_same(saved, undisturbed(TOTAL), 0)


@pytest.mark.parametrize("stop", [2, 7, 10])
def test_a_killed_process_is_resumed_exactly(stop: int, tmp_path: Path) -> None:
    """A child killed with SIGKILL after k steps; another child finishes; bits agree."""
    run = str(tmp_path / "run")

    def killed() -> None:
        job = Job(0)
        checkpointer = waypost.Checkpointer(run, job.state(), save_every=waypost.EverySteps(1))
        checkpointer.__enter__()
        for _ in range(stop):
            job.step()
            checkpointer.step_done()
        die()

    def finish() -> tuple[int, list[Any], dict[str, Any]]:
        job = Job(77)
        with waypost.Checkpointer(run, job.state()) as checkpointer:
            begun = checkpointer.step
            for _ in range(begun, TOTAL):
                job.step()
                checkpointer.step_done()
        return begun, job.tape, job.fingerprint()

    assert in_child(killed).was_killed
    begun, tape, fingerprint = in_child(finish).expect_result()
    whole = undisturbed(TOTAL)
    assert begun == stop
    assert tape == whole.tape[stop:]
    assert fingerprint == whole.fingerprint()


def test_load_restores_rng_last(tmp_path: Path) -> None:
    """An entry that draws random numbers while it loads does not move the restored streams."""

    class Greedy:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(10)

    url = new_place("memory", tmp_path)
    torch.manual_seed(4)
    state = {"rng": waypost.RNG(), "zeta": Greedy(), "alpha": Greedy()}
    waypost.save(url, state)
    wanted = torch.rand(5)
    torch.manual_seed(5)
    waypost.load(url, {"rng": waypost.RNG(), "zeta": Greedy(), "alpha": Greedy()})
    assert torch.equal(torch.rand(5), wanted)


def test_progress_counts_and_own_counters_return(tmp_path: Path) -> None:
    """Progress keeps its counters, also those that the user adds."""
    url = new_place("memory", tmp_path)
    progress = waypost.Progress(tokens=0, best=0.0)
    progress.epoch, progress.batch, progress.samples, progress.tokens = 2, 5, 640, 10**12
    progress.best = 0.125
    waypost.save(url, {"progress": progress})
    restored = waypost.Progress(tokens=0, best=0.0)
    waypost.load(url, {"progress": restored})
    assert (restored.epoch, restored.batch, restored.samples) == (2, 5, 640)
    assert (restored.tokens, restored.best) == (10**12, 0.125)
