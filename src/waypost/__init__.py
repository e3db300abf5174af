"""Waypost saves the whole state of a PyTorch training job, so that it can always go on.

A snapshot is complete or absent; every byte of it is checked; its weights are plain safetensors.

Example:
    >>> import torch, waypost
    >>> model = torch.nn.Linear(2, 1)
    >>> receipt = waypost.save("memory://docs/one", {"model": model}, step=10)
    >>> waypost.load("memory://docs/one", {"model": model}).step
    10
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from waypost._version import __version__

if TYPE_CHECKING:
    from waypost.audit.catalog import Record
    from waypost.audit.leaves import LeafInfo
    from waypost.audit.verify import Problem, VerifyReport
    from waypost.errors import (
        AlreadyExistsError,
        AlreadyOwnedError,
        ClosedError,
        CommitConflictError,
        CommitUnknownError,
        CoordinationTimeoutError,
        CorruptionError,
        Difference,
        FencedError,
        FormatError,
        LeafNotFoundError,
        MismatchError,
        NotFoundError,
        PeerError,
        Preempted,
        ResumeError,
        StorageError,
        StorageFullError,
        UnsupportedError,
        WaypostError,
    )
    from waypost.format.classes import register_class, register_value
    from waypost.manager.checkpointer import Checkpointer
    from waypost.manager.keeping import KeepBest, KeepEvery, KeepLast
    from waypost.manager.prune import PruneReport, prune
    from waypost.manager.runs import latest, snapshots
    from waypost.manager.timing import AtSteps, EveryEpochs, EveryMinutes, EverySteps
    from waypost.options import Options
    from waypost.snapshot.load import LoadReport, load
    from waypost.snapshot.reader import Snapshot
    from waypost.snapshot.reader import open_snapshot as open
    from waypost.snapshot.save import CommitReceipt, save
    from waypost.state.progress import Progress
    from waypost.state.rng import RNG

_ERRORS = [
    "WaypostError",
    "AlreadyExistsError",
    "AlreadyOwnedError",
    "ClosedError",
    "CommitConflictError",
    "CommitUnknownError",
    "CoordinationTimeoutError",
    "CorruptionError",
    "Difference",
    "FencedError",
    "FormatError",
    "LeafNotFoundError",
    "MismatchError",
    "NotFoundError",
    "PeerError",
    "Preempted",
    "ResumeError",
    "StorageError",
    "StorageFullError",
    "UnsupportedError",
]

_HOMES: dict[str, tuple[str, str]] = {
    "save": ("snapshot.save", "save"),
    "load": ("snapshot.load", "load"),
    "open": ("snapshot.reader", "open_snapshot"),
    "Checkpointer": ("manager.checkpointer", "Checkpointer"),
    "RNG": ("state.rng", "RNG"),
    "Progress": ("state.progress", "Progress"),
    "EverySteps": ("manager.timing", "EverySteps"),
    "EveryEpochs": ("manager.timing", "EveryEpochs"),
    "EveryMinutes": ("manager.timing", "EveryMinutes"),
    "AtSteps": ("manager.timing", "AtSteps"),
    "KeepLast": ("manager.keeping", "KeepLast"),
    "KeepEvery": ("manager.keeping", "KeepEvery"),
    "KeepBest": ("manager.keeping", "KeepBest"),
    "latest": ("manager.runs", "latest"),
    "snapshots": ("manager.runs", "snapshots"),
    "prune": ("manager.prune", "prune"),
    "Options": ("options", "Options"),
    "register_value": ("format.classes", "register_value"),
    "register_class": ("format.classes", "register_class"),
    "Snapshot": ("snapshot.reader", "Snapshot"),
    "LeafInfo": ("audit.leaves", "LeafInfo"),
    "Record": ("audit.catalog", "Record"),
    "CommitReceipt": ("snapshot.save", "CommitReceipt"),
    "LoadReport": ("snapshot.load", "LoadReport"),
    "VerifyReport": ("audit.verify", "VerifyReport"),
    "Problem": ("audit.verify", "Problem"),
    "PruneReport": ("manager.prune", "PruneReport"),
    **{name: ("errors", name) for name in _ERRORS},
}

__all__ = [
    "__version__",
    "save",
    "load",
    "open",
    "Checkpointer",
    "RNG",
    "Progress",
    "EverySteps",
    "EveryEpochs",
    "EveryMinutes",
    "AtSteps",
    "KeepLast",
    "KeepEvery",
    "KeepBest",
    "latest",
    "snapshots",
    "prune",
    "Options",
    "register_value",
    "register_class",
    "Snapshot",
    "LeafInfo",
    "Record",
    "CommitReceipt",
    "LoadReport",
    "VerifyReport",
    "Problem",
    "PruneReport",
    "WaypostError",
    "AlreadyExistsError",
    "AlreadyOwnedError",
    "ClosedError",
    "CommitConflictError",
    "CommitUnknownError",
    "CoordinationTimeoutError",
    "CorruptionError",
    "Difference",
    "FencedError",
    "FormatError",
    "LeafNotFoundError",
    "MismatchError",
    "NotFoundError",
    "PeerError",
    "Preempted",
    "ResumeError",
    "StorageError",
    "StorageFullError",
    "UnsupportedError",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'waypost' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"waypost.{home[0]}"), home[1])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
