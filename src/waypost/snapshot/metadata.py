"""What a caller says about a snapshot, checked before anything is written."""

from __future__ import annotations

import operator
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from waypost import limits
from waypost.format import values
from waypost.format.jsontext import Json
from waypost.options import software
from waypost.state.extensions import small_node, small_value


def check_step(step: object) -> int | None:
    """Returns ``step`` as an int.

    Args:
        step: None, or any kind of integer: python's, numpy's, a tensor of one element.

    Raises:
        ValueError: A bool, a fraction, negative, or beyond 63 bits.
    """
    if step is None:
        return None
    refused = ValueError(f"step must be an integer from 0 to 2**63 - 1, not {step!r:.80}")
    if isinstance(step, (bool, np.bool_)):
        raise refused
    if isinstance(step, torch.Tensor):
        if (
            step.numel() != 1
            or step.is_floating_point()
            or step.is_complex()
            or (step.dtype == torch.bool)
        ):
            raise refused
        step = step.item()
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # a TypeError is what is asked for
    except TypeError:
        raise refused from None
    if not 0 <= number <= limits.STEP_MAX:
        raise refused
    return number


def encode_metrics(metrics: Mapping[str, object] | None) -> Json:
    """Returns the node for metrics: every number at full precision, NaN and infinities kept.

    Raises:
        ValueError: A name is not a non-empty string, or a value is not one number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must map names to numbers, not {metrics!r:.80}")
    encoder = values.Encoder(lambda value, path: None)
    found: dict[str, int | float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"metrics: a name must be a non-empty string, not {name!r:.80}")
        found[name] = _number(name, value)
    return encoder.node(found, "metrics")


def encode_metadata(metadata: object) -> Json:
    """Returns the node for a caller's metadata.

    Raises:
        UnsupportedError: It is not made of plain values.
    """
    return values.Encoder(small_node).node(metadata, "metadata")


def decode_metadata(node: Json) -> object:
    """Returns the metadata of a node."""

    def restore(tag: str, payload: Json, path: str) -> Any:
        return small_value(tag, payload)

    found: object = values.Decoder(restore).value(node, "metadata")
    return found


def environment() -> dict[str, str]:
    """Returns the software that writes: versions, and the commit of the working tree if known."""
    found = {
        "software": software(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "host": platform.node(),
    }
    commit = _git_commit(Path.cwd())
    return {**found, "git_commit": commit} if commit else found


def _number(name: str, value: object) -> int | float:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        count = value.numel() if isinstance(value, torch.Tensor) else value.size
        if count != 1:
            raise ValueError(f"metric {name!r} has {count} elements; a metric is one number")
        value = value.item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    raise ValueError(f"metric {name!r} must be a number, not {value!r:.80}")


def _git_commit(folder: Path) -> str | None:
    """Returns the commit that is checked out, read from files: a training job should not fork."""
    try:
        for place in [folder, *folder.parents]:
            head = place / ".git" / "HEAD"
            if head.is_file():
                text = head.read_text("utf-8").strip()
                if not text.startswith("ref: "):
                    return text[:64]
                return _git_reference(place / ".git", text[5:])
    except OSError:
        return None
    return None


def _git_reference(folder: Path, name: str) -> str | None:
    loose = folder / name
    if os.path.normpath(name) == name and loose.is_file():
        return loose.read_text("utf-8").strip()[:64]
    packed = folder / "packed-refs"
    if packed.is_file():
        for line in packed.read_text("utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line[:64].split(" ")[0]
    return None
