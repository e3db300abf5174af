"""Run an action in a forked child and say how it ended; the parent never shares its fate."""

import dataclasses
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child ended: its result, or its error, or the signal that killed it."""

    result: Any = None
    error: str = ""
    signal: int | None = None
    exit_code: int | None = None

    @property
    def was_killed(self) -> bool:
        return self.signal == signal.SIGKILL

    def expect_result(self) -> Any:
        """The action's return value; fails the test when there is none."""
        assert self.signal is None, f"child died of signal {self.signal}"
        assert not self.error, self.error
        return self.result


def run_as_child(action: Callable[[], Any], report: int) -> None:
    """In the child: run the action, write what came of it to `report`, leave at once."""
    code = 0
    try:
        torch.set_num_threads(1)
        message = pickle.dumps((action(), ""))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        message = pickle.dumps((None, traceback.format_exc()))
    except BaseException:
        code = 1
        message = pickle.dumps((None, traceback.format_exc()))
    try:
        with os.fdopen(report, "wb") as stream:
            stream.write(message)
    finally:  # whatever happens, the child never goes on as a second test session
        os._exit(code)


def outcome_of(pid: int, report: int) -> Outcome:
    """In the parent: wait for the child and read what it reported."""
    with os.fdopen(report, "rb") as stream:
        message = stream.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome(signal=os.WTERMSIG(status))
    result, error = pickle.loads(message) if message else (None, "")
    return Outcome(result=result, error=error, exit_code=os.waitstatus_to_exitcode(status))


def in_child(action: Callable[[], Any]) -> Outcome:
    """Runs `action` in a forked child and waits for its end."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run_as_child(action, writer)
    os.close(writer)
    return outcome_of(pid, reader)


def die() -> None:
    """Ends this process as a power cut would: no handler, no flush, no exit code."""
    os.kill(os.getpid(), signal.SIGKILL)
