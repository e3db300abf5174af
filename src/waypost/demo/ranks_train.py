"""Trains a sharded transformer on handwritten digits, on as many ranks as the launcher starts.

Started by ``torchrun``; the same command starts a run and goes on with it, on any number of ranks.
Each step takes the same global batch, whoever trains: which samples it holds, and the noise on
them, follow from the seed and the step alone, and each rank takes its slice. What is random on each
rank for itself (here a draw that is only logged) comes from a stream that the state holds per rank.

Every rank writes a log of its own: ``start PID STEPS_DONE WORLD_SIZE``, then for each step
``step N LOSS DRAW`` with the loss of the global batch, and a draw from its own stream, to the bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import waypost
from waypost.demo.train import DigitReader, Digits

GLOBAL_BATCH_SIZE = 32
"""Divisible by every number of ranks that the demo uses."""


class Training:
    """All that a step reads and changes, and the step itself."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._seed = seed
        self._digits = Digits(held_out=False)
        model = DigitReader()
        _drop_nothing(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        own_seed = seed + dist.get_rank()
        random.seed(own_seed)
        np.random.seed(own_seed)
        torch.manual_seed(own_seed)
        self.progress = waypost.Progress()

    def state(self) -> dict[str, object]:
        """Returns everything that the next step depends on."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": waypost.RNG(),
            "progress": self.progress,
        }

    def step(self, number: int) -> float:
        """Trains on the global batch of a step and returns its loss, the same on all ranks."""
        pixels, labels = self._slice(number)
        scores = self.model(pixels)
        loss = nn.functional.cross_entropy(scores, labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.progress.samples += GLOBAL_BATCH_SIZE
        return float(mean / dist.get_world_size())

    def _slice(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the global batch of a step."""
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        indices = torch.randint(len(self._digits), (GLOBAL_BATCH_SIZE,), generator=draw)
        noise = torch.randn(GLOBAL_BATCH_SIZE, 8, 8, generator=draw)
        count = GLOBAL_BATCH_SIZE // dist.get_world_size()
        own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        pixels = self._digits.pixels[indices] + 0.05 * noise
        return pixels[own], self._digits.labels[indices][own]


def _drop_nothing(model: nn.Module) -> None:
    """Switches dropout off: what a rank drops would depend on how many ranks there are."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def take_streams(states: list[Any], rank: int, world_size: int) -> Any:
    """Gives each of a new number of ranks the random streams of a rank that saved.

    With more ranks than before some streams are used twice; the batches of this demo do not depend
    on them, so that does no harm here.
    """
    del world_size
    return states[rank % len(states)]


def main() -> None:
    """Trains until the asked number of steps is done, from wherever the run stands."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the order of additions, and so the last bit, must not vary
    dist.init_process_group("gloo")
    training = Training(options.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (
        open(options.folder / f"rank-{rank}.log", "a", buffering=1) as log,
        waypost.Checkpointer(
            options.folder / "run",
            training.state(),
            save_every=waypost.EverySteps(options.save_every),
            keep=waypost.KeepLast(3),
            reshard={"rng": take_streams},
            save_on=("end", "signal"),
            options=waypost.Options(timeout_s=30.0),
        ) as ckpt,
    ):
        log.write(f"start {os.getpid()} {ckpt.step} {world_size}\n")
        while ckpt.step < options.steps:
            loss = training.step(ckpt.step)
            draw = float(torch.rand(()))
            log.write(f"step {ckpt.step + 1} {loss.hex()} {draw.hex()}\n")
            ckpt.step_done(metrics={"loss": loss})
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a sharded transformer on digits.")
    parser.add_argument("--folder", type=Path, required=True, help="of the run and the logs")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two snapshots")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
