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
from types import FrameType
from typing import Any, Final

_log = logging.getLogger("waypost")

STOPPING: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)


class SignalWatch:
    """Watches for signals from creation until :meth:`close`; in the main thread only."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: the Checkpointer is not in the main thread")
            return
        for number in STOPPING:
            self._previous[number] = signal.signal(number, self._handle)

    @property
    def received(self) -> int | None:
        """The first signal that arrived, or None."""
        return self._received

    def close(self) -> None:
        """Puts the previous handlers back, unless somebody replaced ours."""
        if os.getpid() != self._pid:
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if os.getppid() != self._pid:
                _leave(number)
            return
        if self._received is not None:
            _leave(number)
        self._received = number


def _leave(number: int) -> None:
    """Ends the process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
