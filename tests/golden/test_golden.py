"""Snapshots that earlier versions wrote load for ever, and what is written now says the same."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import waypost
from _kit import assert_same
from golden import make, shapes
from waypost.format import safetensors
from waypost.testing import run_ranks
from waypost.testing import values as results_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
]

SINGLE = sorted(make.STATES)
SNAPSHOTS = [*SINGLE, make.RANKS, *(f"{make.RUN}/step-{step:09d}" for step in make.RUN_STEPS)]
SIZE_BYTES_MAX = 600_000


def place(name: str) -> Path:
    if name == "cryptographic":
        pytest.importorskip("blake3")
    return make.V1 / name


def opened(name: str, folder: Path = make.V1) -> waypost.Snapshot:
    place(name)
    return waypost.open(folder / name, options=make.OPTIONS.get(name))


def restored(snapshot: waypost.Snapshot) -> dict[str, Any]:
    return {entry: snapshot.state_dict(entry) for entry in snapshot.entries}


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_nothing_is_missing_and_all_of_it_is_small() -> None:
    """Every state has its snapshot; the files stay small enough for a repository."""
    names = sorted(path.name for path in make.V1.iterdir())
    assert names == sorted([*make.STATES, make.RUN, make.RANKS])
    sizes = [path.stat().st_size for path in make.V1.rglob("*") if path.is_file()]
    assert sum(sizes) < SIZE_BYTES_MAX


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_byte_verifies(name: str) -> None:
    """Documents, headers and chunks have their digests still; no debris."""
    report = waypost.open(place(name)).verify()
    assert report.problems == ()
    assert report.debris == ()


@pytest.mark.parametrize("name", SINGLE)
def test_a_snapshot_opens_to_the_values_that_were_saved(name: str) -> None:
    """Types, structure and bits, built again from formulas."""
    assert_same(restored(opened(name)), make.STATES[name]())


@pytest.mark.parametrize("name", SINGLE)
def test_facts_return(name: str) -> None:
    """Step, metrics and metadata."""
    snapshot = opened(name)
    assert snapshot.step == (None if name == "values" else 12)
    assert_same(snapshot.metrics, {"loss": 0.5, "count": 3, "nan": float("nan")})
    assert_same(snapshot.metadata, {"tags": ("golden", name), "limit": float("inf")})


def test_every_dtype_loads_in_place() -> None:
    """Into memory that held something else."""
    expected = make.dtypes()["dtypes"]
    target = {
        name: {
            key: make.content(tensor.dtype, *tensor.shape, seed=77) for key, tensor in forms.items()
        }
        for name, forms in expected.items()
    }
    kept = target["float32"]["matrix"]
    waypost.load(make.V1 / "dtypes", {"dtypes": target})
    assert_same(target, expected)
    assert target["float32"]["matrix"] is kept


def test_memory_is_shared_as_it_was() -> None:
    """Ties, views, overlapping slices, also across entries; attributes and classes."""
    state = restored(opened("tensors"))
    plain = state["plain"]
    assert plain["same"] is plain["base"]
    for name in ("tied", "row", "column", "as_integers"):
        assert storage_of(plain[name]) == storage_of(plain["base"]), name
    assert storage_of(plain["left"]) == storage_of(plain["right"])
    assert plain["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert plain["parameter"].requires_grad
    assert not plain["frozen"].requires_grad
    assert plain["gradient"].requires_grad
    assert plain["buffer"].persistent is False
    assert type(state["classes"]["marked"]) is shapes.Marked


def test_a_pickle_stays_closed_without_permission() -> None:
    """The entry beside it opens."""
    snapshot = waypost.open(make.V1 / "pickled")
    with pytest.raises(waypost.UnsupportedError, match="opaque"):
        snapshot.state_dict("opaque")
    assert_same(snapshot.state_dict("plain"), make.pickled()["plain"])


def test_the_run_lists_and_says_where_it_came_from() -> None:
    """Order, parents and the newest one."""
    records = waypost.snapshots(make.V1 / make.RUN)
    assert [record.step for record in records] == list(make.RUN_STEPS)
    assert [record.parent_step for record in records] == [None, 1, 2]
    assert [record.metrics["loss"] for record in records] == [1.0, 0.5, 1 / 3]
    assert [record.is_latest for record in records] == [False, False, True]


@pytest.mark.parametrize("step", make.RUN_STEPS)
def test_a_run_loads_into_live_objects(step: int) -> None:
    """Module with ties and buffers, optimizer, counters, random streams."""
    with make.streams_kept():
        wanted, state = make.run_state(), make.run_state()
        make.set_step(wanted, step)
        streams = waypost.RNG().state_dict()
        make.seed_streams(99)
        waypost.load(f"{make.V1 / make.RUN}@{step}", state)
        assert_same(waypost.RNG().state_dict(), streams)
    assert_same(state["model"].state_dict(), wanted["model"].state_dict())
    assert state["model"].head.weight is state["model"].embed.weight
    assert_same(state["optimizer"].state_dict()["state"], wanted["optimizer"].state_dict()["state"])
    assert [group["lr"] for group in state["optimizer"].param_groups] == [1 / 2**step] * 2
    assert (state["progress"].step, state["progress"].tokens) == (step, 8192 * step)


def test_a_run_goes_on(tmp_path: Path) -> None:
    """A copy of it resumes and saves on top."""
    shutil.copytree(make.V1 / make.RUN, tmp_path / "run")
    with make.streams_kept():
        state = make.run_state()
        with waypost.Checkpointer(tmp_path / "run", state, save_on=("end",)) as ckpt:
            assert ckpt.step == max(make.RUN_STEPS)
            ckpt.step_done()
    newest = waypost.snapshots(tmp_path / "run")[-1]
    assert (newest.step, newest.parent_step, newest.incarnation) == (4, 3, 2)


def test_what_four_ranks_saved_opens_in_one_process() -> None:
    """Whole tensors, whoever held which part of them; what each rank has for itself by its rank."""
    snapshot = opened(make.RANKS)
    assert snapshot.world_size == 4
    model = snapshot.state_dict("model")
    assert_same({name: model[name] for name in make.whole_tensors()}, make.whole_tensors())
    assert storage_of(model["tied"]) == storage_of(model["rows"])
    for rank in range(4):
        own = make.own_state(rank)
        assert_same({name: snapshot.state_dict(name, rank=rank) for name in own}, own)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_loads_its_own_of_what_four_saved(rank: int) -> None:
    """Each into what it holds now, all zero."""
    outcomes = run_ranks(4, lambda group: _loaded(make.ranks_state(group.rank), group))
    state, wanted = results_of(outcomes)[rank], make.ranks_state(rank)
    for name, tensor in wanted["model"].items():
        ours = state["model"][name]
        pair = [each.to_local() if isinstance(each, DTensor) else each for each in (ours, tensor)]
        assert_same(*pair)
    assert_same({name: state[name] for name in ("data", "mixed")}, make.own_state(rank))


def _loaded(state: dict[str, Any], group: Any) -> dict[str, Any]:
    for tensor in state["model"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    state["data"], state["mixed"]["rank"] = {}, -1
    waypost.load(make.V1 / make.RANKS, state, process_group=group)
    return state


@pytest.mark.slow
def test_what_four_ranks_write_now_has_the_same_form(tmp_path: Path) -> None:
    """Structure, indexes, headers and data of each rank are the same bytes."""
    make.write_ranks(tmp_path / "ranks")
    assert form_of(tmp_path / "ranks") == form_of(make.V1 / make.RANKS)


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_written_now_decodes_to_the_same(name: str, tmp_path: Path) -> None:
    """The same state, saved by this version, gives what the golden snapshot gives."""
    place(name)
    make.write_one(name, make.STATES[name](), tmp_path / name)
    assert_same(restored(opened(name, tmp_path)), restored(opened(name)))


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_written_now_has_the_same_form(name: str, tmp_path: Path) -> None:
    """Trees, headers and data are the same bytes; a change of the format must not go unseen.

    A change that the version policy allows adds a golden snapshot, and changes this comparison.
    """
    place(name)
    make.write_one(name, make.STATES[name](), tmp_path / name)
    assert form_of(tmp_path / name) == form_of(make.V1 / name)


@pytest.mark.slow
def test_a_run_written_now_decodes_to_the_same(tmp_path: Path) -> None:
    """Each step of the run, entry by entry; options of the optimizer may be added by torch."""
    make.write_run(tmp_path / "run")
    for step, entry in itertools.product(make.RUN_STEPS, ("model", "rng", "progress")):
        old = waypost.open(f"{make.V1 / make.RUN}@{step}").state_dict(entry)
        new = waypost.open(f"{tmp_path / 'run'}@{step}").state_dict(entry)
        assert_same(new, old, f"step {step} {entry}")
    old = waypost.open(f"{make.V1 / make.RUN}@3").state_dict("optimizer")
    new = waypost.open(f"{tmp_path / 'run'}@3").state_dict("optimizer")
    for key in ("state", "shapes", "names", "class"):
        assert_same(new[key], old[key], key)


def form_of(snapshot: Path) -> dict[str, Any]:
    """All that a snapshot says and holds, but for ids, times, host and software versions."""
    manifest = json.loads((snapshot / "manifest.json").read_bytes())
    folder = snapshot / "data" / manifest["attempt"]
    for key in ("attempt", "created", "digest", "environment", "indexes", "structure"):
        del manifest[key]
    found: dict[str, Any] = {"manifest": manifest}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found[path.name] = path.read_bytes()
        else:
            data = path.read_bytes()
            start = safetensors.header_length(data[:8], path.name)
            found[path.name] = (data[:start], data[start:])
    return found
