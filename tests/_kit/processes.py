"""Real ranks: processes forked from one that has torch in memory, joined by gloo on 127.0.0.1.

`run_world(2, body, folder=...)` calls `body(folder=...)` in two processes of one process group and
says how each of them ended. The process that forks is started once, so that torch is imported
once and not by every rank. Bodies are functions at the top of a module.
"""

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from _kit.children import Outcome, run_as_child

LOOPBACK = "127.0.0.1"
# What the bodies import: found once by the process that forks, not by every rank.
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "waypost",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What to run: one call in each of `size` processes that form a process group."""

    size: int
    module: str
    name: str
    arguments: dict[str, Any]
    path: list[str]
    timeout_s: float


@dataclasses.dataclass(slots=True, kw_only=True)
class _Child:
    rank: int
    pid: int
    reader: int
    message: bytes = b""


def run_world(
    size: int, body: Callable[..., Any], *, timeout_s: float = 60.0, **arguments: Any
) -> list[Outcome]:
    """Calls `body(**arguments)` in `size` real ranks; how each ended, by rank.

    A rank that is not done after `timeout_s` is killed, and its outcome says so.
    """
    world = World(
        size=size,
        module=body.__module__,
        name=body.__qualname__,
        arguments=arguments,
        path=list(sys.path),
        timeout_s=timeout_s,
    )
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    pickle.dump(world, server.stdin)
    server.stdin.flush()
    outcomes: list[Outcome] = pickle.load(server.stdout)
    return outcomes


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """What the bodies returned, by rank; fails the test with the text of the first error."""
    return [outcome.expect_result() for outcome in outcomes]


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """The process that forks ranks; it ends when this one does."""
    path = [entry for entry in sys.path if entry]
    server = subprocess.Popen(
        [sys.executable, "-m", "_kit.processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait()
    server.stdout.close()


# --- in the process that forks --------------------------------------------------------------


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Runs each world that is asked for, until the other side is gone."""
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        try:
            world = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_run(world), answers)
        answers.flush()


def _run(world: World) -> list[Outcome]:
    sys.path[:] = world.path
    importlib.import_module(world.module)  # here, so that the ranks inherit it
    with _store() as port:
        children = [_fork(world, rank, port) for rank in range(world.size)]
        late = _collect(children, time.monotonic() + world.timeout_s)
        return [_outcome(child, world, is_late=child.rank in late) for child in children]


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """A TCPStore in a process of its own; its port.

    Not in a rank: as under torchrun, it outlives a rank that is killed. Not in this process: the
    store has a thread, and a process with threads does not fork safely.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader) as stream:
            yield int(stream.read())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(world: World, rank: int, port: int) -> _Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(2, 1)  # the answers are the parent's alone
        run_as_child(functools.partial(_be_a_rank, world, rank, port), writer)
    os.close(writer)
    return _Child(rank=rank, pid=pid, reader=reader)


def _be_a_rank(world: World, rank: int, port: int) -> Any:
    # A rank that is about to be killed for its lateness says first where it stands.
    faulthandler.dump_traceback_later(max(0.5, world.timeout_s - 2))
    body = getattr(importlib.import_module(world.module), world.name)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=world.timeout_s),
    )
    return body(**world.arguments)


def _collect(children: list[_Child], deadline: float) -> set[int]:
    """Reads what the children report; the ranks that had to be killed at the deadline."""
    late: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.reader, selectors.EVENT_READ, child)
        while selector.get_map():
            # Those that were killed at the deadline end at once: no limit is needed for them.
            ready = selector.select(None if late else max(0.0, deadline - time.monotonic()))
            if not ready and not late:
                late = {key.data.rank for key in selector.get_map().values()}
                _kill([child for child in children if child.rank in late])
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                key.data.message += chunk
                if not chunk:
                    selector.unregister(key.fd)
    return late


def _kill(children: list[_Child]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


def _outcome(child: _Child, world: World, *, is_late: bool) -> Outcome:
    os.close(child.reader)
    _, status = os.waitpid(child.pid, 0)
    if is_late:
        return Outcome(error=f"rank {child.rank} was not done after {world.timeout_s} s")
    if os.WIFSIGNALED(status):
        return Outcome(signal=os.WTERMSIG(status))
    result, error = pickle.loads(child.message) if child.message else (None, "no report")
    return Outcome(result=result, error=error, exit_code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
