"""Counters of a training loop, as one entry of the state."""

from __future__ import annotations


class Progress:
    """Where training stands: steps, epochs, batches, samples, and counters of your own.

    ``step`` counts optimizer steps that are done. A :class:`~waypost.Checkpointer` sets it; the
    others are yours to advance.

    Args:
        counters: Further counters with their start values, such as ``tokens=0``.

    Example:
        >>> progress = Progress(tokens=0)
        >>> progress.advance(samples=64, tokens=8192)
        >>> progress.samples, progress.tokens
        (64, 8192)
    """

    _standard = ("step", "epoch", "batch", "samples")

    def __init__(self, **counters: int | float) -> None:
        self._counters: dict[str, int | float] = dict.fromkeys(self._standard, 0)
        for name, value in counters.items():
            self._counters[name] = _number(name, value)

    def __getattr__(self, name: str) -> int | float:
        counters = self.__dict__.get("_counters", {})
        if name in counters:
            found: int | float = counters[name]
            return found
        raise AttributeError(f"no counter {name!r}; there are {', '.join(counters)}")

    def __setattr__(self, name: str, value: int | float) -> None:
        if name == "_counters":
            object.__setattr__(self, name, value)
            return
        getattr(self, name)  # a counter that does not exist is a slip of the pen
        self._counters[name] = _number(name, value)

    def advance(self, **amounts: int | float) -> None:
        """Adds to counters.

        Raises:
            AttributeError: There is no such counter.
        """
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def state_dict(self) -> dict[str, int | float]:
        """Returns all counters."""
        return dict(self._counters)

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Sets the counters; those that ``state`` does not have keep their value."""
        self._counters.update(state)

    def __repr__(self) -> str:
        counters = ", ".join(f"{name}={value}" for name, value in self._counters.items())
        return f"Progress({counters})"


def _number(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"the counter {name} must be an int or a float, not {value!r}")
    return value
