"""A tiny model of a run beside the real thing: whatever is done to it, they agree.

The model is a dict from step to the token that the state was made from. Saves, overwrites,
crashes in the middle, prunes, deletions by hand and damage are drawn at random; after each of
them the real run must list exactly what the model holds, and every listed state must be whole.
"""

import errno
import random
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import waypost
from _kit import assert_same, files_under, in_child
from _kit.faults import at, faulty
from _kit.invariants import committed, put, quiet, read_state, sample_state, snapshot_url

RUN_CALLS_MAX = 60  # more than a small save makes: a fault behind the last call never fires


class RunMachine(RuleBasedStateMachine):
    """What a user, a crash and a disk can do to one run."""

    on_disk = True

    def __init__(self) -> None:
        super().__init__()
        quiet()
        self.folder = Path(tempfile.mkdtemp(prefix="run-machine-"))
        memory = f"memory://{uuid.uuid4().hex}/run"
        self.run = str(self.folder / "run") if self.on_disk else memory
        self.held: dict[int, int] = {}  # step -> token, everything committed
        self.damaged: set[int] = set()  # committed, with damage in their data
        self.broken: set[int] = set()  # their manifest cannot be read any more
        self.tokens = 1000

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _token(self) -> int:
        self.tokens += 1
        return self.tokens

    def _next_step(self) -> int:
        return max([0, *self.held, *self.broken]) + 1

    @initialize()
    def foreign_files(self) -> None:
        """The user's own files are in the run from the beginning."""
        if self.on_disk:
            (self.folder / "run" / "step-7.bak").mkdir(parents=True)
            (self.folder / "run" / "step-7.bak" / "mine.txt").write_text("mine")

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        """A new snapshot of a later step."""
        step, token = self._next_step() + ahead, self._token()
        waypost.save(snapshot_url(self.run, step), sample_state(token), step=step)
        self.held[step] = token

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def save_again_is_refused(self, data: st.DataObject) -> None:
        """An existing snapshot is not replaced unless asked for."""
        step = data.draw(st.sampled_from(sorted(self.held)))
        with pytest.raises(waypost.AlreadyExistsError):
            waypost.save(snapshot_url(self.run, step), sample_state(1), step=step)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        """The same step with other content; damage goes with the old content."""
        step, token = data.draw(st.sampled_from(sorted(self.held))), self._token()
        url = snapshot_url(self.run, step)
        waypost.save(url, sample_state(token), step=step, overwrite=True)
        self.held[step] = token
        self.damaged.discard(step)

    @rule(call=st.integers(1, RUN_CALLS_MAX), action=st.sampled_from(["error", "short", "after"]))
    def failing_save(self, call: int, action: str) -> None:
        """One storage call fails: whole or absent, and an error unless it is there."""
        step, token = self._next_step(), self._token()
        place = faulty(snapshot_url(self.run, step), at(call, action, errno.EIO))
        try:
            waypost.save(place, sample_state(token), step=step)
            reported = True
        except waypost.WaypostError:
            reported = False
        self._settle(step, token, must=reported)

    @precondition(lambda self: self.on_disk)
    @rule(call=st.integers(1, RUN_CALLS_MAX))
    def killed_save(self, call: int) -> None:
        """The process dies at a storage call: whole or absent."""
        step, token = self._next_step(), self._token()
        place = faulty(snapshot_url(self.run, step), at(call, "kill"))
        outcome = in_child(lambda: waypost.save(place, sample_state(token), step=step).step)
        self._settle(step, token, must=not outcome.was_killed)

    @precondition(lambda self: self.on_disk and self.held)
    @rule(call=st.integers(1, RUN_CALLS_MAX), data=st.data())
    def killed_overwrite(self, call: int, data: st.DataObject) -> None:
        """The process dies while it overwrites: the old content or the new one."""
        step, token = data.draw(st.sampled_from(sorted(self.held))), self._token()
        place = faulty(snapshot_url(self.run, step), at(call, "kill"))
        in_child(lambda: waypost.save(place, sample_state(token), step=step, overwrite=True).step)
        try:
            found = read_state(snapshot_url(self.run, step))["progress"]["step"]
        except (waypost.CorruptionError, waypost.FormatError):
            assert step in self.damaged
            return
        assert found in (self.held[step], token)
        if found == token:
            self.damaged.discard(step)
        self.held[step] = found

    def _settle(self, step: int, token: int, *, must: bool) -> None:
        if step in committed(self.run):
            self.held[step] = token
        else:
            assert not must, f"step {step}: success was reported and nothing is there"

    @rule(keep=st.integers(1, 3), debris=st.booleans())
    def prune(self, keep: int, debris: bool) -> None:
        """The newest stay; what they said before they did it is what they did."""
        arguments = {"keep": waypost.KeepLast(keep), "debris": debris}
        planned = waypost.prune(self.run, dry_run=True, **arguments)
        done = waypost.prune(self.run, **arguments, dry_run=False)
        assert list(planned.removed) == list(done.removed)
        for step in sorted(self.held)[:-keep]:
            del self.held[step]
            self.damaged.discard(step)

    @precondition(lambda self: self.on_disk and self.held)
    @rule(data=st.data())
    def delete_by_hand(self, data: st.DataObject) -> None:
        """Removing a snapshot's folder is legal at any time."""
        step = data.draw(st.sampled_from(sorted(self.held)))
        shutil.rmtree(snapshot_url(self.run, step))
        del self.held[step]
        self.damaged.discard(step)

    @precondition(lambda self: self.on_disk and set(self.held) - self.damaged)
    @rule(data=st.data(), seed=st.integers(0, 2**32))
    def damage(self, data: st.DataObject, seed: int) -> None:
        """A flipped byte in a data file: still listed, never accepted."""
        step = data.draw(st.sampled_from(sorted(set(self.held) - self.damaged)))
        chooser = random.Random(seed)
        snapshot = snapshot_url(self.run, step)
        attempt = waypost.open(snapshot).attempt  # other folders are debris, nobody reads them
        file = chooser.choice(files_under(Path(snapshot) / "data" / attempt))
        content = bytearray(file.read_bytes())
        content[chooser.randrange(len(content))] ^= chooser.randrange(1, 256)
        file.write_bytes(content)
        self.damaged.add(step)

    @precondition(lambda self: self.on_disk and self.held)
    @rule(data=st.data(), look=st.sampled_from([b"", b"\0" * 200, b"{"]))
    def break_manifest(self, data: st.DataObject, look: bytes) -> None:
        """A commit record that is none: not listed as committed any more."""
        step = data.draw(st.sampled_from(sorted(self.held)))
        (Path(snapshot_url(self.run, step)) / "manifest.json").write_bytes(look)
        del self.held[step]
        self.damaged.discard(step)
        self.broken.add(step)

    @rule(ahead=st.integers(0, 2))
    def resume(self, ahead: int) -> None:
        """Auto-resume takes the newest sound snapshot, or refuses; training goes on from it."""
        sound = sorted(set(self.held) - self.damaged)
        state = sample_state(0)
        if not sound and (self.held or self.broken):
            with pytest.raises(waypost.ResumeError):
                waypost.Checkpointer(self.run, state, save_on=()).__enter__()
            return
        target = self._next_step() + ahead
        with waypost.Checkpointer(self.run, state, save_on=()) as checkpointer:
            assert checkpointer.step == (sound[-1] if sound else 0)
            if sound:
                assert_same(state, sample_state(self.held[sound[-1]]))
            while checkpointer.step < target:
                checkpointer.step_done()
            token = self._token()
            put(state, token)
            checkpointer.save()
        self.held[target] = token

    @invariant()
    def listing_agrees(self) -> None:
        """Listed is what the model holds, and `latest` is the newest of it."""
        listed = committed(self.run)
        assert set(listed) == set(self.held)
        newest = snapshot_url(self.run, max(self.held)) if self.held else None
        assert waypost.latest(self.run) == newest

    @invariant()
    def content_agrees(self) -> None:
        """Sound snapshots verify and hold their state; damaged ones never verify."""
        for step, url in committed(self.run).items():
            snapshot = waypost.open(url) if step not in self.damaged else None
            if snapshot is None:
                self._check_damaged(url)
                continue
            assert snapshot.verify().ok
            assert_same(read_state(url), sample_state(self.held[step]), f"step {step}")

    def _check_damaged(self, url: str) -> None:
        try:
            assert not waypost.open(url).verify().ok
        except (waypost.CorruptionError, waypost.FormatError):
            return

    @invariant()
    def foreign_files_stay(self) -> None:
        """S4: what Waypost did not make is as it was."""
        mine = self.folder / "run" / "step-7.bak" / "mine.txt"
        assert not mine.parent.exists() or mine.read_text() == "mine"
        assert not self.on_disk or not (self.folder / "run").exists() or mine.exists()


class MemoryRunMachine(RunMachine):
    """The same run on the memory storage, without what only a disk can do."""

    on_disk = False


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


MACHINES: list[Any] = [RunMachine, MemoryRunMachine]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=["disk", "memory"])
def test_the_run_agrees_with_its_model(machine: Any) -> None:
    """A short walk."""
    run_state_machine_as_test(machine, settings=_settings(12, 15))


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES, ids=["disk", "memory"])
def test_the_run_agrees_with_its_model_for_long(machine: Any) -> None:
    """A long walk."""
    run_state_machine_as_test(machine, settings=_settings(100, 40))
