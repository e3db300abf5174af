"""Two at one place at one time: the second acts at a chosen call of the first, every time.

A storage that calls back stands between the first and the files. No test waits for luck.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, in_child, new_place
from _kit.invariants import advance, committed, put, read_state, sample_state, save_step
from _kit.invariants import snapshot_url as url_of
from waypost.storage import Location, resolve
from waypost.testing import Fault, FaultyStorage, faulty


class _Interrupted(FaultyStorage):
    """Does something else first, the first time that a call of one kind meets a path."""

    def __init__(self, inner: Any, op: str, ending: str, action: Callable[[], Any]) -> None:
        super().__init__(inner)
        self._op = op
        self._ending = ending
        self._action: Callable[[], Any] | None = action
        self.result: Any = None

    def call(self, op: str, path: str, action: Any, half: Any = None) -> Any:
        chosen = self._action
        if chosen is not None and op == self._op and path.endswith(self._ending):
            self._action = None
            self.result = chosen()
        return super().call(op, path, action, half)

    @property
    def was_reached(self) -> bool:
        return self._action is None


def _interrupted(
    url: str, op: str, ending: str, action: Callable[[], Any]
) -> tuple[Location, _Interrupted]:
    place = resolve(url)
    storage = _Interrupted(place.storage, op, ending, action)
    return Location(storage, place.path), storage


def _outcome(action: Callable[[], Any]) -> str:
    """How it ended: nothing, or the kind of Waypost's error."""
    try:
        action()
    except waypost.WaypostError as error:
        return type(error).__name__
    return ""


def _elsewhere(action: Callable[[], Any], where: str) -> Callable[[], Any]:
    """The action here, in a thread, or in another process; it ends before the caller goes on."""
    if where == "here":
        return action
    if where == "process":
        return lambda: in_child(action).expect_result()

    def in_thread() -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(action()))
        thread.start()
        thread.join()
        return results[0]

    return in_thread


PLACES_OF_ACTION = ["here", "thread", "process"]


def _prune(run: str) -> str:
    return _outcome(lambda: waypost.prune(run, waypost.KeepLast(5), dry_run=False))


def _start_and_stop(run: str) -> str:
    return _outcome(lambda: waypost.Checkpointer(run, sample_state(0), save_on=()).close())


DISTURBANCES = {"prune": _prune, "start": _start_and_stop}


@pytest.mark.parametrize("where", ["here", "process"])
@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrite", "new"])
@pytest.mark.parametrize("moment", ["publish", "create"])
def test_a_save_by_hand_is_not_swept_while_it_is_written(
    moment: str, overwrite: bool, disturb: Any, where: str, tmp_path: Path
) -> None:
    """A receipt is for a whole snapshot, whoever tidies the run meanwhile."""
    run = str(tmp_path / "run")
    advance(run, 2)
    step = 2 if overwrite else 9
    ending = "manifest.json" if moment == "publish" else ".json"
    place, storage = _interrupted(
        url_of(run, step), moment, ending, _elsewhere(lambda: disturb(run), where)
    )
    waypost.save(place, sample_state(50), step=step, overwrite=overwrite)
    assert storage.was_reached
    assert waypost.open(url_of(run, step)).verify().ok
    assert_same(read_state(url_of(run, step)), sample_state(50))


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_save_by_hand_that_fails_leaves_the_old_one(disturb: Any, tmp_path: Path) -> None:
    """Tidied meanwhile, then an error instead of the commit: the old snapshot is whole."""
    run = str(tmp_path / "run")
    advance(run, 2)
    place, storage = _interrupted(url_of(run, 2), "publish", ".json", lambda: disturb(run))
    broken = Location(
        faulty(place, Fault(op="publish", call=1)).storage,
        place.path,
    )
    assert _outcome(lambda: waypost.save(broken, sample_state(50), step=2, overwrite=True))
    assert not storage.was_reached
    disturb(run)
    assert waypost.open(url_of(run, 2)).verify().ok
    assert_same(read_state(url_of(run, 2)), sample_state(2))


@pytest.mark.parametrize("where", PLACES_OF_ACTION)
@pytest.mark.parametrize("moment", ["remove", "list"])
def test_no_run_starts_while_it_is_pruned(moment: str, where: str, tmp_path: Path) -> None:
    """Prune has the run for itself until it is done; then it is free again."""
    run = str(tmp_path / "run")
    advance(run, 1)
    for step in (2, 3):
        advance(run, step)
    ending = "manifest.json" if moment == "remove" else "data"
    place, storage = _interrupted(
        run, moment, ending, _elsewhere(lambda: _start_and_stop(run), where)
    )
    waypost.prune(place, waypost.KeepLast(1), dry_run=False)
    assert storage.was_reached
    assert storage.result == "AlreadyOwnedError"
    assert sorted(committed(run)) == [3]
    assert advance(run, 4).step == 4


@pytest.mark.parametrize("where", PLACES_OF_ACTION)
@pytest.mark.parametrize("moment", ["create", "publish"])
def test_a_run_is_not_pruned_while_it_trains(moment: str, where: str, tmp_path: Path) -> None:
    """Whatever its save is doing just then."""
    run = str(tmp_path / "run")
    ending = "manifest.json" if moment == "publish" else ".json"
    place, storage = _interrupted(run, moment, ending, _elsewhere(lambda: _prune(run), where))
    state = sample_state(0)
    with waypost.Checkpointer(place, state, save_on=()) as checkpointer:
        put(state, 1)
        checkpointer.step_done()
        checkpointer.save()
        assert storage.was_reached
        assert storage.result == "AlreadyOwnedError"


def test_a_dry_run_disturbs_nobody(tmp_path: Path) -> None:
    """It may be asked while the run trains, and does not keep it from starting."""
    run = str(tmp_path / "run")
    advance(run, 2)
    place, storage = _interrupted(run, "list", "data", lambda: _start_and_stop(run))
    waypost.prune(place, waypost.KeepLast(1), dry_run=True)
    assert storage.result in ("", None)
    with waypost.Checkpointer(run, sample_state(0), save_on=()):
        waypost.prune(run, waypost.KeepLast(1), dry_run=True)


def _read_all(run: str, backup: Path) -> None:
    shutil.copytree(run, backup)


def _open_and_close(run: str, backup: Path) -> None:
    for path in Path(run).rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                stream.read(1)


def _reopen_to_write(run: str, backup: Path) -> None:
    for path in Path(run).rglob(".lock"):
        os.close(os.open(path, os.O_RDWR))


@pytest.mark.parametrize("touch", [_read_all, _open_and_close, _reopen_to_write])
def test_a_run_stays_owned_when_its_files_are_read(touch: Any, tmp_path: Path) -> None:
    """A backup made by the training process itself does not let a second one in."""
    run = str(tmp_path / "run")
    state = sample_state(0)
    with waypost.Checkpointer(run, state, save_on=()) as checkpointer:
        put(state, 1)
        checkpointer.step_done()
        checkpointer.save()
        touch(run, tmp_path / "backup")
        second = in_child(lambda: _start_and_stop(run)).expect_result()
        assert second == "AlreadyOwnedError"
        put(state, 2)
        checkpointer.step_done()
        checkpointer.save()
    assert sorted(committed(run)) == [1, 2]
    assert in_child(lambda: _start_and_stop(run)).expect_result() == ""


def test_a_backup_of_a_live_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    """It can be started while the original trains."""
    run, backup = str(tmp_path / "run"), str(tmp_path / "backup")
    with waypost.Checkpointer(run, sample_state(0), save_on=()) as checkpointer:
        checkpointer.step_done()
        checkpointer.save()
        shutil.copytree(run, backup)
        assert advance(backup, 2).step == 2


def _attempts(snapshot: str) -> list[Path]:
    return list((Path(snapshot) / "data").iterdir())


def _debris(snapshot: str, tmp_path: Path) -> None:
    """What a killed overwrite and an older one leave at the place of a snapshot."""

    def killed() -> None:
        place = faulty(snapshot, Fault(op="publish", call=1, action="kill"))
        waypost.save(place, sample_state(7), overwrite=True)

    assert in_child(killed).was_killed
    old = Path(snapshot) / "data" / f"a{0:016x}"
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"x" * 100)
    assert len(_attempts(snapshot)) == 3


@pytest.mark.parametrize("name", ["last", "run/best"])
def test_an_overwrite_reclaims_what_dead_ones_left(name: str, tmp_path: Path) -> None:
    """At its own place, wherever that is."""
    snapshot = str(tmp_path / name)
    waypost.save(snapshot, sample_state(1))
    _debris(snapshot, tmp_path)
    waypost.save(snapshot, sample_state(2), overwrite=True)
    assert len(_attempts(snapshot)) == 1
    assert waypost.open(snapshot).verify().ok
    assert_same(read_state(snapshot), sample_state(2))


def test_many_overwrites_leave_one_snapshot(tmp_path: Path) -> None:
    """Nothing grows."""
    snapshot = str(tmp_path / "last")
    for step in range(5):
        waypost.save(snapshot, sample_state(step), overwrite=step > 0)
        assert len(_attempts(snapshot)) == 1


@pytest.mark.parametrize("where", PLACES_OF_ACTION)
@pytest.mark.parametrize("moment", ["publish", "create"])
def test_two_overwrites_of_one_place_are_both_whole(
    moment: str, where: str, tmp_path: Path
) -> None:
    """The second runs from begin to end inside the first: the last to commit is there."""
    snapshot = str(tmp_path / "last")
    waypost.save(snapshot, sample_state(1))

    def other() -> str:
        return _outcome(lambda: waypost.save(snapshot, sample_state(2), overwrite=True))

    ending = "manifest.json" if moment == "publish" else ".json"
    place, storage = _interrupted(snapshot, moment, ending, _elsewhere(other, where))
    waypost.save(place, sample_state(3), overwrite=True)
    assert storage.result == ""
    assert waypost.open(snapshot).verify().ok
    assert_same(read_state(snapshot), sample_state(3))
    assert len(_attempts(snapshot)) == 1


def test_of_two_new_saves_at_one_place_the_first_to_commit_stays(tmp_path: Path) -> None:
    """The other is told, and leaves nothing."""
    snapshot = str(tmp_path / "one")
    place, _ = _interrupted(
        snapshot, "publish", "manifest.json", lambda: waypost.save(snapshot, sample_state(2))
    )
    with pytest.raises(waypost.AlreadyExistsError):
        waypost.save(place, sample_state(3))
    assert_same(read_state(snapshot), sample_state(2))
    assert len(_attempts(snapshot)) == 1


@pytest.mark.parametrize("where", PLACES_OF_ACTION)
@pytest.mark.parametrize("moment", ["open", "read_at"])
def test_a_load_of_what_is_replaced_meanwhile_gets_the_new_one(
    moment: str, where: str, tmp_path: Path
) -> None:
    """All of the new or all of the old, never an error, never a mixture."""
    snapshot = new_place("disk", tmp_path)
    _save_pair(snapshot, 1)
    place, storage = _interrupted(
        snapshot, moment, "", _elsewhere(lambda: _save_pair(snapshot, 2), where)
    )
    into = {"m": torch.zeros(1000), "n": torch.zeros(1000), "k": {"v": 0}}
    waypost.load(place, into)
    assert storage.was_reached
    assert into["k"]["v"] in (1, 2)
    for name in ("m", "n"):
        assert torch.equal(into[name], torch.full((1000,), float(into["k"]["v"]))), name


def test_a_load_of_what_is_removed_meanwhile_is_not_found(tmp_path: Path) -> None:
    """It ends; it does not look for ever."""
    snapshot = new_place("disk", tmp_path)
    _save_pair(snapshot, 1)
    place, storage = _interrupted(snapshot, "open", "", lambda: shutil.rmtree(snapshot))
    with pytest.raises(waypost.NotFoundError):
        waypost.load(place, {"m": torch.zeros(1000), "n": torch.zeros(1000), "k": {"v": 0}})
    assert storage.was_reached


def _save_pair(snapshot: str, number: int) -> None:
    state = {
        "m": torch.full((1000,), float(number)),
        "n": torch.full((1000,), float(number)),
        "k": {"v": number},
    }
    waypost.save(snapshot, state, overwrite=True)


def test_the_lock_of_an_attempt_is_no_part_of_the_snapshot(tmp_path: Path) -> None:
    """The file that marks a save in progress is not reported by verify."""
    snapshot = str(tmp_path / "one")
    waypost.save(snapshot, sample_state(1))
    (attempt,) = _attempts(snapshot)
    (attempt / ".lock").touch()
    assert waypost.open(snapshot).verify().ok


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "as saved"])
def test_debris_of_a_dead_process_is_removed_by_prune(copied: bool, tmp_path: Path) -> None:
    """A lock file without a living holder protects nothing."""
    run = str(tmp_path / "run")
    advance(run, 1)
    save_step(run, 2)
    _debris(url_of(run, 2), tmp_path)
    if copied:
        shutil.copytree(run, tmp_path / "copy")
        run = str(tmp_path / "copy")
    waypost.prune(run, dry_run=False)
    assert len(_attempts(url_of(run, 2))) == 1
    assert waypost.open(url_of(run, 2)).verify().ok
