"""``python -m benchmarks``: measures, prints a table, keeps the figures as JSON.

Contenders alternate: in each round every one of them saves, then every one of them loads, so that a
slow minute of the machine hits all alike. Figures are medians over the rounds; ratios are to the
fastest bare limit of the same round kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.contenders import Contender, State, contenders
from benchmarks.machine import Measured

_GIB = 1 << 30


def main() -> int:
    """Runs all benchmarks."""
    chosen = _arguments()
    torch.set_num_threads(1)
    disk = Path(tempfile.mkdtemp(prefix="waypost-bench-", dir=chosen.dir))
    shared = Path(tempfile.mkdtemp(prefix="waypost-bench-", dir="/dev/shm"))
    results: dict[str, object] = {
        "machine": machine.describe({"disk": disk, "tmpfs": shared}),
        "arguments": {key: str(value) for key, value in vars(chosen).items()},
    }
    try:
        state = _state(chosen.gib)
        for title, folder, durable, kinds in (
            ("disk, durable", disk, True, ("save", "cold load", "warm load")),
            ("disk, not durable", disk, False, ("save",)),
            ("tmpfs", shared, False, ("save", "warm load")),
        ):
            found = _rounds(folder, state, durable=durable, kinds=kinds, rounds=chosen.rounds)
            results[title] = _report(title, found, chosen.gib)
        del state
        results["20,000 tensors of 16 bytes"] = _small(disk, chosen.rounds)
        results["waypost ls"] = _start_up(disk)
    finally:
        machine.empty(disk)
        machine.empty(shared)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"\nfigures: {chosen.out}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (2)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (3)")
    parser.add_argument("--dir", help="a folder on the disk to measure (the temporary folder)")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/latest.json"), help="where figures go"
    )
    return parser.parse_args()


def _state(gib: float) -> State:
    """A state like a transformer's: some large tensors and many middling ones, float32."""
    generator = torch.Generator().manual_seed(0)
    total = int(gib * _GIB) // 4
    sizes = [total // 8] * 4 + [total // 2 // 64] * 64
    return {
        f"layers.{number}.weight": torch.empty(size).uniform_(generator=generator)
        for number, size in enumerate(sizes)
    }


def _rounds(
    folder: Path, state: State, *, durable: bool, kinds: tuple[str, ...], rounds: int
) -> dict[str, dict[str, list[Measured]]]:
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found: dict[str, dict[str, list[Measured]]] = {}
    for number in range(rounds + 1):
        for contender in contenders():
            place = folder / contender.name.replace(" ", "-").replace(",", "")
            measures = _one(contender, place, state, into, durable=durable, kinds=kinds)
            machine.empty(place)
            if number:  # the first round warms up
                for kind, measured in measures.items():
                    found.setdefault(kind, {}).setdefault(contender.name, []).append(measured)
    return found


def _one(
    contender: Contender,
    place: Path,
    state: State,
    into: State,
    *,
    durable: bool,
    kinds: tuple[str, ...],
) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    machine.settle()
    if contender.save is not None:
        save = contender.save
        found["save"] = machine.measure(lambda: save(place, state, durable))
    elif len(kinds) > 1:
        buffered = next(c for c in contenders() if c.name == "bare pwrite, buffered")
        if buffered.save is not None:
            buffered.save(place, state, durable)
    if contender.load is not None and len(kinds) > 1:
        load = contender.load
        if "cold load" in kinds:
            machine.drop_caches()
            found["cold load"] = machine.measure(lambda: load(place, into))
        load(place, into)
        found["warm load"] = machine.measure(lambda: load(place, into))
        if not contender.is_limit:
            _check(state, into, contender.name)
    return found


def _check(state: State, into: State, name: str) -> None:
    for key, tensor in state.items():
        if not torch.equal(tensor, into[key]):
            raise AssertionError(f"{name} returned other numbers for {key}")
        into[key].zero_()


def _report(
    title: str, found: dict[str, dict[str, list[Measured]]], gib: float
) -> dict[str, object]:
    kept: dict[str, object] = {}
    for kind, by_name in found.items():
        print(f"\n{title}: {kind} of {gib:g} GiB")
        print(f"{'':34}{'GB/s':>7}{'of limit':>10}{'min–max s':>16}{'cpu s/GiB':>11}{'MiB':>7}")
        limit_s = min(
            statistics.median(m.wall_s for m in measured)
            for name, measured in by_name.items()
            if name.startswith("bare")
        )
        rows: dict[str, object] = {}
        for name, measured in by_name.items():
            row = _row(measured, limit_s, gib)
            rows[name] = row
            print(
                f"{name:34}{row['gb_per_s']:>7.2f}{row['of_limit']:>10.2f}"
                f"{row['min_s']:>8.2f}–{row['max_s']:<7.2f}{row['cpu_s_per_gib']:>11.2f}"
                f"{row['memory_mib']:>7.0f}",
                flush=True,
            )
        kept[kind] = rows
    return kept


def _row(measured: list[Measured], limit_s: float, gib: float) -> dict[str, float]:
    walls = [one.wall_s for one in measured]
    median_s = statistics.median(walls)
    return {
        "gb_per_s": gib * _GIB / median_s / 1e9,
        "of_limit": limit_s / median_s,
        "median_s": median_s,
        "min_s": min(walls),
        "max_s": max(walls),
        "cpu_s_per_gib": statistics.median(one.processor_s for one in measured) / gib,
        "memory_mib": max(one.memory_bytes for one in measured) / (1 << 20),
    }


def _small(folder: Path, rounds: int) -> dict[str, object]:
    state = {f"p.{number:05d}": torch.randn(4) for number in range(20_000)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    print("\n20,000 tensors of 16 bytes, durable, disk")
    print(f"{'':34}{'save s':>8}{'load s':>8}{'bytes/tensor':>14}")
    rows: dict[str, object] = {}
    for contender in contenders():
        if contender.is_limit or contender.save is None or contender.load is None:
            continue
        saves, loads, size = [], [], 0
        for _ in range(min(rounds, 3)):
            place = folder / "small"
            save, load = contender.save, contender.load
            saves.append(machine.measure(lambda: save(place, state, True)).wall_s)  # noqa: B023
            loads.append(machine.measure(lambda: load(place, into)).wall_s)  # noqa: B023
            size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            machine.empty(place)
        row = {
            "save_s": statistics.median(saves),
            "load_s": statistics.median(loads),
            "bytes_per_tensor": size / len(state),
        }
        rows[contender.name] = row
        print(
            f"{contender.name:34}{row['save_s']:>8.2f}{row['load_s']:>8.2f}"
            f"{row['bytes_per_tensor']:>14.0f}",
            flush=True,
        )
    return rows


def _start_up(folder: Path) -> dict[str, float]:
    import waypost

    run = folder / "run"
    for step in range(5):
        waypost.save(run / f"step-{step:09d}", {"x": torch.ones(3)}, step=step)
    walls = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "waypost", "ls", str(run)], check=True, capture_output=True
        )
        walls.append(time.perf_counter() - started)
    median_s = statistics.median(walls)
    print(f"\nwaypost ls, whole command: {median_s:.3f} s ({min(walls):.3f}–{max(walls):.3f})")
    return {"median_s": median_s, "min_s": min(walls), "max_s": max(walls)}


if __name__ == "__main__":
    sys.exit(main())
