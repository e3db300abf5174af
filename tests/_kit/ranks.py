"""Ranks as threads: states that tell ranks and steps apart, jobs, and what a failure must say."""

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import waypost
from _kit.compare import assert_same
from _kit.invariants import committed, snapshot_url
from waypost.storage import Location, resolve
from waypost.testing import Fault, FaultyStorage, RankFault, run_ranks

WORLD_SIZE = 4
TIMEOUT_S = 30.0  # of the harness's clock, which jumps: no test waits for it
CHUNK_BYTES = 256 * 1024
PER_RANK = ("own/**",)
SAVE_PHASES = ("describe", "plan", "stage", "write", "commit", "depart")
LOAD_PHASES = ("describe", "plan", "read", "place", "depart")


def options(**changes: Any) -> waypost.Options:
    """The options of all jobs here, with changes."""
    return waypost.Options(**{"timeout_s": TIMEOUT_S, "workers": 2, **changes})


# --- tensors -------------------------------------------------------------------------------------


def mesh_of(rank: int, *sizes: int) -> DeviceMesh:
    """The mesh of all ranks as `rank` sees it, without a process group."""
    return DeviceMesh(
        "cpu",
        torch.arange(math.prod(sizes)).reshape(sizes),
        mesh_dim_names=tuple("abc"[: len(sizes)]),
        _init_backend=False,
        _rank=rank,
    )


def part_of(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """The part of the full tensor that the mesh's rank holds; a copy."""
    local = full
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dimension, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        count, index = mesh.size(dimension), coordinate[dimension]
        length = local.shape[placement.dim]
        each = -(-length // count)
        start = min(index * each, length)
        local = local.narrow(placement.dim, start, min(each, length - start))
    return local.clone()


def wrap(
    local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]
) -> DTensor:
    """A DTensor like `full` with this local part."""
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.contiguous().stride(),
    )


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """The full tensor distributed over the mesh, as its rank holds it."""
    return wrap(part_of(full, mesh, placements), full, mesh, placements)


def plain(value: Any) -> Any:
    """The value with each DTensor replaced by a copy of its local part."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def noise(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the sample state ----------------------------------------------------------------------------


def full_model(step: int, salt: int = 0) -> dict[str, torch.Tensor]:
    """The model of the sample state as one process would hold it."""
    seed = 1000 * salt + step
    return {"sharded": noise((10, 3), seed), "shared": noise((7, 2), seed + 500)}


def own_state(rank: int, step: int, salt: int = 0) -> dict[str, Any]:
    """What only this rank knows; other shapes on other ranks."""
    return {"draw": 10_000 * salt + 100 * rank + step, "noise": noise((rank + 1,), step + rank)}


def sample(group: Any, step: int, salt: int = 0) -> dict[str, Any]:
    """The state of the step on this rank: sharded, equal, and per-rank leaves."""
    full = full_model(step, salt)
    mesh = mesh_of(group.rank, group.world_size)
    return {
        "model": {
            "sharded": distribute(full["sharded"], mesh, [Shard(0)]),
            "shared": full["shared"],
        },
        "own": own_state(group.rank, step, salt),
        "progress": {"step": step, "salt": salt},
    }


def put(state: dict[str, Any], group: Any, step: int, salt: int = 0) -> None:
    """Makes the state that of the step, in place."""
    wanted = sample(group, step, salt)
    for name in ("sharded", "shared"):
        local = plain(wanted["model"][name])
        target = state["model"][name]
        (target.to_local() if isinstance(target, DTensor) else target).copy_(local)
    state["own"]["draw"] = wanted["own"]["draw"]
    state["own"]["noise"].copy_(wanted["own"]["noise"])
    state["progress"].update(wanted["progress"])


def assert_is(state: dict[str, Any], group: Any, step: int, salt: int = 0) -> None:
    """Fails unless the state is that of the step on this rank, bit for bit."""
    assert_same(plain(state), plain(sample(group, step, salt)), f"rank {group.rank}")


# --- jobs ----------------------------------------------------------------------------------------


def save(url: Any, group: Any, step: int, salt: int = 0, **arguments: Any) -> Any:
    """Saves the sample state of the step; every rank calls."""
    arguments = {"per_rank": PER_RANK, "options": options(), **arguments}
    state = sample(group, step, salt)
    return waypost.save(url, state, step=step, process_group=group, **arguments)


def load(url: Any, group: Any, **arguments: Any) -> dict[str, Any]:
    """Loads into a state of step 0, and returns it; every rank calls."""
    arguments = {"options": options(), **arguments}
    state = sample(group, 0)
    waypost.load(url, state, process_group=group, **arguments)
    return state


def results(outcomes: Sequence[Any]) -> list[Any]:
    """What the ranks returned; the first error of a rank is raised."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert not outcome.is_killed
    return [outcome.value for outcome in outcomes]


def job(
    body: Callable[[Any], Any], *, world_size: int = WORLD_SIZE, faults: Sequence[RankFault] = ()
) -> list[Any]:
    """A whole job that must succeed; what its ranks returned."""
    return results(run_ranks(world_size, body, faults=list(faults)))


def save_job(url: Any, step: int, salt: int = 0, **arguments: Any) -> None:
    """A new job saves the sample state."""
    job(lambda group: save(url, group, step, salt, **arguments))


def check_load(url: Any, step: int, salt: int = 0) -> None:
    """A new job loads the sample state of the step, on every rank."""
    job(lambda group: assert_is(load(url, group), group, step, salt))


def open_run(run: Any, group: Any, state: Any, **arguments: Any) -> waypost.Checkpointer:
    """A Checkpointer of this rank; `run` is its URL, or a function from the rank to it."""
    arguments = {"save_on": (), "per_rank": PER_RANK, "options": options(), **arguments}
    place = run(group.rank) if callable(run) else run
    return waypost.Checkpointer(place, state, process_group=group, **arguments)


def start_only(run: Any, expected: int | None = None, **arguments: Any) -> Any:
    """The body of a job that only starts; where it starts, with the state of that step."""

    def body(group: Any) -> int:
        state = sample(group, 0)
        with open_run(run, group, state, **arguments) as checkpointer:
            assert_is(state, group, checkpointer.step)
            assert expected is None or checkpointer.step == expected
            return checkpointer.step

    return body


def train(run: Any, to: int, salt: int = 0, **arguments: Any) -> Callable[[Any], Any]:
    """The body of a job that resumes the run and trains to the step `to`; its Checkpointer."""

    def body(group: Any) -> waypost.Checkpointer:
        state = sample(group, 0)
        with open_run(run, group, state, **arguments) as checkpointer:
            while checkpointer.step < to:
                put(state, group, checkpointer.step + 1, salt)
                checkpointer.step_done()
        return checkpointer

    return body


Make = Callable[[Any], dict[str, Any]]


def save_made(url: str, make: Make, *, world_size: int = WORLD_SIZE, **arguments: Any) -> None:
    """A job saves what `make` gives for each rank."""
    arguments = {"options": options(), **arguments}

    def body(group: Any) -> None:
        waypost.save(url, make(group), process_group=group, **arguments)

    job(body, world_size=world_size)


def load_made(url: str, make: Make, *, world_size: int = WORLD_SIZE, **arguments: Any) -> list[Any]:
    """A job loads into what `make` gives; the filled states, without their DTensors."""

    def body(group: Any) -> Any:
        state = make(group)
        waypost.load(url, state, process_group=group, options=options(), **arguments)
        return plain(state)

    return job(body, world_size=world_size)


def refused_save(
    url: str, make: Make, kind: type[BaseException] = waypost.MismatchError, **arguments: Any
) -> list[str]:
    """A save that every rank refuses with that kind of error; nothing is there afterwards."""
    arguments = {"options": options(), **arguments}
    outcomes = run_ranks(
        WORLD_SIZE, lambda group: waypost.save(url, make(group), process_group=group, **arguments)
    )
    texts = same_errors(outcomes, kind)
    with pytest.raises(waypost.NotFoundError):
        waypost.open(url)
    return texts


def scopes_of(url: str) -> dict[str, str]:
    """Leaf path to scope."""
    return {leaf.path: leaf.scope for leaf in waypost.open(url).leaves()}


# --- what must hold ------------------------------------------------------------------------------


def check_snapshot(url: str, step: int, salt: int = 0, world_size: int = WORLD_SIZE) -> None:
    """The snapshot is whole and holds the sample state of the step, nothing of another."""
    snapshot = waypost.open(url)
    assert snapshot.step == step
    assert snapshot.world_size == world_size
    report = snapshot.verify()
    assert report.ok, report.problems
    assert_same(dict(snapshot.state_dict("model")), full_model(step, salt))
    assert_same(snapshot.state_dict("progress"), {"step": step, "salt": salt})
    for rank in range(world_size):
        assert_same(snapshot.state_dict("own", rank=rank), own_state(rank, step, salt))


def check_steps(run: str, salts: dict[int, int]) -> None:
    """The run lists exactly these steps, each whole."""
    assert set(committed(run)) == set(salts)
    for step, salt in salts.items():
        check_snapshot(snapshot_url(run, step), step, salt)


def blamed(error: BaseException) -> set[int]:
    """The ranks that a coordination error names."""
    if isinstance(error, waypost.PeerError):
        return set(error.errors)
    assert isinstance(error, waypost.CoordinationTimeoutError), repr(error)
    return set(error.missing)


def assert_blames(error: BaseException | None, rank: int) -> None:
    """Fails unless the error names that rank, and no other, also in its text."""
    assert error is not None, "the rank did not notice"
    assert blamed(error) == {rank}, repr(error)
    assert re.search(rf"\b{rank}\b", str(error)), str(error)


def others(outcomes: Sequence[Any], *ranks: int) -> Iterator[Any]:
    """The outcomes of all ranks but these."""
    return (outcome for rank, outcome in enumerate(outcomes) if rank not in ranks)


def same_errors(outcomes: Sequence[Any], kind: type[BaseException]) -> list[str]:
    """The texts of the errors of all ranks, each of which must be of that class."""
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, kind), (rank, repr(outcome.error))
    return [str(outcome.error) for outcome in outcomes]


# --- storages that a single rank sees ------------------------------------------------------------


class Watched(FaultyStorage):
    """Counts what is read, and notes which paths each kind of call met."""

    def __init__(self, inner: Any, fault: Fault | None = None) -> None:
        super().__init__(inner, fault)
        self._watch = threading.Lock()
        self.read_bytes = 0
        self.paths: list[tuple[str, str]] = []

    def call(self, op: str, path: str, action: Any, half: Any = None) -> Any:
        result = super().call(op, path, action, half)
        with self._watch:
            self.paths.append((op, path))
            if op == "read_at":
                self.read_bytes += result
        return result


class Blind(FaultyStorage):
    """Does not see names that contain a text: a stale listing."""

    def __init__(
        self, inner: Any, hidden: str, ops: tuple[str, ...] = ("list", "size", "open", "read")
    ) -> None:
        super().__init__(inner)
        self._hidden = hidden
        self._ops = ops

    def call(self, op: str, path: str, action: Any, half: Any = None) -> Any:
        is_hidden = op in self._ops and self._hidden in path
        if is_hidden and op == "size":
            return None
        if is_hidden and op in ("open", "read"):
            raise waypost.NotFoundError(f"{path}: a stale view does not have it")
        result = super().call(op, path, action, half)
        if op == "list" and op in self._ops:
            return [name for name in result if self._hidden not in name.name]
        return result


class Garbled(FaultyStorage):
    """Flips a bit of everything that is read from data files whose path contains a text."""

    def __init__(self, inner: Any, where: str) -> None:
        super().__init__(inner)
        self._where = where

    def open(self, path: str) -> Any:
        inner = super().open(path)
        is_hit = self._where in path and path.endswith(".safetensors")
        return _GarbledFile(inner) if is_hit else inner


class _GarbledFile:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        count = self._inner.read(offset, buffers)
        for buffer in buffers:
            if len(buffer):
                content = buffer.cast("B")
                content[0] ^= 1
        return count

    def __enter__(self) -> "_GarbledFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()


class Unlocked(FaultyStorage):
    """Grants every lock: a mount where locks do not reach the other machine."""

    def lock(self, path: str) -> Any:
        return _NoLock()


class _NoLock:
    def release(self) -> None:
        pass


class Full(FaultyStorage):
    """Has room for a kilobyte."""

    def free_bytes(self, path: str) -> int:
        return 1024


def seen_through(url: str, make: Callable[..., FaultyStorage], *arguments: Any) -> Location:
    """The place of the URL, seen through a storage of the kind."""
    place = resolve(url)
    return Location(make(place.storage, *arguments), place.path)


# --- files ---------------------------------------------------------------------------------------


def payload_bytes(path: Path) -> int:
    """Bytes of a safetensors file after its header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def written_by_rank(snapshot: str, entry: str, world_size: int = WORLD_SIZE) -> list[int]:
    """Payload bytes of the entry in the files of each rank."""
    return [
        sum(payload_bytes(p) for p in Path(snapshot).rglob(f"{entry}.r{rank:05d}-*.safetensors"))
        for rank in range(world_size)
    ]


def flip(path: Path) -> None:
    """Flips a bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
