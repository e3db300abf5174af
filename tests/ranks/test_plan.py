"""Who writes and reads what: replicas once, shared out to the chunk, for any sizes of tensors."""

import logging
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import waypost
from _kit import assert_same, assert_same_tensor, in_child, new_place
from _kit.ranks import (
    CHUNK_BYTES,
    WORLD_SIZE,
    Watched,
    distribute,
    job,
    load_made,
    mesh_of,
    noise,
    options,
    part_of,
    save_made,
    scopes_of,
    seen_through,
    written_by_rank,
)

MIB = 1024 * 1024
FAST = {"durable": False}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="waypost")


def _assert_even(written: list[int], total: int) -> None:
    """Every rank wrote within one chunk of its share, and all together wrote all of it."""
    assert total <= sum(written) <= total + 4096, (written, total)
    for rank, size in enumerate(written):
        assert abs(size - total / len(written)) <= CHUNK_BYTES, (rank, written)


# --- one large tensor ----------------------------------------------------------------------------

LARGE = {
    "flat": ((4_000_000,), torch.float32),
    "one row": ((1, 4_000_000), torch.float32),
    "one column": ((4_000_000, 1), torch.float32),
    "square": ((2000, 2000), torch.float32),
    "deep": ((1, 1, 5, 800_000), torch.float32),
    "prime rows": ((3, 1_333_333), torch.float32),
    "half": ((8_000_000,), torch.bfloat16),
    "bytes": ((4000, 4001), torch.uint8),
    "doubles": ((1999, 1001), torch.float64),
}


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["declared", "dtensor", "equal"])
@pytest.mark.parametrize(("shape", "dtype"), LARGE.values(), ids=LARGE)
def test_a_replicated_tensor_of_16_mb_has_four_writers(
    shape: tuple[int, ...], dtype: torch.dtype, how: str, tmp_path: Path
) -> None:
    """Each writes a quarter, to the chunk; what is read back is the whole."""
    url = new_place("disk", tmp_path)
    full = _numbers(shape, dtype)

    def make(group: Any) -> dict[str, Any]:
        if how != "dtensor":
            return {"x": full}
        return {"x": distribute(full, mesh_of(group.rank, 4), [Replicate()])}

    save_made(url, make, replicated="x" if how == "declared" else (), options=options(**FAST))
    _assert_even(written_by_rank(url, "x"), full.nbytes)
    (leaf,) = waypost.open(url).leaves()
    assert leaf.scope == "replicated"
    assert leaf.shape == shape
    assert leaf.shards == WORLD_SIZE
    assert_same_tensor(waypost.open(url).read("x"), full)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_replicated_tensor_is_shared_by_any_number_of_ranks(
    world_size: int, tmp_path: Path
) -> None:
    """Also where its size is not divisible."""
    url = new_place("disk", tmp_path)
    full = noise((1_000_003,), world_size)
    save_made(
        url, lambda _: {"x": full}, world_size=world_size, replicated="x", options=options(**FAST)
    )
    _assert_even(written_by_rank(url, "x", world_size), full.nbytes)
    assert_same_tensor(waypost.open(url).read("x"), full)


# --- many tensors --------------------------------------------------------------------------------


def _mixed(seed: int, count: int = 60) -> dict[str, torch.Tensor]:
    chooser = random.Random(seed)
    made = {}
    for n in range(count):
        size = int(10 ** chooser.uniform(0, 5.7))
        columns = chooser.choice([1, 3, 128])
        dtype = chooser.choice([torch.float32, torch.bfloat16, torch.uint8, torch.int64])
        made[f"t{n}"] = _numbers((-(-size // columns), columns), dtype)
    return made


@pytest.mark.slow
def test_many_replicated_tensors_are_shared_out_evenly(seed: int, tmp_path: Path) -> None:
    """From single numbers to megabytes: every rank within a chunk of its share."""
    url = new_place("disk", tmp_path)
    full = _mixed(seed)
    save_made(url, lambda _: {"m": full}, replicated="m", options=options(**FAST))
    _assert_even(written_by_rank(url, "m"), sum(t.nbytes for t in full.values()))
    assert_same(dict(waypost.open(url).state_dict("m")), full)


@pytest.mark.slow
def test_replicas_of_several_entries_are_shared_out_together(seed: int, tmp_path: Path) -> None:
    """The sum over all entries is even, not each for itself."""
    url = new_place("disk", tmp_path)
    entries = {f"e{n}": _mixed(seed + n, 8) for n in range(5)}
    save_made(url, lambda _: entries, replicated="**", options=options(**FAST))
    by_entry = [written_by_rank(url, entry) for entry in entries]
    total = sum(t.nbytes for entry in entries.values() for t in entry.values())
    _assert_even([sum(sizes) for sizes in zip(*by_entry, strict=True)], total)


def test_many_small_tensors_are_stored_whole(tmp_path: Path) -> None:
    """A tensor below a chunk is not cut: its key opens in any safetensors reader."""
    url = new_place("memory", tmp_path)
    full = {f"t{n}": noise((n + 1, 4), n) for n in range(50)}
    save_made(url, lambda _: {"m": full}, replicated="m")
    assert {leaf.shards for leaf in waypost.open(url).leaves()} == {1}


def test_a_tiny_state_is_written_once(tmp_path: Path) -> None:
    """Twelve bytes and a number, by whichever rank."""
    url = new_place("disk", tmp_path)
    save_made(url, lambda _: {"x": torch.arange(3.0), "n": {"step": 1}}, replicated="**")
    assert sum(written_by_rank(url, "x")) == 12
    files = list(Path(url).rglob("x.*.safetensors"))
    assert len(files) == 1
    assert_same(waypost.open(url).read("x"), torch.arange(3.0))


def test_a_state_without_tensors_is_written(tmp_path: Path) -> None:
    """By four ranks, loaded by four, by one, and without a group."""
    url = new_place("memory", tmp_path)
    save_made(url, lambda _: {"n": {"step": 5, "log": ["a"]}})
    for world_size in (4, 1):
        for state in load_made(url, lambda _: {"n": {}}, world_size=world_size):
            assert_same(state, {"n": {"step": 5, "log": ["a"]}})


# --- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1000, 1001, 3])
def test_hybrid_sharding_writes_the_state_once_and_shares_the_work(
    rows: int, tmp_path: Path
) -> None:
    """Two replicas of two shards: four writers, and the bytes of one replica."""
    url = new_place("disk", tmp_path)
    full = noise((rows, 1000), 1)

    def make(group: Any) -> dict[str, Any]:
        mesh = mesh_of(group.rank, 2, 2)
        return {"m": {"w": distribute(full, mesh, [Replicate(), Shard(0)])}}

    save_made(url, make, options=options(**FAST))
    written = written_by_rank(url, "m")
    assert sum(written) == full.nbytes
    upper = -(-rows // 2) * 4000
    for rank, size in enumerate(written):
        share = (upper if rank % 2 == 0 else full.nbytes - upper) / 2
        assert abs(size - share) <= CHUNK_BYTES, written
    assert scopes_of(url) == {"m/w": "sharded"}
    assert_same_tensor(waypost.open(url).read("m/w"), full)


PLACEMENTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "whole": ((4,), [Replicate()]),
    "replicas of shards": ((2, 2), [Replicate(), Shard(0)]),
    "shards of replicas": ((2, 2), [Shard(1), Replicate()]),
    "both dimensions": ((2, 2), [Shard(0), Shard(1)]),
    "one dimension twice": ((2, 2), [Shard(0), Shard(0)]),
}
SHAPES = [(8, 8), (7, 5), (3, 9), (1, 6), (2, 1), (1, 1), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("sizes", "placements"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_uneven_empty_and_missing_shards_come_back(
    sizes: tuple[int, ...], placements: list[Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    """Dimensions smaller than the world, and tensors without elements; stored once."""
    url = new_place("disk", tmp_path)
    full = noise(shape, 1)

    def make(group: Any) -> dict[str, Any]:
        return {"w": {"t": distribute(full, mesh_of(group.rank, *sizes), placements)}}

    def blank(group: Any) -> dict[str, Any]:
        return {"w": {"t": distribute(full * 0, mesh_of(group.rank, *sizes), placements)}}

    save_made(url, make, options=options(**FAST))
    assert sum(written_by_rank(url, "w")) == full.nbytes
    assert_same_tensor(waypost.open(url).read("w/t"), full)
    for rank, state in enumerate(load_made(url, blank)):
        assert_same_tensor(state["w"]["t"], part_of(full, mesh_of(rank, *sizes), placements))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_tensors_without_dimensions_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """As a DTensor, a declared replica, and one that is equal by itself."""
    url = new_place("memory", tmp_path)

    def make(number: int) -> Any:
        value = torch.tensor(number, dtype=dtype)
        return lambda group: {
            "x": {
                "dtensor": distribute(value, mesh_of(group.rank, 4), [Replicate()]),
                "declared": value.clone(),
                "equal": value.clone(),
            }
        }

    save_made(url, make(7), replicated="x/declared")
    for state in load_made(url, make(0)):
        for tensor in state["x"].values():
            assert_same_tensor(tensor, torch.tensor(7, dtype=dtype))


# --- the plan follows the structure --------------------------------------------------------------


def _kinds(group: Any) -> list[dict[str, Any]]:
    """States of one job, one after the other, each different in structure from the one before."""
    mesh = mesh_of(group.rank, 4)
    wide = noise((40, 3), 1)
    return [
        {"m": {"w": distribute(wide, mesh, [Shard(0)])}},
        {"m": {"w": distribute(noise((41, 3), 2), mesh, [Shard(0)])}},
        {"m": {"w": distribute(noise((41, 3), 3), mesh, [Shard(1)])}},
        {"m": {"w": distribute(noise((41, 3), 4).double(), mesh, [Shard(1)])}},
        {"m": {"w": distribute(noise((41, 3), 5).double(), mesh, [Replicate()])}},
        {"m": {"w": noise((41, 3), 6).double()}},
        {"m": {"w": noise((41, 3), 7).double(), "more": torch.ones(2)}},
        {"m": {"v": noise((41, 3), 8).double(), "more": torch.ones(2)}},
        {"m": {"v": noise((41, 3), 8).double()}, "n": {"more": torch.ones(2)}},
        {"m": {"w": distribute(wide, mesh, [Shard(0)])}},
    ]


def test_a_changed_structure_is_noticed(tmp_path: Path) -> None:
    """A plan that is kept from the save before is used for the same structure only."""
    urls = [new_place("memory", tmp_path) for _ in range(10)]

    def body(group: Any) -> None:
        for url, state in zip(urls, _kinds(group), strict=True):
            waypost.save(url, state, process_group=group, options=options())

    job(body)
    tensors = [(41, 3, n) for n in range(2, 6)]
    for url, (rows, columns, seed) in zip(urls[1:5], tensors, strict=True):
        stored = waypost.open(url).read("m/w")
        wanted = noise((rows, columns), seed)
        assert_same_tensor(stored, wanted if seed < 4 else wanted.double())
    for url in (urls[0], urls[-1]):
        assert_same_tensor(waypost.open(url).read("m/w"), noise((40, 3), 1))
    assert set(scopes_of(urls[6])) == {"m/w", "m/more"}
    assert set(scopes_of(urls[7])) == {"m/v", "m/more"}
    assert set(scopes_of(urls[8])) == {"m/v", "n/more"}


def test_a_structure_that_changes_on_one_rank_is_noticed(tmp_path: Path) -> None:
    """An expert more on rank 2, then on rank 3 instead; values follow too."""
    urls = [new_place("memory", tmp_path) for _ in range(3)]
    owners = [None, 2, 3]

    def body(group: Any) -> None:
        for step, (url, owner) in enumerate(zip(urls, owners, strict=True)):
            state = {"m": {"gate": torch.ones(3)}, "n": {"step": step}}
            if group.rank == owner:
                state["m"]["expert"] = torch.full((4,), float(owner))
            waypost.save(url, state, process_group=group, options=options())

    job(body)
    for step, (url, owner) in enumerate(zip(urls, owners, strict=True)):
        stored = dict(waypost.open(url).state_dict("m"))
        wanted = {"gate": torch.ones(3)}
        assert_same(
            stored, wanted if owner is None else wanted | {"expert": torch.full((4,), float(owner))}
        )
        assert_same(waypost.open(url).state_dict("n"), {"step": step})


# --- reading -------------------------------------------------------------------------------------


def _read_bytes(url: str, make: Any, **changes: Any) -> int:
    """Bytes of data that all ranks together read while they load."""
    places = [seen_through(url, Watched) for _ in range(WORLD_SIZE)]

    def body(group: Any) -> None:
        waypost.load(
            places[group.rank], make(group), process_group=group, options=options(**changes)
        )

    job(body)
    return sum(place.storage.read_bytes for place in places)


@pytest.mark.slow
def test_replicas_are_read_once_and_shared(tmp_path: Path) -> None:
    """16 MB in all; each rank reads all of it when sharing is switched off."""
    url = new_place("memory", tmp_path)
    full = _numbers((4_000_000,), torch.float32)
    save_made(url, lambda _: {"x": full}, replicated="x")

    def blank(_: Any) -> dict[str, Any]:
        return {"x": torch.zeros_like(full)}

    assert full.nbytes <= _read_bytes(url, blank) <= 1.1 * full.nbytes
    assert _read_bytes(url, blank, share_reads=False) >= WORLD_SIZE * full.nbytes
    for state in load_made(url, blank):
        assert_same_tensor(state["x"], full)


@pytest.mark.slow
def test_shards_are_read_once(tmp_path: Path) -> None:
    """Saved by rows, loaded by other rows: each rank reads its own, to the chunk."""
    url = new_place("memory", tmp_path)
    full = _numbers((2001, 1000), torch.float32)
    save_made(
        url,
        lambda group: {"x": distribute(full, mesh_of(group.rank, 3), [Shard(0)])},
        world_size=3,
    )

    def blank(group: Any) -> dict[str, Any]:
        return {"x": distribute(full * 0, mesh_of(group.rank, 4), [Shard(0)])}

    assert _read_bytes(url, blank) <= full.nbytes + 4 * WORLD_SIZE * CHUNK_BYTES


# --- memory --------------------------------------------------------------------------------------


def _peak_growth_bytes(action: Any) -> int:
    """By how much the resident memory of this process grows at most during the action."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    action()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("scope", ["replicated", "sharded"])
def test_four_ranks_save_and_load_in_little_memory(scope: str, tmp_path: Path) -> None:
    """192 MiB of state on each: no rank makes a copy of it."""
    url = new_place("disk", tmp_path)
    lean = options(workers=1, segment_bytes=MIB, durable=False)

    def state_of(full: torch.Tensor, rank: int) -> dict[str, Any]:
        if scope == "replicated":
            return {"x": full}  # one memory for all ranks of this process
        mesh = mesh_of(rank, 4)
        rows = full.shape[0] // 4
        local = full[rank * rows : (rank + 1) * rows]
        placed = torch.distributed.tensor.DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        return {"x": placed}

    def measure() -> tuple[int, int]:
        full = torch.ones(192, MIB // 4)
        states = [state_of(full, rank) for rank in range(WORLD_SIZE)]

        def save(group: Any) -> None:
            waypost.save(url, states[group.rank], replicated="x", process_group=group, options=lean)

        def load(group: Any) -> None:
            waypost.load(url, states[group.rank], process_group=group, options=lean)

        return _peak_growth_bytes(lambda: job(save)), _peak_growth_bytes(lambda: job(load))

    for growth in in_child(measure).expect_result():
        assert growth <= 64 * MIB, growth


@pytest.mark.parametrize("odd", [[Replicate(), Shard(1)], "mesh"])
def test_ranks_that_see_a_tensor_spread_differently_get_the_right_bytes(
    odd: Any, tmp_path: Path
) -> None:
    """They share nothing then, since they would not mean the same by a share."""
    url = new_place("memory", tmp_path)
    full = noise((16, 4), 1)
    save_made(url, lambda group: {"x": full}, world_size=1)

    def placed(tensor: torch.Tensor, rank: int) -> Any:
        mesh, placements = mesh_of(rank, 2, 2), [Replicate(), Shard(0)]
        if rank >= 2 and odd == "mesh":
            ranks = torch.tensor([[1, 0], [3, 2]])
            mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        elif rank >= 2:
            placements = odd
        return distribute(tensor, mesh, placements)

    def body(group: Any) -> bool:
        target = placed(torch.zeros(16, 4), group.rank)
        waypost.load(url, {"x": target}, process_group=group, options=options())
        return torch.equal(target._local_tensor, placed(full, group.rank)._local_tensor)

    assert job(body) == [True] * WORLD_SIZE
