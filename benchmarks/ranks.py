"""``python -m benchmarks.ranks``: two ranks beside one process, the same bytes on the same disk.

Contenders alternate within a round: one process alone, two ranks that hold a half each (sharded),
two ranks that hold all of it alike (replicated, so each writes a half). Saves are durable; loads
are cold (the page cache is dropped before) and verified. Ratios are of the medians, to one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import waypost
from benchmarks import machine

TENSORS = 64
CONTENDERS = ("one process", "2 ranks, sharded", "2 ranks, replicated")


def main() -> int:
    """Runs the rounds in two processes, prints the table, keeps the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (1)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (5)")
    parser.add_argument("--dir", help="a folder on the disk to measure (the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ranks.json"))
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="waypost-bench-", dir=chosen.dir))
    try:
        torch.multiprocessing.spawn(
            _rank, args=(str(folder), chosen.gib, chosen.rounds), nprocs=2, join=True
        )
        times = json.loads((folder / "times.json").read_text("utf-8"))
    finally:
        machine.empty(folder)
    results = {"gib": chosen.gib, "rounds": chosen.rounds, **_report(times, chosen.gib)}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"\nfigures: {chosen.out}")
    return 0


def _rank(rank: int, folder: str, gib: float, rounds: int) -> None:
    """Takes part in every round; rank 0 notes the times."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    contenders = _contenders(rank, gib)
    times: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in CONTENDERS} for kind in ("save", "cold load")
    }
    for number in range(rounds + 1):
        for kind in times:
            for name in CONTENDERS:
                seconds = _measure(contenders[name], kind, f"{folder}/{name}", rank)
                if number:  # the first round warms up
                    times[kind][name].append(seconds)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times), "utf-8")
    dist.destroy_process_group()


def _contenders(rank: int, gib: float) -> dict[str, tuple[dict[str, Any] | None, Any]]:
    """Returns the state of this rank and its group for each contender; None to stand by."""
    rows = max(2, int(gib * (1 << 30)) // TENSORS // 4096 // 2 * 2)
    full = {f"layers.{n}.weight": torch.rand(rows, 1024) for n in range(TENSORS)}
    mesh = init_device_mesh("cpu", (2,))
    half = slice(rank * rows // 2, (rank + 1) * rows // 2)
    shards = {
        name: DTensor.from_local(tensor[half].clone(), mesh, [Shard(0)], run_check=False)
        for name, tensor in full.items()
    }
    return {
        "one process": ({"model": full} if rank == 0 else None, "self"),
        "2 ranks, sharded": ({"model": shards}, None),
        "2 ranks, replicated": ({"model": full}, None),
    }


def _measure(contender: tuple[dict[str, Any] | None, Any], kind: str, url: str, rank: int) -> float:
    state, group = contender
    if rank == 0:
        machine.drop_caches() if kind == "cold load" else machine.settle()
    dist.barrier()
    began = time.perf_counter()
    if state is not None:
        act: Callable[[], object] = (
            (lambda: waypost.load(url, state, process_group=group))
            if kind == "cold load"
            else (
                lambda: waypost.save(
                    url, state, replicated="model/**", overwrite=True, process_group=group
                )
            )
        )
        act()
    dist.barrier()
    return time.perf_counter() - began


def _report(times: dict[str, dict[str, list[float]]], gib: float) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind, found in times.items():
        print(f"\n{kind}, {gib:g} GiB, durable, disk\n")
        alone = statistics.median(found["one process"])
        for name, seconds in found.items():
            median = statistics.median(seconds)
            rate = gib * (1 << 30) / 1e9 / median
            ratio = alone / median
            print(
                f"  {name:<22}{rate:6.2f} GB/s   {ratio:5.2f} of one process   "
                f"{min(seconds):.2f}-{max(seconds):.2f} s"
            )
            results.setdefault(kind, {})[name] = {
                "gb_per_s": rate,
                "of_one_process": ratio,
                "median_s": median,
                "min_s": min(seconds),
                "max_s": max(seconds),
            }
    return results


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    raise SystemExit(main())
