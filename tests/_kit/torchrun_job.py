"""What `torchrun` starts in the tests: a tiny FSDP2 job whose weights are known at every step.

`python -m torch.distributed.run … torchrun_job.py COMMAND FOLDER [NUMBER …]`; each rank writes
what it saw to `FOLDER/report-<rank>.json`.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import waypost

TIMEOUT_S = 5.0
STEPS_MAX = 200


class Net(nn.Module):
    """One matrix of 7 rows, and a buffer that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def full_weight(step: int) -> torch.Tensor:
    """The whole matrix after that many steps."""
    return torch.arange(21.0).reshape(7, 3) * step


def part_of_rank(full: torch.Tensor) -> torch.Tensor:
    """This rank's rows; none, when the ranks before it have them all."""
    rows = full.chunk(dist.get_world_size())
    return rows[dist.get_rank()] if dist.get_rank() < len(rows) else full[:0]


def job_model() -> nn.Module:
    """The model, sharded over all ranks."""
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def put(model: nn.Module, step: int) -> None:
    """Makes the model that of the step."""
    with torch.no_grad():
        model.weight.to_local().copy_(part_of_rank(full_weight(step)))
        model.steps.fill_(step)


def is_at(model: nn.Module, step: int) -> bool:
    """Whether this rank's part is that of the step."""
    ours = model.weight.detach().to_local()
    return torch.equal(ours, part_of_rank(full_weight(step))) and int(model.steps) == step


def train(folder: Path, until: int, signal_at: int, signalled: int) -> dict[str, Any]:
    """Resumes and trains until the step; one rank gets SIGTERM inside step `signal_at`.

    Every step has a collective, as training has: no rank runs ahead of the others.
    """
    model = job_model()
    state = {"model": model, "progress": waypost.Progress()}
    options = waypost.Options(timeout_s=30.0)
    seen: dict[str, Any] = {"code": 0}
    try:
        with waypost.Checkpointer(str(folder / "run"), state, options=options) as checkpointer:
            seen["first"] = checkpointer.step
            seen["is_right"] = is_at(model, checkpointer.step)
            while checkpointer.step < until:
                put(model, checkpointer.step + 1)
                if checkpointer.step + 1 == signal_at and dist.get_rank() == signalled:
                    os.kill(os.getpid(), signal.SIGTERM)
                dist.all_reduce(torch.ones(1))
                seen["last"] = checkpointer.step + 1
                checkpointer.step_done()
    except waypost.Preempted as preempted:
        seen |= {"code": preempted.code, "saved": preempted.step}
    # The launcher sends SIGTERM to all when the first one leaves: none leaves before the others
    # can take it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    return seen


def save_and_load(folder: Path, step: int) -> dict[str, Any]:
    """Loads the step before, where there is one; saves this one, and loads it back."""
    model = job_model()
    options = waypost.Options(timeout_s=30.0)
    before = folder / f"snap-{step - 1}"
    seen: dict[str, Any] = {"code": 0}
    if before.exists():
        waypost.load(str(before), {"model": model}, options=options)
        seen["before"] = is_at(model, step - 1)
    put(model, step)
    url = str(folder / f"snap-{step}")
    receipt = waypost.save(url, {"model": model}, step=step, options=options)
    seen["saved"] = receipt.step
    put(model, 99)
    waypost.load(url, {"model": model}, options=options)
    seen["after"] = is_at(model, step)
    return seen


def lose_a_rank(folder: Path, step: int, victim: int) -> dict[str, Any]:
    """Saves the step while one rank is killed, as it opens the first file of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher would end the others at once
    model = job_model()
    put(model, step)
    if dist.get_rank() == victim:
        sys.addaudithook(die_at_own_file(f".r{victim:05d}-"))
    options = waypost.Options(timeout_s=TIMEOUT_S)
    started = time.monotonic()
    try:
        waypost.save(str(folder / f"snap-{step}"), {"model": model}, step=step, options=options)
    except waypost.WaypostError as error:
        missing = getattr(error, "missing", ())
        errors = getattr(error, "errors", {})
        return {
            "code": 1,
            "error": type(error).__name__,
            "text": str(error),
            "named": sorted({*missing, *errors}),
            "waited_s": time.monotonic() - started,
        }
    return {"code": 0}


def die_at_own_file(mark: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: SIGKILL to this process before it opens a file with the mark in its name."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and mark in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "save_and_load": save_and_load,
    "lose_a_rank": lose_a_rank,
}


def main() -> int:
    """Runs the command in a process group; the exit code is that of the command."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path(sys.argv[2])
    seen = COMMANDS[sys.argv[1]](folder, *(int(number) for number in sys.argv[3:]))
    (folder / f"report-{rank}.json").write_text(json.dumps(seen))
    if seen["code"] == 0:
        with contextlib.suppress(RuntimeError):  # a peer that is gone already
            dist.destroy_process_group()
    return int(seen["code"])


if __name__ == "__main__":
    sys.exit(main())
