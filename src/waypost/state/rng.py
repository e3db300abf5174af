"""The random streams of a process, as one entry of the state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from waypost.state.extensions import check_stream, generator_state, set_generator


class RNG:
    """All random streams: python, numpy's legacy stream, torch on the CPU and every accelerator.

    Put one into the state under any name. It is captured before, and restored after, everything
    else, so that nothing that happens in between shifts a stream. Each rank keeps its own.

    Streams of your own (``torch.Generator``, ``numpy.random.Generator``) are entries of their own.
    """

    waypost_scope: ClassVar[str] = "per_rank"
    waypost_last: ClassVar[bool] = True

    def state_dict(self) -> dict[str, object]:
        """Returns the state of every stream."""
        state: dict[str, object] = {
            "python": generator_state(_PYTHON),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        for kind, module in _accelerators().items():
            state[kind] = list(module.get_rng_state_all())
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Sets every stream that is both in ``state`` and on this machine."""
        streams: dict[str, Any] = dict(state)
        set_generator(_PYTHON, streams["python"])
        check_stream(streams["numpy"])
        np.random.set_state(streams["numpy"])
        torch.set_rng_state(streams["torch"])
        for kind, module in _accelerators().items():
            saved = streams.get(kind, [])
            for device, stream in enumerate(saved[: module.device_count()]):
                module.set_rng_state(stream, device)


_PYTHON: random.Random = random._inst  # the module's own stream


def _accelerators() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            found[kind] = module
    return found
