"""Python's cycle collector, paused while very many small objects are made.

Describing or matching a state makes a few objects for each tensor and no cycles. The collector
would scan them all, and the whole program with them, again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses the collector for the block, if it was running."""
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()
