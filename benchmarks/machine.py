"""The machine: what it is, and how to bring it into the same condition before each measurement."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Measured:
    """One call: wall and processor time in seconds, peak memory above the start in bytes."""

    wall_s: float
    processor_s: float
    memory_bytes: int


def measure(action: Callable[[], object]) -> Measured:
    """Returns what one call of ``action`` took."""
    reset_peak()
    before = resident_bytes()
    started, used = time.perf_counter(), time.process_time()
    action()
    wall_s, processor_s = time.perf_counter() - started, time.process_time() - used
    return Measured(wall_s, processor_s, max(0, peak_bytes() - before))


def reset_peak() -> None:
    """Makes the kernel forget the process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def peak_bytes() -> int:
    """Returns the peak of resident memory since :func:`reset_peak`."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Returns resident memory."""
    return _status("VmRSS")


def drop_caches() -> str:
    """Writes back and empties the page cache; returns how, for the report."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", "ascii")
    except OSError:
        return "not dropped (needs root)"
    return "dropped by drop_caches"


def settle() -> None:
    """Waits until what was written before is on the medium."""
    os.sync()


def describe(folders: dict[str, Path]) -> dict[str, object]:
    """Returns what a reader needs to know of the machine."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "file_systems": {name: _file_system(folder) for name, folder in folders.items()},
    }


def empty(folder: Path) -> None:
    """Removes a folder of the benchmark's own."""
    shutil.rmtree(folder, ignore_errors=True)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _file_system(folder: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text("utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        if str(folder).startswith(mount) and len(mount) > len(best[0]):
            best = (mount, kind)
    return best[1]
