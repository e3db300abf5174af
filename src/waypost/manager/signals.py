"""Signals that ask a job to stop: noted in the handler, acted on at the next boundary.

The first one sets a flag and nothing else. A second one ends the process at once by the signal's
own default action. Data workers that were forked ignore it while their parent lives, so that the
step in progress can end.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Final

_log = logging.getLogger("waypost")

STOPPING: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)


class SignalWatch:
    """Watches for signals from creation until :meth:`close`; in the main thread only.

    A handler of the program's own that was there before is called too. Once closed, or forgotten,
    the watch hands every signal on to what was there before it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._received: int | None = None
        self._handlers: dict[int, _Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: the Checkpointer is not in the main thread")
            return
        for number in STOPPING:
            handler = _Handler(self, signal.getsignal(number))
            self._handlers[number] = handler
            signal.signal(number, handler)

    @property
    def received(self) -> int | None:
        """The first signal that arrived, or None."""
        return self._received

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that watches, and not a forked child of it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Puts the previous handlers back, unless somebody replaced ours."""
        if os.getpid() != self._pid:
            return
        for number, handler in self._handlers.items():
            handler.watch = None
            current: object = signal.getsignal(number)
            if current is handler:
                previous = handler.previous
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._handlers.clear()

    def note(self, number: int) -> bool:
        """Notes a signal; returns whether the process was asked before and must leave."""
        if os.getpid() != self._pid:
            return os.getppid() != self._pid
        if self._received is not None:
            return True
        self._received = number
        return False


class _Handler:
    """What the system calls: notes the signal for a watch that is still there."""

    def __init__(self, watch: SignalWatch, previous: Any) -> None:
        self.watch: weakref.ref[SignalWatch] | None = weakref.ref(watch)
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watch = self.watch() if self.watch is not None else None
        if watch is None:
            self._hand_on(number, frame)
        elif watch.note(number):
            _leave(number)
        elif watch.is_own_process and self.previous is not signal.default_int_handler:
            self._call_previous(number, frame)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self.previous in (signal.SIG_DFL, None):
            _leave(number)
        self._call_previous(number, frame)

    def _call_previous(self, number: int, frame: FrameType | None) -> None:
        if callable(self.previous):
            self.previous(number, frame)


def _leave(number: int) -> None:
    """Ends the process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
