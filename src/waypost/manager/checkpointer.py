"""A run that saves itself and goes on by itself: the object that a training loop talks to."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from waypost.clock import SYSTEM_CLOCK, Clock
from waypost.comm import group_of
from waypost.core.plan import Planner
from waypost.errors import (
    ClosedError,
    CommitConflictError,
    CoordinationTimeoutError,
    PeerError,
    Preempted,
    WaypostError,
)
from waypost.format import documents, names
from waypost.manager.boundary import Boundary, Departure, Request
from waypost.manager.keeping import Keeping
from waypost.manager.resume import Resume
from waypost.manager.signals import SignalWatch
from waypost.manager.start import finish, start
from waypost.manager.timing import Moment, Trigger
from waypost.options import Options
from waypost.options import resolve as resolve_options
from waypost.sizes import size_text
from waypost.snapshot.load import Loading, load
from waypost.snapshot.metadata import encode_metrics
from waypost.snapshot.reshard import Reshard
from waypost.snapshot.save import CommitReceipt, Origin, Saving, declared, save_at
from waypost.state import describe
from waypost.state.progress import Progress
from waypost.storage import resolve
from waypost.storage.urls import Url

_log = logging.getLogger("waypost")

_OCCASIONS = ("end", "signal", "exception")

_GRACE_S: Final = 10.0
"""How long a rank whose training has failed waits for the others to say whether theirs has too:
they say so at once unless they hang in a collective, and then they never do."""


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
        replicated: As in :func:`waypost.save`.
        per_rank: As in :func:`waypost.save`.
        reshard: As in :func:`waypost.load`, for a start with another number of ranks.
        process_group: The ranks that train together, as in :func:`waypost.save`.
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
        replicated: Iterable[str] = (),
        per_rank: Iterable[str] = (),
        reshard: Reshard | None = None,
        process_group: object = None,
        options: Options | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        _check_arguments(save_every, keep, save_on)
        describe.check_state(state, "state")
        self._run = resolve(run_url)
        self._state = state
        self._save_every = save_every
        self._save_on = frozenset(save_on)
        self._metadata = metadata
        self._said = declared(replicated, per_rank)
        self._group = group_of(process_group)
        self._options = options
        self._settings = resolve_options(options)
        self._planner = Planner(self._settings.file_bytes_max)
        self._clock = clock
        self._pid = os.getpid()
        self._step = 0
        self._epoch = 0
        self._saved: tuple[int, int] | None = None
        self._parent: documents.Parent | None = None
        self._resumed_from: str | None = None
        self._metrics: Mapping[str, object] | None = None
        self._is_closed = False
        self._knows_signal = False
        self._signals: SignalWatch | None = None
        self._start = start(
            self._run,
            state,
            group=self._group,
            settings=self._settings,
            resume=resume,
            keep=keep,
            loading=Loading(reshard=dict(reshard or {})),
            facts={"save_every": str(save_every), "save_on": ", ".join(sorted(self._save_on))},
        )
        try:
            self._go_on(init_from)
        except BaseException:
            self._start.release()
            raise
        self._boundary = Boundary(self._group, self._start.name, self._settings.timeout_s)
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
        is_asked = self._signal != 0 or self._boundary.stop_signal != 0
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
        self._end_of_step(Moment(step=self._step, since_save_s=self._since_save()))

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
        self._end_of_step(moment)

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
        record, writer = self._start.record, self._start.writer
        receipt = save_at(
            self._run / name,
            self._state,
            Saving(
                step=self._step,
                metrics=metrics if metrics is not None else self._metrics,
                metadata=self._metadata,
                scopes=self._said.scopes,
                facts=self._said.facts,
                may_replace=None if writer is None else lambda: writer.may_replace(name),
                origin=Origin(
                    run=record.run,
                    incarnation=record.incarnation,
                    reason=reason,
                    parent=self._parent,
                    epoch=self._epoch,
                ),
                before_commit=None if writer is None else writer.before_commit,
                watch=self._boundary.attend if self._group.world_size > 1 else None,
            ),
            group=self._group,
            settings=self._settings,
            planner=self._planner,
        )
        self._saved = (self._step, self._epoch)
        self._saved_at_s = self._clock.monotonic()
        self._parent = documents.Parent(step=self._step, attempt=receipt.attempt)
        if writer is not None:
            _log.info(
                "step %d -> %s, %s in %.2f s (%s)",
                self._step,
                receipt.url,
                size_text(receipt.nbytes),
                receipt.seconds,
                reason,
            )
            writer.committed(name, self._step)
        return receipt

    def close(self) -> None:
        """Gives the run up and puts signal handlers back; saves nothing. May be called twice."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._signals is not None:
            self._signals.close()
        self._start.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        try:
            if error is None:
                self._finish()
            else:
                self._leave(error)
        finally:
            self.close()

    def _go_on(self, init_from: Url | None) -> None:
        loaded = self._start.loaded
        if loaded is None:
            if init_from is not None:
                self._initialise(init_from)
            _log.info("%s: no snapshot to resume from, starting at step 0", self._run.url)
            return
        manifest = loaded.manifest
        self._step = manifest.step or 0
        self._resumed_from = loaded.location.url
        self._parent = documents.Parent(step=manifest.step, attempt=manifest.attempt)
        self._epoch = manifest.epoch or 0
        if self._start.is_own:
            self._saved = (self._step, self._epoch)
        if loaded.report.ignored:
            _log.warning(
                "%s holds entries that the state does not: %s",
                self._resumed_from,
                ", ".join(loaded.report.ignored),
            )
        _log.info("resumed from %s at step %d", self._resumed_from, self._step)

    def _initialise(self, url: Url) -> None:
        found = {name: value for name, value in self._state.items() if describe.is_module(value)}
        if not found:
            raise ValueError("init_from: the state has no module whose weights could be loaded")
        load(url, found, process_group=self._group, options=self._options)
        _log.info("initialised %s from %s", ", ".join(found), resolve(url).url)

    @property
    def _is_saved(self) -> bool:
        """Whether no step and no epoch was counted since the last save."""
        return self._saved == (self._step, self._epoch)

    @property
    def _signal(self) -> int:
        """The signal that this process has got; 0 if none."""
        return (self._signals.received or 0) if self._signals is not None else 0

    def _end_of_step(self, moment: Moment) -> None:
        """Saves if that is due, and stops the training if a signal asks for it."""
        if self._group.world_size > 1:
            self._end_of_step_on_ranks(moment)
            return
        if self._signal:
            self._stop(self._signal)
        reason = self._save_every.due(moment) if self._save_every is not None else None
        if reason is not None and not self._is_saved:
            self.save(reason=reason)

    def _end_of_step_on_ranks(self, moment: Moment) -> None:
        """As one process does, but with what depends on time or signals agreed by all ranks."""
        wanted: Request | None = None
        reason = due = None
        if self._save_every is not None:
            reason = self._save_every.due(replace(moment, since_save_s=float("-inf")))
            due = self._save_every.due(moment) if self._group.rank == 0 else None
        if self._signal:
            wanted = Request(reason=f"signal {_name(self._signal)}", signal=self._signal)
        elif due is not None and reason is None and not self._is_saved:
            wanted = Request(reason=due)
        is_due = reason is not None and not self._is_saved
        request = self._boundary.reach(self._step, wanted, may_wait=not is_due)
        if request is not None and request.signal:
            self._stop(request.signal)
        reason = reason or (request.reason if request is not None else None)
        if reason is not None and not self._is_saved:
            self.save(reason=reason)

    def _stop(self, received: int) -> None:
        """Saves and raises :class:`Preempted`."""
        if not self._is_saved:
            self.save(reason=f"signal {_name(received)}")
        self._knows_signal = True
        url = (self._run / names.step_name(self._step)).url
        raise Preempted(
            f"stopped by {_name(received)} after step {self._step}, which is saved as {url}; the "
            f"same command goes on from there",
            signal=received,
            step=self._step,
            url=url,
        )

    def _finish(self) -> None:
        """Ends a block that was left without an error: saves, and stops if a signal asks for it."""
        if self._group.world_size > 1:
            self._boundary.end(self._step)
        received, knows = finish(
            self._group,
            self._start.name,
            watch=self._boundary.attend,
            step=self._step,
            received=self._signal,
            knows=self._knows_signal,
            timeout_s=self._settings.timeout_s,
        )
        if "end" in self._save_on and not self._is_saved:
            self.save(reason="end")
        if self._group.world_size > 1:
            self._boundary.close()
        if received and not knows:
            self._stop(received)

    def _leave(self, error: BaseException) -> None:
        """Ends a block that an error leaves; saves if all ranks have the same fate."""
        is_own = "exception" in self._save_on and _is_from_training(error)
        if self._group.world_size > 1 and not isinstance(error, Preempted):
            text = "" if isinstance(error, (PeerError, CoordinationTimeoutError)) else _text(error)
            departure = Departure(step=self._step, error=text)
            try:
                self._boundary.leave(departure)
                is_own = is_own and self._boundary.all_left_alike(departure, _GRACE_S)
            except WaypostError as failure:
                error.add_note(f"the other ranks could not be told: {failure}")
                return
        if is_own:
            self._save_for(error)

    def _save_for(self, error: BaseException) -> None:
        """Saves because of an exception, which stays the one that the caller sees."""
        if self._is_saved:
            return
        try:
            self.save(reason="exception")
        except Exception as failure:  # noqa: BLE001 - the training's own error must be the one seen
            error.add_note(f"the state could not be saved on the way out: {failure}")

    def _since_save(self) -> float:
        return self._clock.monotonic() - self._saved_at_s

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self._run.url}: this Checkpointer is closed")
        if os.getpid() != self._pid:
            raise CommitConflictError(
                f"{self._run.url}: this Checkpointer belongs to process {self._pid}; a "
                f"forked process must not save with it"
            )


def _name(number: int) -> str:
    return signal.Signals(number).name


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


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
