"""Names of runs and snapshots on disk: built and parsed by the same module.

Entry names become file names only through :func:`file_stem`, which keeps ordinary names as they are
and replaces what a file system may not hold.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from waypost import limits

LATEST: Final = "LATEST"
RUN: Final = "run.json"
LOCK: Final = ".lock"
DATA: Final = "data"
STRUCTURE: Final = "structure.json"
ATTEMPT: Final = re.compile(r"a[0-9a-f]{16}")
"""The form of an attempt's id, which is the name of its folder."""

_STEP = re.compile(r"step-(\d{1,19})")
_STEM = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def step_name(step: int) -> str:
    """Returns the folder name of the snapshot of ``step``."""
    return f"step-{step:09d}"


def parse_step(name: str) -> int | None:
    """Returns the step that a folder name holds, or None for a foreign name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match.group(1))
    return step if step <= limits.STEP_MAX else None


def file_stem(entry: str) -> str:
    """Returns a file name part for ``entry``; different entries get different ones.

    Capitals are replaced too, since some file systems take ``Model`` and ``model`` for one name.
    """
    if _STEM.fullmatch(entry):
        return entry
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", entry.encode("ascii", "ignore").decode())[:40]
    digest = hashlib.sha256(entry.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{readable.strip('-_') or 'entry'}.{digest}"


def data_file(entry: str, rank: int, number: int) -> str:
    """Returns the name of the ``number``-th data file of ``entry`` on ``rank``."""
    return f"{file_stem(entry)}.r{rank:05d}-{number:03d}.safetensors"


def index_file(rank: int) -> str:
    """Returns the name of the index of ``rank``."""
    return f"r{rank:05d}.index.json"
