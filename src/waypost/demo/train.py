"""Trains a small transformer on handwritten digits; the same command starts it and goes on with it.

This is how a training script uses Waypost: everything that the next step depends on stands in one
dict, and ``Checkpointer`` restores it when the run already holds a snapshot. Nothing in here knows
whether it has been killed before.

Run it with ``python -m waypost.demo.train --run DIR --log FILE``. The log gets a line when
training starts (``start PID STEPS_DONE``) and one for each step (``step N LOSS BATCH``), with the
loss to the last bit and a digest of which samples the batch held.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import logging
import math
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import waypost
from waypost.demo import ENTRIES

BATCH_SIZE = 32
WARM_UP_STEPS = 20
HELD_OUT_EVERY = 5  # every fifth digit is kept for testing

Sample = tuple[Tensor, int, int]


class Digits(Dataset[Sample]):
    """Digits of 8 rows of 8 pixels; an item is (pixels, label, the item's own index)."""

    def __init__(self, *, held_out: bool) -> None:
        table = _digits_table()
        is_held_out = np.arange(len(table)) % HELD_OUT_EVERY == 0
        table = table[is_held_out == held_out]
        self.pixels = torch.from_numpy(table[:, :-1] / 16).float().reshape(-1, 8, 8)
        self.labels = torch.from_numpy(table[:, -1]).long()

    def __len__(self) -> int:
        """Returns the number of digits."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        """Returns one digit, its label and its index."""
        return self.pixels[index], int(self.labels[index]), index


class DigitReader(nn.Module):
    """A transformer that reads a digit as a sequence of its 8 pixel rows."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(1, 8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns the scores of the ten digits, [batch, 10], for pixels [batch, 8, 8]."""
        hidden: Tensor = self.encoder(self.embed(pixels) + self.position)
        scores: Tensor = self.head(hidden.mean(dim=1))
        return scores


class Training:
    """All that a step reads and changes, and the step itself."""

    def __init__(self, *, seed: int, steps: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = DigitReader()
        average = get_ema_multi_avg_fn(0.98)  # type: ignore[no-untyped-call]
        self.ema = AveragedModel(self.model, multi_avg_fn=average)
        self.optimizer = torch.optim.AdamW(_parameter_groups(self.model), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _learning_rate_factor(step, steps)
        )
        # With a generator of its own, which its state includes, the loader draws nothing from the
        # one that dropout uses when it starts its workers: a restart starts them once more.
        self.data: StatefulDataLoader[Sample] = StatefulDataLoader(
            Digits(held_out=False),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=2,
            generator=torch.Generator().manual_seed(seed),
        )
        self.progress = waypost.Progress()

    def state(self) -> dict[str, object]:
        """Returns everything that the next step depends on."""
        return {
            "model": self.model,
            "ema": self.ema,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.data,
            "rng": waypost.RNG(),
            "progress": self.progress,
        }

    def step(self, pixels: Tensor, labels: Tensor) -> float:
        """Trains on one batch and returns its loss."""
        scores = self.model(_disturb(pixels))
        loss = nn.functional.cross_entropy(scores, labels, label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.schedule.step()
        self.ema.update_parameters(self.model)
        self.progress.samples += len(labels)
        return loss.item()


def main() -> None:
    """Trains until the asked number of steps is done, from wherever the run stands."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the order of additions, and so the last bit, must not vary
    training = Training(seed=options.seed, steps=options.steps)
    state = {name: item for name, item in training.state().items() if name != options.forget}
    with (
        open(options.log, "a", buffering=1) as log,
        waypost.Checkpointer(
            options.run,
            state,
            save_every=waypost.EverySteps(options.save_every),
            keep=waypost.KeepLast(3) | waypost.KeepEvery(steps=20 * options.save_every),
        ) as ckpt,
    ):
        log.write(f"start {os.getpid()} {ckpt.step}\n")
        while ckpt.step < options.steps:
            for pixels, labels, indices in training.data:
                loss = training.step(pixels, labels)
                log.write(f"step {ckpt.step + 1} {loss.hex()} {_digest(indices)}\n")
                ckpt.step_done(metrics={"loss": loss})
                if ckpt.step == options.steps:
                    break
            else:
                training.progress.epoch += 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer on digits.")
    parser.add_argument("--run", required=True, help="directory of the run")
    parser.add_argument("--log", type=Path, required=True, help="file that gets a line per step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two snapshots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forget", choices=ENTRIES, help="leave this entry out of the state")
    return parser.parse_args()


def _digits_table() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    # Read straight from the file that scikit-learn ships: importing the package takes ten times
    # as long as reading the table.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn, which is not installed")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", ndmin=2)


def _parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _learning_rate_factor(step: int, steps: int) -> float:
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _disturb(pixels: Tensor) -> Tensor:
    # Draws from Python's, NumPy's and torch's generator, so that none of them may be forgotten.
    shifted = torch.roll(pixels, random.randint(-1, 1), dims=2)
    brightness = np.random.uniform(0.8, 1.2)
    return shifted * brightness + 0.05 * torch.randn_like(pixels)


def _digest(indices: Tensor) -> str:
    return hashlib.blake2s(indices.numpy().tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    main()
