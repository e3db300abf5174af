"""Any mesh to any mesh: boxes cover each tensor exactly once, and there and back is the identity.

Ranks are threads. A DTensor's parts are cut by torch's own placements, see `_kit.meshes`.
"""

import dataclasses
import json
import math
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import waypost
from _kit.meshes import Sizes, distributed, inner_first, part_of, strided, world_of
from _kit.tensors import filled, raw
from waypost.testing import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
WORLD_MAX = 6
MESHES: list[Sizes] = [
    *((size,) for size in (1, 2, 3, 4, 5)),
    *((2, 2), (2, 3), (3, 2), (1, 4), (4, 1)),
    *((2, 1, 2), (1, 2, 3), (2, 2, 1)),
]
LARGE_MESHES: list[Sizes] = [(8,), (2, 4), (2, 2, 2), (3, 4)]

Layout = list[Placement]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tensors by name, and where they are on two meshes."""

    tensors: dict[str, torch.Tensor]
    first: Sizes
    second: Sizes
    on_first: dict[str, Layout]
    on_second: dict[str, Layout]


def is_inner_first(shape: Sizes, sizes: Sizes, dim: int) -> bool:
    """Whether torch's strided placements say for all ranks what FSDP over TP leaves them.

    They differ for a few uneven sizes; `test_uneven_fsdp_over_tp_…` is about these.
    """
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return all(
        torch.equal(
            part_of(numbers, sizes, strided(sizes, dim), rank),
            inner_first(numbers, sizes, dim, rank),
        )
        for rank in range(world_of(sizes))
    )


@st.composite
def layouts(draw: st.DrawFn, shape: Sizes, sizes: Sizes) -> Layout:
    """One placement for each dimension of the mesh."""
    if not shape:
        return [Replicate()] * len(sizes)
    dims = st.integers(0, len(shape) - 1)
    dim = draw(dims)
    kind = draw(st.sampled_from(["mixed", "mixed", "inner first", "apart"]))
    if kind == "inner first" and is_inner_first(shape, sizes, dim):
        return strided(sizes, dim)
    layout: Layout = [Shard(draw(dims)) if draw(st.booleans()) else Replicate() for _ in sizes]
    if kind == "apart":
        layout = [Replicate() if item == Shard(dim) else item for item in layout]
        place = draw(st.integers(0, len(sizes) - 1))
        layout[place] = _StridedShard(dim, split_factor=draw(st.integers(2, 4)))
    return layout


@st.composite
def cases(draw: st.DrawFn, meshes: list[Sizes] = MESHES) -> Case:
    """One to three tensors on two meshes; sizes from none to more than one for each rank."""
    first, second = draw(st.sampled_from(meshes)), draw(st.sampled_from(meshes))
    tensors, on_first, on_second = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        name = f"t{number}"
        tensors[name] = filled(draw(st.sampled_from(DTYPES)), shape, number)
        on_first[name] = draw(layouts(shape, first))
        on_second[name] = draw(layouts(shape, second))
    return Case(tensors=tensors, first=first, second=second, on_first=on_first, on_second=on_second)


def held(
    tensors: dict[str, torch.Tensor], sizes: Sizes, on: dict[str, Layout], rank: int
) -> dict[str, DTensor]:
    """What the rank holds of all tensors."""
    return {name: distributed(full, sizes, on[name], rank) for name, full in tensors.items()}


def spoiled(
    tensors: dict[str, torch.Tensor], sizes: Sizes, on: dict[str, Layout], rank: int
) -> dict[str, DTensor]:
    """The same places with other bytes in them: a load that fills too little is noticed."""
    targets = held(tensors, sizes, on, rank)
    for target in targets.values():
        local = target.to_local()
        local.copy_(
            local.logical_not() if local.dtype is torch.bool else torch.full_like(local, 77)
        )
    return targets


def save_on(
    url: str, tensors: dict[str, torch.Tensor], sizes: Sizes, on: dict[str, Layout]
) -> None:
    """All ranks of the mesh save their parts."""

    def body(group):
        waypost.save(url, {"t": held(tensors, sizes, on, group.rank)}, process_group=group)

    for outcome in run_ranks(world_of(sizes), body):
        if outcome.error is not None:
            raise outcome.error


def load_on(
    url: str, tensors: dict[str, torch.Tensor], sizes: Sizes, on: dict[str, Layout]
) -> None:
    """All ranks of the mesh load; fails unless each has exactly its part of the tensors."""

    def body(group):
        targets = spoiled(tensors, sizes, on, group.rank)
        waypost.load(url, {"t": targets}, process_group=group)
        for name, full in tensors.items():
            wanted = part_of(full, sizes, on[name], group.rank)
            actual = targets[name].to_local()
            assert actual.shape == wanted.shape, name
            assert raw(actual) == raw(wanted), f"{name} on rank {group.rank}: {actual} != {wanted}"
        return targets

    for outcome in run_ranks(world_of(sizes), body):
        if outcome.error is not None:
            raise outcome.error


def stored_elements(folder: Path) -> dict[str, list[int]]:
    """For each leaf, the number of elements of each part of it that is in a file.

    Only the headers are read, by hand: a part is a safetensors key that begins with the leaf's.
    """
    found: dict[str, list[int]] = {}
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            leaf = key.partition("/~@")[0]
            found.setdefault(leaf, []).append(math.prod(entry["shape"]))
    return found


def check_there_and_back(case: Case) -> None:
    """A → B → A is the identity, and on disk each element is there once."""
    note(f"{case.first} {case.on_first} → {case.second} {case.on_second}")
    with tempfile.TemporaryDirectory() as folder:
        url, back = f"{folder}/first", f"{folder}/second"
        save_on(url, case.tensors, case.first, case.on_first)
        check_once(Path(url), case.tensors)
        load_on(url, case.tensors, case.second, case.on_second)
        save_on(back, case.tensors, case.second, case.on_second)
        check_once(Path(back), case.tensors)
        load_on(back, case.tensors, case.first, case.on_first)
        check_in_one_process(back, case.tensors)


def check_once(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As many elements are stored of each tensor as it has. With a right load: each one once."""
    stored = stored_elements(folder)
    assert set(stored) <= set(tensors)
    for name, full in tensors.items():
        assert sum(stored.get(name, [0])) == full.numel(), (name, stored.get(name))


def check_in_one_process(url: str, tensors: dict[str, torch.Tensor]) -> None:
    """Without ranks: shapes are global, elements are those of the full tensors."""
    snapshot = waypost.open(url)
    assert snapshot.verify().ok
    leaves = {leaf.path: leaf for leaf in snapshot.leaves("t/**")}
    for name, full in tensors.items():
        assert leaves[f"t/{name}"].shape == tuple(full.shape)
        actual = snapshot.read(f"t/{name}")
        assert actual.shape == full.shape
        assert raw(actual) == raw(full), name


@pytest.mark.slow
@settings(max_examples=30)
@given(case=cases())
def test_there_and_back_is_the_identity(case: Case) -> None:
    """Up to six ranks, one to three mesh dimensions."""
    check_there_and_back(case)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@settings(max_examples=500)
@given(case=cases(MESHES + LARGE_MESHES))
def test_there_and_back_is_the_identity_on_larger_meshes(case: Case) -> None:
    """Up to twelve ranks."""
    check_there_and_back(case)


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_fsdp_over_tp_loads_as_rows_and_back(sizes: Sizes, rows: int, tmp_path: Path) -> None:
    """Strided shards of uneven tensors hold what FSDP leaves each rank."""
    tensors = {"w": filled(torch.float32, (rows, 3))}
    assert is_inner_first((rows, 3), sizes, 0)
    url = str(tmp_path / "snap")
    save_on(url, tensors, sizes, {"w": strided(sizes, 0)})
    check_once(tmp_path, tensors)
    load_on(url, tensors, (3,), {"w": [Shard(0)]})
    load_on(url, tensors, sizes, {"w": strided(sizes, 0)})
    check_in_one_process(url, tensors)


def test_uneven_fsdp_over_tp_is_never_stored_wrong(tmp_path: Path) -> None:
    """7 rows on 3 × 2 ranks: torch's placements say that the last row is on another rank than
    FSDP leaves it on. The save is refused, naming the leaf; or what is stored is right."""
    full = filled(torch.float32, (7, 3))
    assert not is_inner_first((7, 3), (3, 2), 0)
    url = str(tmp_path / "snap")

    def body(group):
        part = inner_first(full, (3, 2), 0, group.rank)
        tensor = distributed(full, (3, 2), strided((3, 2), 0), group.rank, part)
        waypost.save(url, {"t": {"w": tensor}}, process_group=group)

    outcomes = run_ranks(6, body)
    if all(outcome.error is None for outcome in outcomes):
        check_in_one_process(url, {"w": full})
        return
    assert all(isinstance(outcome.error, waypost.WaypostError) for outcome in outcomes), outcomes
    assert any("w" in str(outcome.error) for outcome in outcomes)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)


@pytest.mark.parametrize(
    "layout",
    [
        [_StridedShard(0, split_factor=2)],
        [_StridedShard(0, split_factor=2), Replicate()],
        [Replicate(), _StridedShard(1, split_factor=3)],
    ],
    ids=str,
)
def test_rows_that_are_apart_are_stored_exactly(layout: Layout, tmp_path: Path) -> None:
    """A strided shard without the shard inside it: one rank holds several boxes of a tensor."""
    tensors = {"w": filled(torch.float32, (8, 6))}
    sizes = (2,) * len(layout)
    url = str(tmp_path / "snap")
    save_on(url, tensors, sizes, {"w": layout})
    check_once(tmp_path, tensors)
    check_in_one_process(url, tensors)
    load_on(url, tensors, sizes, {"w": layout})


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    """2 × 2 with replicas: each of the two parts is stored once."""
    tensors = {"w": filled(torch.float32, (8, 4)), "v": filled(torch.int64, (5,))}
    layout = {"w": [Replicate(), Shard(0)], "v": [Replicate(), Replicate()]}
    url = str(tmp_path / "snap")
    save_on(url, tensors, (2, 2), layout)
    check_once(tmp_path, tensors)
    load_on(url, tensors, (1,), {"w": [Shard(1)], "v": [Shard(0)]})
