"""Many ranks that fail, disagree or do not come: the others are told, nothing is published.

B009 B016 B045 B102 B103 B104 B106
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import waypost
from _kit import assert_same
from _kit.invariants import check_debris, committed, snapshot_url
from _kit.meshes import distributed
from _kit.places import files_under
from _kit.processes import results_of, run_world
from _kit.threads import all_ranks, errors_of, refused
from waypost.testing import RankFault

TIMEOUT_S = 10.0
OPTIONS = {"timeout_s": TIMEOUT_S}


def full_tensors(step: int) -> dict[str, torch.Tensor]:
    """Two matrices that depend on the step."""
    maker = torch.Generator().manual_seed(step)
    return {name: torch.randn(10, 4, generator=maker) for name in ("a", "b")}


def sharded(full: dict[str, torch.Tensor], group: Any) -> dict[str, DTensor]:
    """Each matrix by rows over all ranks of the group."""
    sizes = (group.world_size,)
    return {
        name: distributed(tensor, sizes, [Shard(0)], group.rank) for name, tensor in full.items()
    }


def saver(url: str, step: int, **arguments: Any) -> Callable[[Any], Any]:
    """A body that saves the matrices of the step."""
    options = waypost.Options(**OPTIONS)

    def body(group: Any) -> Any:
        state = {"model": sharded(full_tensors(step), group)}
        return waypost.save(
            url, state, step=step, process_group=group, options=options, **arguments
        )

    return body


def check_step(url: str, step: int) -> None:
    """The snapshot verifies and has the matrices of the step."""
    snapshot = waypost.open(url)
    report = snapshot.verify()
    assert report.ok, report.problems
    assert snapshot.step == step
    assert_same(snapshot.state_dict("model"), full_tensors(step))


def test_b009_a_failed_overwrite_leaves_the_old_set_whole(tmp_path: Path) -> None:
    """Two ranks with two shards each; the second rank's write fails."""
    run = str(tmp_path / "run")
    url = snapshot_url(run, 10)
    all_ranks(2, saver(url, 10))
    before = files_under(run)
    fault = RankFault(rank=1, phase="write", action="raise")
    errors = errors_of(2, saver(url, 11, overwrite=True), fault, wait_max_s=TIMEOUT_S)
    assert isinstance(errors[1], OSError)
    assert isinstance(errors[0], waypost.PeerError)
    assert list(errors[0].errors) == [1]
    check_step(url, 10)
    waypost.prune(run, keep=None, debris=True, dry_run=False)
    check_debris(run)
    assert set(before) <= set(files_under(run))
    check_step(url, 10)
    all_ranks(2, saver(url, 11, overwrite=True))
    check_step(url, 11)


@pytest.mark.parametrize("action", ["raise", "kill"])
@pytest.mark.parametrize("victim", [0, 1])
def test_b016_an_interrupted_save_ends_all_ranks_and_blocks_nothing(
    action: str, victim: int, tmp_path: Path
) -> None:
    """Step 20 fails on one rank: the other is told in time; both save step 20 again."""
    run = str(tmp_path / "run")
    all_ranks(2, saver(snapshot_url(run, 10), 10))
    fault = RankFault(rank=victim, phase="write", action=action)
    url = snapshot_url(run, 20)
    errors = errors_of(2, saver(url, 20), fault, wait_max_s=2 * TIMEOUT_S)
    other = errors[1 - victim]
    if action == "kill":
        assert isinstance(other, waypost.CoordinationTimeoutError)
        assert other.missing == (victim,)
    else:
        assert isinstance(errors[victim], OSError)
        assert isinstance(other, waypost.PeerError)
        assert list(other.errors) == [victim]
    assert str(victim) in str(other)
    assert sorted(committed(run)) == [10]
    all_ranks(2, saver(url, 20))
    assert sorted(committed(run)) == [10, 20]
    check_step(url, 20)


@pytest.mark.slow
def test_b045_retention_of_many_ranks_is_decided_by_one(tmp_path: Path) -> None:
    """50 steps with the newest two kept: nothing fails, and exactly these are left."""
    run = str(tmp_path / "run")
    policy = {"save_every": waypost.EverySteps(1), "keep": waypost.KeepLast(2), "save_on": ()}

    def body(group: Any) -> int:
        state = {"model": {"w": torch.zeros(3)}}
        with waypost.Checkpointer(run, state, process_group=group, **policy) as checkpointer:
            for step in range(50):
                state["model"]["w"].fill_(step + 1)
                checkpointer.step_done()
            return checkpointer.step

    assert all_ranks(2, body) == [50, 50]
    assert sorted(committed(run)) == [49, 50]
    assert torch.equal(waypost.open(f"{run}@50").read("model/w"), torch.full((3,), 50.0))


def prune_often(run: str) -> int:
    """Rank 0 adds a snapshot, then both ranks prune at once; how often this rank was let in."""
    done = 0
    for step in range(1, 51):
        if dist.get_rank() == 0:
            state = {"w": torch.full((3,), float(step))}
            waypost.save(snapshot_url(run, step), state, step=step, process_group="self")
        dist.barrier()
        try:
            waypost.prune(run, waypost.KeepLast(1), dry_run=False)
            done += 1
        except (waypost.AlreadyOwnedError, waypost.CommitConflictError):
            pass  # the other rank is at it
        dist.barrier()
    return done


@pytest.mark.slow
def test_b045_two_ranks_that_prune_at_once_do_no_harm(tmp_path: Path) -> None:
    """Files that the other rank has removed already are no error; the newest stays."""
    run = str(tmp_path / "run")
    done = results_of(run_world(2, prune_often, run=run))
    assert sum(done) >= 50, done
    assert 50 in committed(run)
    waypost.prune(run, waypost.KeepLast(1), dry_run=False)
    assert sorted(committed(run)) == [50]
    assert waypost.open(f"{run}@50").verify().ok


def test_b102_a_save_on_rank_0_only_names_the_missing_ranks(tmp_path: Path) -> None:
    """Within the time-out, and nothing is published."""
    url = str(tmp_path / "snap")
    save = saver(url, 1)
    caught: list[BaseException] = []

    def body(group: Any) -> None:
        if group.rank > 0:
            return
        with pytest.raises(waypost.CoordinationTimeoutError) as info:
            save(group)
        caught.append(info.value)

    all_ranks(3, body)
    (error,) = caught
    assert isinstance(error, waypost.CoordinationTimeoutError)
    assert error.missing == (1, 2)
    assert "1" in str(error)
    assert "2" in str(error)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


def test_b102_a_rank_that_calls_something_else_is_told_so(tmp_path: Path) -> None:
    """Rank 0 saves, rank 1 loads: both are shown both sides, at once."""
    url = str(tmp_path / "snap")
    all_ranks(2, saver(url, 1))

    def body(group: Any) -> None:
        state = {"model": sharded(full_tensors(2), group)}
        if group.rank == 0:
            waypost.save(url, state, overwrite=True, process_group=group)
        else:
            waypost.load(url, state, process_group=group)

    for error in refused(2, body):
        assert "save" in str(error)
        assert "load" in str(error)
    check_step(url, 1)


def test_b102_one_rank_may_save_by_itself(tmp_path: Path) -> None:
    """`process_group="self"` is the documented way to save on rank 0 only."""
    url = str(tmp_path / "snap")

    def body(group: Any) -> None:
        if group.rank == 0:
            waypost.save(url, {"w": torch.ones(3)}, process_group="self")

    all_ranks(2, body)
    assert torch.equal(waypost.open(url).read("w"), torch.ones(3))


HIDDEN = ("LATEST", "manifest.json", "step-000000010")


def look_through_an_old_view() -> None:
    """From now on this process sees no snapshot in any listing, and no file that says of one.

    So a client of a network mount answers from its cache, long after another one has written.
    """

    def blind(call: Callable[..., Any]) -> Callable[..., Any]:
        def stale(path: Any, *rest: Any, **options: Any) -> Any:
            if os.path.basename(str(path)) in HIDDEN:
                raise FileNotFoundError(errno.ENOENT, "hidden by an old view", str(path))
            return call(path, *rest, **options)

        return stale

    whole_listing = os.listdir
    os.listdir = lambda path=".": [name for name in whole_listing(path) if name not in HIDDEN]
    whole_scan = os.scandir

    class Scan:
        def __init__(self, path: Any = ".") -> None:
            self.entries = iter([e for e in whole_scan(path) if e.name not in HIDDEN])

        def __iter__(self) -> Any:
            return self.entries

        def __next__(self) -> Any:
            return next(self.entries)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            self.entries = iter([])

    os.scandir = Scan
    for name in ("stat", "lstat", "open", "access"):
        setattr(os, name, blind(getattr(os, name)))


def resume_with_an_old_view(run: str) -> tuple[int, list[float], str | None]:
    """Rank 1 sees an empty run; the step and the weights that each rank resumes with."""
    if dist.get_rank() == 1:
        look_through_an_old_view()
        assert not os.path.exists(snapshot_url(run, 10))
        assert "step-000000010" not in os.listdir(run)
    state = {"w": torch.zeros(3)}
    options = waypost.Options(**OPTIONS)
    with waypost.Checkpointer(run, state, save_on=(), options=options) as checkpointer:
        return checkpointer.step, state["w"].tolist(), checkpointer.resumed_from


@pytest.mark.slow
def test_b103_one_rank_looks_and_all_follow(tmp_path: Path) -> None:
    """Rank 1's file system lags behind: both ranks resume at step 10, none waits."""
    run = str(tmp_path / "run")
    waypost.save(snapshot_url(run, 10), {"w": torch.full((3,), 10.0)}, step=10)
    seen = results_of(run_world(2, resume_with_an_old_view, run=run))
    assert seen[0] == seen[1]
    assert seen[0][:2] == (10, [10.0] * 3)


def save_beside_collectives(run: str) -> list[float]:
    """Five saves without a pause, while another thread sums over all ranks in the same group."""
    sums: list[float] = []

    def collectives() -> None:
        for number in range(300):
            value = torch.tensor(float(number + dist.get_rank()))
            dist.all_reduce(value)
            sums.append(float(value))

    thread = threading.Thread(target=collectives)
    thread.start()
    options = waypost.Options(**OPTIONS)
    for step in range(1, 6):
        state = {"w": torch.full((64, 3), float(step)), "step": step}
        waypost.save(snapshot_url(run, step), state, step=step, options=options)
    thread.join()
    return sums


@pytest.mark.slow
def test_b104_saves_and_collectives_of_another_thread_do_not_meet(tmp_path: Path) -> None:
    """A save issues no collective on the user's group: all sums and all snapshots are right."""
    run = str(tmp_path / "run")
    for sums in results_of(run_world(2, save_beside_collectives, run=run)):
        assert sums == [2.0 * number + 1 for number in range(300)]
    listed = committed(run)
    assert sorted(listed) == [1, 2, 3, 4, 5]
    for step, url in listed.items():
        assert torch.equal(waypost.open(url).read("w"), torch.full((64, 3), float(step)))


def test_b106_ranks_with_other_directories_are_refused(tmp_path: Path) -> None:
    """A name made from each rank's own clock: both see both names, and nothing is written."""
    urls = [str(tmp_path / f"run-12:00:0{rank}") for rank in range(2)]

    def body(group: Any) -> None:
        state = {"w": torch.ones(3)}
        waypost.save(urls[group.rank], state, process_group=group)

    for error in refused(2, body):
        assert all(Path(url).name in str(error) for url in urls), error
    assert files_under(tmp_path) == []


def test_b106_a_run_is_agreed_when_it_is_opened(tmp_path: Path) -> None:
    """The Checkpointer refuses at construction, before a step is lost."""
    urls = [str(tmp_path / f"run-12:00:0{rank}") for rank in range(2)]

    def body(group: Any) -> None:
        waypost.Checkpointer(urls[group.rank], {"w": torch.ones(3)}, process_group=group)

    for error in refused(2, body):
        assert all(Path(url).name in str(error) for url in urls), error
    assert not [path for path in files_under(tmp_path) if path.name == "manifest.json"]
