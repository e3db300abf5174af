"""A run that saves itself and goes on by itself: the object that a training loop talks to."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping, MutableMapping
from types import TracebackType
from typing import Self

from waypost.audit import catalog
from waypost.audit.catalog import Record
from waypost.clock import SYSTEM_CLOCK, Clock
from waypost.comm import group_of
from waypost.errors import (
    AlreadyExistsError,
    ClosedError,
    CommitConflictError,
    Preempted,
    WaypostError,
)
from waypost.format import documents, jsontext, names
from waypost.manager import owner, prune
from waypost.manager.keeping import Keeping, decide
from waypost.manager.resume import Resume, Resumed
from waypost.manager.resume import resume as resume_run
from waypost.manager.signals import SignalWatch
from waypost.manager.timing import Moment, Trigger
from waypost.options import Options
from waypost.options import resolve as resolve_options
from waypost.sizes import size_text
from waypost.snapshot.load import load
from waypost.snapshot.metadata import encode_metrics
from waypost.snapshot.save import CommitReceipt, Origin, save_at
from waypost.state import describe
from waypost.state.progress import Progress
from waypost.storage import resolve
from waypost.storage.urls import Url

_log = logging.getLogger("waypost")

_OCCASIONS = ("end", "signal", "exception")


class Checkpointer:
    """Saves, prunes and resumes a run of training; use it as a context manager.

    Creating one takes the run for this process and loads the newest usable snapshot into ``state``.
    From then on :meth:`step_done`, once per optimizer step, does all that is needed. The same
    command, started again after any kind of end, goes on where the last committed snapshot was.

    Not thread-safe: call it from the training loop's thread.

    Args:
        run_url: The run's folder: a path, ``file://`` or ``memory://``.
        state: Entry names to modules, optimizers, anything with ``state_dict``, tensors or values.
        save_every: When to save; None saves only when asked, and on the occasions below.
        keep: What to keep; None keeps everything.
        resume: ``"auto"``: the newest usable snapshot, or a fresh start when there is none;
            ``"must"``: the same, but there must be one; ``"latest"``: the newest, without falling
            back; a step; a URL, also of another run; ``False``: a fresh start in an empty run.
        init_from: A snapshot whose modules are loaded on a fresh start: weights only, from step 0.
        save_on: Occasions for a save of their own: ``"end"`` of the ``with`` block, ``"signal"``
            (SIGTERM, SIGUSR1, SIGINT), ``"exception"`` that leaves the block.
        metadata: Plain values that travel with every snapshot, such as the configuration.
        process_group: The ranks that train together; None for one process.
        options: See :class:`~waypost.Options`.
        clock: For durations; tests pass their own.

    Raises:
        AlreadyOwnedError: A live process writes to the run.
        ResumeError: Snapshots are there and none can be used.
        NotFoundError: A snapshot must be there and is not.
        MismatchError: The snapshot does not fit ``state``.

    Example:
        >>> import torch, waypost
        >>> model = torch.nn.Linear(2, 1)
        >>> with waypost.Checkpointer(
        ...     "memory://docs/run", {"model": model}, save_every=waypost.EverySteps(5)
        ... ) as ckpt:
        ...     for step in range(ckpt.step, 10):
        ...         ckpt.step_done(metrics={"loss": 1.0 / (step + 1)})
        >>> waypost.latest("memory://docs/run")
        'memory://docs/run/step-000000010'
    """

    def __init__(
        self,
        run_url: Url,
        state: MutableMapping[str, object],
        *,
        save_every: Trigger | None = None,
        keep: Keeping | None = None,
        resume: Resume = "auto",
        init_from: Url | None = None,
        save_on: Collection[str] = _OCCASIONS,
        metadata: object = None,
        process_group: object = None,
        options: Options | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        _check_arguments(save_every, keep, save_on)
        describe.check_state(state, "state")
        self._run = resolve(run_url)
        self._state = state
        self._save_every = save_every
        self._keep = keep
        self._save_on = frozenset(save_on)
        self._metadata = metadata
        self._group = group_of(process_group)
        self._options = options
        self._settings = resolve_options(options)
        self._clock = clock
        self._step = 0
        self._epoch = 0
        self._rollback_to = -1
        self._is_rollback_due = False
        self._saved: tuple[int, int] | None = None
        self._parent: documents.Parent | None = None
        self._protected: dict[str, str] = {}
        self._resumed_from: str | None = None
        self._metrics: Mapping[str, object] | None = None
        self._is_closed = False
        self._knows_signal = False
        self._signals: SignalWatch | None = None
        records = catalog.scan(self._run)
        incarnation = max((record.incarnation for record in records), default=0)
        self._owner = owner.acquire(self._run, at_least=incarnation, durable=self._settings.durable)
        try:
            records = catalog.scan(self._run)
            self._start(resume_run(self._run, records, state, resume, self._settings), init_from)
            self._note_rollback(records, is_asked=resume not in ("auto", "must"))
            self._sweep()
        except BaseException:
            self._owner.release()
            raise
        if "signal" in self._save_on:
            self._signals = SignalWatch()
        self._saved_at_s = clock.monotonic()

    @property
    def run_url(self) -> str:
        """The run."""
        return self._run.url

    @property
    def step(self) -> int:
        """Optimizer steps done: 0 on a fresh start, else those of the snapshot resumed from."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epochs done, as counted by :meth:`epoch_done`."""
        return self._epoch

    @property
    def resumed_from(self) -> str | None:
        """URL of the snapshot that was loaded at the start, or None."""
        return self._resumed_from

    @property
    def last_saved(self) -> int | None:
        """Step of the newest snapshot that this object has loaded or committed, or None."""
        return None if self._saved is None else self._saved[0]

    @property
    def should_stop(self) -> bool:
        """Whether a signal has asked the job to stop; look at it in long evaluations."""
        is_asked = self._signals is not None and self._signals.received is not None
        self._knows_signal = self._knows_signal or is_asked
        return is_asked

    def step_done(self, metrics: Mapping[str, object] | None = None) -> None:
        """Counts one optimizer step; saves and prunes when that is due.

        Args:
            metrics: Names to numbers, stored with the snapshot if one is saved here.

        Raises:
            Preempted: A signal had arrived; the state is saved.
            ValueError: A metric is not one number.
            StorageError: The save failed; earlier snapshots are there.
            FencedError: A later start of the run has taken over.
        """
        self._check_usable()
        encode_metrics(metrics)
        self._step += 1
        self._metrics = metrics
        for value in self._state.values():
            if isinstance(value, Progress):
                value.step = self._step
        self._boundary(Moment(step=self._step, since_save_s=self._since_save()))

    def epoch_done(self, metrics: Mapping[str, object] | None = None) -> None:
        """Counts one epoch, after the step that ended it; saves when that is due.

        A save at the end of an epoch replaces one of the same step, since it knows more.

        Args:
            metrics: As in :meth:`step_done`.

        Raises:
            Preempted, StorageError, FencedError: As :meth:`step_done`.
        """
        self._check_usable()
        encode_metrics(metrics)
        self._epoch += 1
        self._metrics = metrics if metrics is not None else self._metrics
        moment = Moment(step=self._step, epoch=self._epoch, since_save_s=self._since_save())
        self._boundary(moment)

    def save(
        self, metrics: Mapping[str, object] | None = None, *, reason: str = "manual"
    ) -> CommitReceipt:
        """Saves now and prunes; returns the receipt of the commit.

        Args:
            metrics: As in :meth:`step_done`.
            reason: Stored with the snapshot and logged.

        Raises:
            StorageError: The save failed; earlier snapshots are there.
            FencedError: A later start of the run has taken over.
        """
        self._check_usable()
        name = names.step_name(self._step)
        receipt = save_at(
            self._run / name,
            self._state,
            step=self._step,
            metrics=metrics if metrics is not None else self._metrics,
            metadata=self._metadata,
            overwrite=self._may_replace(name),
            group=self._group,
            settings=self._settings,
            origin=Origin(
                run=self._owner.record.run,
                incarnation=self._owner.record.incarnation,
                reason=reason,
                parent=self._parent,
                epoch=self._epoch,
            ),
            before_commit=self._before_commit,
        )
        self._saved = (self._step, self._epoch)
        self._saved_at_s = self._clock.monotonic()
        self._parent = documents.Parent(step=self._step, attempt=receipt.attempt)
        self._protected = {name: "just saved"}
        _log.info(
            "step %d -> %s, %s in %.2f s (%s)",
            self._step,
            receipt.url,
            size_text(receipt.nbytes),
            receipt.seconds,
            reason,
        )
        self._point_to(name)
        self._prune()
        return receipt

    def close(self) -> None:
        """Gives the run up and puts signal handlers back; saves nothing. May be called twice."""
        if self._is_closed or os.getpid() != self._owner.pid:
            return
        self._is_closed = True
        if self._signals is not None:
            self._signals.close()
        self._owner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_closed or os.getpid() != self._owner.pid:
            return
        try:
            if error is None:
                if "end" in self._save_on and not self._is_saved:
                    self.save(reason="end")
                if not self._knows_signal:
                    self._stop_if_asked()
            elif "exception" in self._save_on and _is_from_training(error):
                self._save_for(error)
        finally:
            self.close()

    def _start(self, resumed: Resumed, init_from: Url | None) -> None:
        contents = resumed.contents
        if resumed.location is None or contents is None or resumed.report is None:
            if init_from is not None:
                self._initialise(init_from)
            _log.info("%s: no snapshot to resume from, starting at step 0", self._run.url)
            return
        manifest = contents.documents.manifest
        self._step = manifest.step or 0
        self._resumed_from = resumed.location.url
        self._parent = documents.Parent(step=manifest.step, attempt=manifest.attempt)
        self._epoch = manifest.epoch or 0
        if resumed.location.url == (self._run / resumed.location.name).url:
            self._protected[resumed.location.name] = "resumed from"
            self._saved = (self._step, self._epoch)
        if resumed.report.ignored:
            _log.warning(
                "%s holds entries that the state does not: %s",
                self._resumed_from,
                ", ".join(resumed.report.ignored),
            )
        _log.info("resumed from %s at step %d", self._resumed_from, self._step)

    def _note_rollback(self, records: list[Record], *, is_asked: bool) -> None:
        """Notes that later snapshots were passed over, so that no later start takes them.

        Resuming from another run gives up all snapshots of this one. A roll-back that was asked for
        holds at once. One that came of falling back holds from the first commit on: until then the
        passed-over snapshot may turn out to be readable after all.
        """
        if self._resumed_from is None:
            return
        is_own = bool(self._protected)
        self._rollback_to = self._step if is_own else -1
        self._is_rollback_due = any(
            record.is_committed and not record.is_superseded and record.step > self._rollback_to
            for record in records
        )
        if is_asked:
            self._before_commit()

    def _before_commit(self) -> None:
        self._owner.check()
        if self._is_rollback_due:
            self._owner.roll_back_to(self._rollback_to)
            self._is_rollback_due = False

    def _initialise(self, url: Url) -> None:
        found = {name: value for name, value in self._state.items() if describe.is_module(value)}
        if not found:
            raise ValueError("init_from: the state has no module whose weights could be loaded")
        load(url, found, options=self._options)
        _log.info("initialised %s from %s", ", ".join(found), resolve(url).url)

    @property
    def _is_saved(self) -> bool:
        """Whether no step and no epoch was counted since the last save."""
        return self._saved == (self._step, self._epoch)

    def _boundary(self, moment: Moment) -> None:
        self._stop_if_asked()
        reason = self._save_every.due(moment) if self._save_every is not None else None
        if reason is not None and not self._is_saved:
            self.save(reason=reason)

    def _stop_if_asked(self) -> None:
        """Saves and raises :class:`Preempted` if a signal has arrived."""
        received = self._signals.received if self._signals is not None else None
        if received is None:
            return
        name = signal.Signals(received).name
        if not self._is_saved:
            self.save(reason=f"signal {name}")
        self._knows_signal = True
        url = (self._run / names.step_name(self._step)).url
        raise Preempted(
            f"stopped by {name} after step {self._step}, which is saved as {url}; the same "
            f"command goes on from there",
            signal=received,
            step=self._step,
            url=url,
        )

    def _save_for(self, error: BaseException) -> None:
        """Saves because of an exception, which stays the one that the caller sees."""
        if self._is_saved:
            return
        try:
            self.save(reason="exception")
        except Exception as failure:  # noqa: BLE001 - the training's own error must be the one seen
            error.add_note(f"the state could not be saved on the way out: {failure}")

    def _may_replace(self, name: str) -> bool:
        """Tells whether a snapshot of this step is there and is the run's own to replace.

        Raises:
            AlreadyExistsError: It belongs to another run.
        """
        found = catalog.record_of(self._run, name)
        if found is None or found.problem_code == "not-found":
            return False
        if found.run not in (None, self._owner.record.run):
            raise AlreadyExistsError(
                f"{found.url} belongs to another run ({found.run}); it is not overwritten"
            )
        return True

    def _point_to(self, name: str) -> None:
        document: jsontext.Json = {"snapshot": name, "step": self._step}
        try:
            self._run.storage.publish(
                (self._run / names.LATEST).path,
                jsontext.dump_pretty(document) + b"\n",
                replace=True,
                durable=self._settings.durable,
            )
        except WaypostError as error:
            _log.warning(
                "%s: %s was not updated, which costs a listing: %s",
                self._run.url,
                names.LATEST,
                error,
            )

    def _prune(self) -> None:
        if self._keep is None:
            return
        try:
            records = prune.own_records(catalog.scan(self._run), self._owner.record)
            decisions = decide(records, self._keep, self._protected)
            removed = tuple(decision for decision in decisions if not decision.keep)
            prune.remove_decided(self._run, removed)
        except WaypostError as error:
            _log.warning("%s: retention did not run: %s", self._run.url, error)

    def _sweep(self) -> None:
        try:
            for url in prune.sweep(self._run):
                _log.info("removed %s (left by a save that did not finish)", url)
        except WaypostError as error:
            _log.warning("%s: debris was not removed: %s", self._run.url, error)

    def _since_save(self) -> float:
        return self._clock.monotonic() - self._saved_at_s

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self._run.url}: this Checkpointer is closed")
        if os.getpid() != self._owner.pid:
            raise CommitConflictError(
                f"{self._run.url}: this Checkpointer belongs to process {self._owner.pid}; a "
                f"forked process must not save with it"
            )


def _is_from_training(error: BaseException) -> bool:
    return not isinstance(error, (WaypostError, GeneratorExit))


def _check_arguments(save_every: object, keep: object, save_on: Collection[str]) -> None:
    if save_every is not None and not isinstance(save_every, Trigger):
        raise TypeError(f"save_every must be a trigger such as EverySteps(500), not {save_every!r}")
    if keep is not None and not isinstance(keep, Keeping):
        raise TypeError(f"keep must be a policy such as KeepLast(3), not {keep!r}")
    unknown = sorted({save_on} if isinstance(save_on, str) else set(save_on) - set(_OCCASIONS))
    if unknown:
        raise ValueError(f"save_on: expected any of {', '.join(_OCCASIONS)}, not {unknown}")
