"""``python -m benchmarks.plan``: what planning costs, by the number of ranks; nothing is written.

One rank of a simulated job plans a save of a model of 10,000 tensors, sharded by FSDP2 or by FSDP
and tensor parallelism together. Everything that a rank does alone is done for real, with the sizes
that the job would have; messages of the other ranks are made up. Peers' planners run beside it
where they can: DCP's needs the plans of all ranks in one process, so it is measured up to 64 ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from waypost.core.plan import Planner
from waypost.format import digests, documents, shardings
from waypost.format.documents import DataFile, Entry, EntrySummary, FileRecord
from waypost.format.shardings import Ranks, Sharding
from waypost.format.tensortypes import TensorType
from waypost.snapshot.attempt import Written
from waypost.state.describe import Piece

WORLDS = (64, 256, 1024, 4096)
TENSOR_PARALLEL = 8
SHAPES = ((4096, 4096), (16384, 4096), (4096, 16384), (4096,), (1024, 4096))
"""Of a transformer: attention, the two of the feed-forward network, a norm, grouped keys."""


@dataclass(frozen=True)
class _Bytes:
    """A source that has a size, and nothing to be read."""

    size: int

    @property
    def nbytes(self) -> int:
        """The size."""
        return self.size

    def view(self) -> memoryview | None:
        """Is never asked for."""
        raise AssertionError("nothing is read")

    def copy(self, start: int, out: memoryview) -> None:
        """Is never asked for."""
        raise AssertionError("nothing is read")


def main() -> int:
    """Prints the growth curves and keeps the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan.json"))
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for layout in ("FSDP2", "FSDP x TP"):
        print(f"\n{layout}, {chosen.tensors} tensors, one rank of each world\n")
        rows = [_measure(layout, world, chosen.tensors) for world in WORLDS]
        _print(rows)
        results[layout] = rows
    results["DCP"] = [_measure_dcp(world, chosen.tensors // 10) for world in (4, 16, 64)]
    print(f"\nbeside DCP, {chosen.tensors // 10} tensors, FSDP2\n")
    _print(results["DCP"])
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"\nfigures: {chosen.out}")
    return 0


def _measure(layout: str, world: int, tensors: int) -> dict[str, Any]:
    """Returns the figures of one rank, and of rank 0, in a world of that size."""
    ranks = Ranks(world // 2, world)
    shapes = {f"model/layers.{n}.weight": SHAPES[n % len(SHAPES)] for n in range(tensors)}
    spread = {path: _sharding(layout, world, shape) for path, shape in shapes.items()}
    planner = Planner(64 << 30)
    cold_s, plan = _timed(lambda: planner.plan(_pieces(shapes, spread, ranks), {}, ranks))
    pieces = [_pieces(shapes, spread, ranks) for _ in range(5)]
    cached = [_timed(lambda made=made: planner.plan(made, {}, ranks))[0] for made in pieces]
    assert planner.hits == len(pieces)
    tree = {
        path.partition("/")[2]: {
            "$tensor": {"type": f"F32[{_joined(shape)}]", "sharding": spread[path].text}
        }
        for path, shape in shapes.items()
    }
    entry = Entry(kind="module", scope="replicated", tree=tree)
    structure_s, structure = _timed(
        lambda: documents.encode(documents.Structure(entries={"model": entry}, cuts=plan.cuts))
    )
    leader_s, manifest = _timed(lambda: _lead(world))
    index = _index(plan, ranks.rank)
    headers = sum(len(file.header) for file in plan.files)
    look_s, opened = _timed(lambda: _look_up(shapes, spread, Ranks(world // 4, world // 2)))
    return {
        "ranks": world,
        "plan_ms": 1000 * cold_s,
        "plan_cached_ms": 1000 * statistics.median(cached),
        "said_by_rank_bytes": len(msgspec.msgpack.encode(_said())),
        "leader_ms": 1000 * leader_s,
        "structure_ms": 1000 * structure_s,
        "manifest_kb": len(manifest) / 1000,
        "structure_kb": len(structure) / 1000,
        "index_of_rank_kb": len(index) / 1000,
        "headers_of_rank_kb": headers / 1000,
        "load_on_half_look_up_ms": 1000 * look_s,
        "load_on_half_indexes_read": opened,
        "load_on_half_read_kb": (len(manifest) + len(structure) + opened * (len(index) + headers))
        / 1000,
    }


def _sharding(layout: str, world: int, shape: tuple[int, ...]) -> Sharding:
    """Returns how a tensor is spread; tensor parallelism halves by rows or columns, not norms."""
    if layout == "FSDP2":
        return shardings.parse(f"0-{world - 1}/{world}/S0")
    mesh = f"{world // TENSOR_PARALLEL}x{TENSOR_PARALLEL}"
    if len(shape) == 1:
        ranks = [
            row * TENSOR_PARALLEL + column
            for column in range(TENSOR_PARALLEL)
            for row in range(world // TENSOR_PARALLEL)
        ]
        mesh = f"{TENSOR_PARALLEL}x{world // TENSOR_PARALLEL}"
        return shardings.parse(f"{','.join(map(str, ranks))}/{mesh}/R,S0")
    is_by_rows = shape[0] >= shape[1]
    placements = f"S0*{TENSOR_PARALLEL},S0" if is_by_rows else "S0,S1"
    return shardings.parse(f"0-{world - 1}/{mesh}/{placements}")


def _pieces(
    shapes: dict[str, tuple[int, ...]], spread: dict[str, Sharding], ranks: Ranks
) -> list[Piece]:
    """Returns what a rank holds, as its description would say."""
    found = []
    for path, shape in shapes.items():
        parts = spread[path].parts(ranks.rank, shape)
        held = tuple((part.box, _Bytes(4 * _count(part.local))) for part in parts)
        kind = TensorType("float32", shape)
        found.append(Piece(path, kind, held, spread[path], is_declared=True))
    return found


def _said() -> dict[str, Any]:
    """What a rank says in the round of writing."""
    record = FileRecord(path=f"data/a{0:016x}/r00000.index.json", bytes=0, digest="x" * 41)
    written = Written(index=record, entry_bytes={"model": 1}, has_pickle=False)
    builtins: dict[str, Any] = msgspec.to_builtins(written)
    return builtins


def _lead(world: int) -> bytes:
    """Does what rank 0 does with the messages of all ranks: read them, and make the manifest."""
    messages = [msgspec.msgpack.encode(_said()) for _ in range(world)]
    said = [msgspec.convert(msgspec.msgpack.decode(data), Written) for data in messages]
    manifest = documents.Manifest(
        format=documents.FORMAT,
        version=documents.VERSION,
        required=[],
        optional=[],
        attempt=f"a{0:016x}",
        step=1,
        created="2026-01-01T00:00:00.000000Z",
        world_size=world,
        bytes=sum(sum(one.entry_bytes.values()) for one in said),
        entries={"model": EntrySummary(kind="module", scope="replicated", tensors=1, bytes=1)},
        structure=said[0].index,
        indexes=[one.index for one in said],
    )
    return documents.encode_manifest(manifest, digests.algorithm("xxh3-128"))


def _index(plan: Any, rank: int) -> bytes:
    """Returns the index of a rank; digests of chunks are made up, of the right length."""
    files = [
        DataFile(
            name=file.name,
            entry=file.entry,
            bytes=file.nbytes,
            data_start=len(file.header),
            header="x" * 41,
            chunks="x" * (-(-file.data_bytes // (256 << 10)) * 64 // 3),
            digest="x" * 41,
        )
        for file in plan.files
    ]
    index = documents.Index(
        rank=rank, algorithm="xxh3-128", chunk_bytes=256 << 10, files=files, entries={}
    )
    return documents.encode(index)


def _look_up(shapes: dict[str, tuple[int, ...]], spread: dict[str, Sharding], ranks: Ranks) -> int:
    """Returns how many indexes a rank reads that loads with FSDP2 on another number of ranks."""
    target = shardings.parse(f"0-{ranks.world_size - 1}/{ranks.world_size}/S0")
    needed: set[int] = set()
    for path, shape in shapes.items():
        for part in target.parts(ranks.rank, shape):
            needed.update(spread[path].holders(part.box, shape))
    return len(needed)


def _measure_dcp(world: int, tensors: int) -> dict[str, Any]:
    """Returns what DCP's planner takes for all ranks, and what one of Waypost's ranks takes."""
    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    shapes = {f"model/layers.{n}.weight": SHAPES[n % len(SHAPES)] for n in range(tensors)}
    spread = {path: _sharding("FSDP2", world, shape) for path, shape in shapes.items()}
    properties = TensorProperties(dtype=torch.float32)

    def local(rank: int) -> SavePlan:
        items = []
        for path, shape in shapes.items():
            for part in spread[path].parts(rank, shape):
                offsets = torch.Size([start for start, _ in part.box])
                sizes = torch.Size([stop - start for start, stop in part.box])
                chunk = ChunkStorageMetadata(offsets, sizes)
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                index = MetadataIndex(path, offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    plans = [local(rank) for rank in range(world)]
    dcp_s, _ = _timed(lambda: create_default_global_save_plan(plans))
    ranks = Ranks(world // 2, world)
    pieces = _pieces(shapes, spread, ranks)
    own_s, _ = _timed(lambda: Planner(64 << 30).plan(pieces, {}, ranks))
    return {"ranks": world, "dcp_global_plan_ms": 1000 * dcp_s, "waypost_plan_ms": 1000 * own_s}


def _count(box: shardings.Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def _joined(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = act()
    return time.perf_counter() - began, found


def _print(rows: list[dict[str, Any]]) -> None:
    for name in rows[0]:
        values = "".join(
            f"{row[name]:>12,.1f}" if name != "ranks" else f"{row[name]:>12,}" for row in rows
        )
        print(f"  {name:<28}{values}")


if __name__ == "__main__":
    raise SystemExit(main())
