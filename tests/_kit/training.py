"""A toy training job with everything that makes an exact resume hard, and tapes to compare."""

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import waypost
from _kit.tensors import raw

BATCHES_PER_EPOCH = 7
BATCH_SIZE = 4


class FakeScaler:
    """A gradient scaler's bookkeeping without a GPU: the scale grows, and halves on overflow."""

    def __init__(self) -> None:
        self.scale = 65536.0
        self.growth_tracker = 0

    def update(self, overflow: bool) -> None:
        """Counts a step."""
        if overflow:
            self.scale, self.growth_tracker = self.scale / 2, 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == 5:
            self.scale, self.growth_tracker = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and tracker."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them back."""
        self.scale, self.growth_tracker = state["scale"], state["growth_tracker"]


class Shuffled:
    """A loader that reshuffles each epoch with its own generator and knows its position."""

    def __init__(self, samples: int = BATCHES_PER_EPOCH * BATCH_SIZE) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(1234)
        self.epoch, self.position = 0, 0
        self.order = torch.randperm(samples, generator=self.generator)

    def next_batch(self) -> list[int]:
        """The next batch of sample numbers; a new epoch begins when the order is used up."""
        if self.position >= self.samples:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = torch.randperm(self.samples, generator=self.generator)
        batch = self.order[self.position : self.position + BATCH_SIZE].tolist()
        self.position += BATCH_SIZE
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, the epoch's order, and the generator that makes the next one."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = state["order"].clone()
        self.generator.set_state(state["generator"])


class Net(nn.Module):
    """Dropout, normalisation with buffers, and two kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BATCHES_PER_EPOCH * BATCH_SIZE, 8)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One number for each sample."""
        return self.layers(self.embed(batch)).squeeze(-1)


def seed_everything(seed: int) -> None:
    """All global generators start at the seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Job:
    """A training process: built afresh, then resumed or not, then stepped."""

    def __init__(self, seed: int = 0) -> None:
        seed_everything(seed)
        self.model = Net()
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2
        )
        warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer, [warmup, cosine], milestones=[4]
        )
        average = get_ema_multi_avg_fn(0.9)
        self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.scaler = FakeScaler()
        self.loader = Shuffled()
        self.progress = waypost.Progress()
        self.tape: list[tuple[Any, ...]] = []

    def state(self) -> dict[str, Any]:
        """The entries to save."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "ema": self.ema,
            "scaler": self.scaler,
            "data": self.loader,
            "progress": self.progress,
            "rng": waypost.RNG(),
        }

    def step(self) -> None:
        """One optimizer step; the tape gets the batch, the loss bits and three random draws."""
        self.model.train()
        batch = self.loader.next_batch()
        noise = random.random() + float(np.random.rand())
        target = torch.randn(len(batch)) + noise
        loss = ((self.model(torch.tensor(batch)) - target) ** 2).mean()
        self.optimizer.zero_grad()
        (loss * self.scaler.scale).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.grad /= self.scaler.scale
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.ema.update_parameters(self.model)
        self.scaler.update(overflow=batch[0] % 5 == 0)
        self.tape.append((tuple(batch), raw(loss), noise))

    def fingerprint(self) -> dict[str, Any]:
        """Every bit of the job's state that a later step could depend on."""
        return {
            "model": _tensor_bytes(self.model.state_dict()),
            "ema": _tensor_bytes(self.ema.state_dict()),
            "optimizer": _tensor_bytes(self.optimizer.state_dict()),
            "schedule": repr(self.schedule.state_dict()),
            "scaler": self.scaler.state_dict(),
            "loader": _tensor_bytes(self.loader.state_dict()),
            "python": random.getstate(),
            "numpy": [str(part) for part in np.random.get_state(legacy=True)],
            "numpy_key": np.random.get_state(legacy=True)[1].tobytes(),
            "torch": raw(torch.get_rng_state()),
        }


def _tensor_bytes(value: Any) -> Any:
    """The value with each tensor as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw(value)
    if isinstance(value, dict):
        return {key: _tensor_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tensor_bytes(item) for item in value]
    return value


def undisturbed(steps: int, seed: int = 0) -> Job:
    """A job that ran `steps` steps without Waypost."""
    job = Job(seed)
    for _ in range(steps):
        job.step()
    return job


def compiled(model: nn.Module) -> nn.Module:
    """`torch.compile(model)`, without the warnings that torch's own modules give on import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(model)
