"""``waypost demo``: a training run that is killed again and again, and one that is not, compared.

:func:`run` is what the command line calls. Importing this package imports nothing heavy.
"""

from __future__ import annotations

ENTRIES = ("model", "ema", "optimizer", "schedule", "data", "rng", "progress")  # of its state


def run(argv: list[str]) -> int:
    """Runs the demo with these arguments and returns its exit code.

    Returns:
        0 when both runs ended the same, bit for bit; 1 when anything differs; 2 for wrong
        arguments; 5 when the training could not be run.
    """
    # Not at the top: the trainer imports this package at each of its many starts.
    from waypost.demo.command import main

    return main(argv)
