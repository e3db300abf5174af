"""Ranks as processes of one gloo group, forked from the test; none outlives it."""

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from _kit.children import Outcome, outcome_of, run_as_child

DEADLINE_S = 100  # of a whole job, below the time-out of a test


def _member(rank: int, world_size: int, port: int, body: Callable[[int], Any]) -> Any:
    """In the child: joins the group, runs the body, leaves the group."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        return body(rank)
    finally:
        dist.destroy_process_group()


def _fork(action: Callable[[], Any], inherited: Sequence[int]) -> tuple[int, int]:
    """Process number of a child that runs the action, and where its report can be read."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the store's thread stays behind
        pid = os.fork()
    if pid == 0:
        for descriptor in (reader, *inherited):
            os.close(descriptor)
        run_as_child(action, writer)
    os.close(writer)
    return pid, reader


def _wait(readers: Sequence[int], deadline_s: float) -> bool:
    """Whether all children have reported, or died, before the deadline."""
    end = time.monotonic() + deadline_s
    waiting = set(readers)
    while waiting and (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select(list(waiting), [], [], left)
        waiting -= set(ready)
    return not waiting


def run_processes(
    world_size: int, body: Callable[[int], Any], *, deadline_s: float = DEADLINE_S
) -> list[Outcome]:
    """Runs `body(rank)` in a process for each rank, in one gloo group; how each ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[tuple[int, int]] = []
    for rank in range(world_size):
        inherited = [reader for _, reader in children]
        child = _fork(lambda rank=rank: _member(rank, world_size, store.port, body), inherited)
        children.append(child)
    is_done = _wait([reader for _, reader in children], deadline_s)
    if not is_done:
        for pid, _ in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    outcomes = [outcome_of(pid, reader) for pid, reader in children]
    assert is_done, f"not all ranks ended within {deadline_s} s: {outcomes}"
    return outcomes


def process_results(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """What the ranks returned; an error of a rank fails the test."""
    return [outcome.expect_result() for outcome in run_processes(world_size, body)]
