"""Every layout saved on 1, 2 and 4 ranks loads as every other on 1, 2, 3 and 4, bit for bit.

The ranks are real processes with gloo. One world for each number of ranks makes all saves, then
one for each number makes all loads; each pair of layouts is a subtest of its own.
"""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import waypost
from _kit import assert_same_tensor
from _kit.layouts import (
    MOMENTS,
    RATE,
    RATE_OF_VECTORS,
    STEPS,
    TIED,
    Full,
    Held,
    differences,
    full_state,
    hold,
    layouts_of,
    spoil,
)
from _kit.processes import run_world

SAVED_ON = (1, 2, 4)
LOADED_ON = (1, 2, 3, 4)
OPTIONS = {"timeout_s": 30.0}

Source = tuple[int, str]


def url_of(folder: str, source: Source) -> str:
    """Where the snapshot of the layout on that number of ranks is."""
    size, kind = source
    return f"{folder}/{kind}-on-{size}"


# --- in the ranks ---------------------------------------------------------------------------


def save_all(folder: str, seed: int) -> dict[str, str]:
    """Saves each layout that this number of ranks can have; layout to error."""
    full = full_state(seed)
    errors = {}
    for kind in layouts_of(dist.get_world_size()):
        url = url_of(folder, (dist.get_world_size(), kind))
        try:
            held = hold(kind, full)
            waypost.save(url, held.state(), step=STEPS, options=waypost.Options(**OPTIONS))
            errors[kind] = "\n".join(differences(held, hold(kind, full), *held.state()))
        except Exception:
            errors[kind] = traceback.format_exc()
    return errors


def load_all(folder: str, seed: int, sources: list[Source]) -> dict[tuple[Source, str], str]:
    """Loads each source into each layout; (source, layout) to what was wrong."""
    full = full_state(seed)
    found = {}
    for first, kind in enumerate(layouts_of(dist.get_world_size())):
        target, expected = hold(kind, full), hold(kind, full)
        for number, source in enumerate(sources, first):
            spoil(target, is_fresh=number % 2 == 0)
            try:
                found[source, kind] = load_one(folder, source, target, expected)
            except Exception:
                found[source, kind] = traceback.format_exc()
    return found


def load_one(folder: str, source: Source, target: Held, expected: Held) -> str:
    """Loads in place; what of this rank's part is wrong.

    ShardedTensors have their moments in a dictionary; all others, in their optimizer.
    """
    has_optimizer = "sharded_tensor" not in (source[1], target.kind)
    entries = ["model", "optimizer" if has_optimizer else "moments"]
    into = {name: entry for name, entry in target.state().items() if name in entries}
    waypost.load(url_of(folder, source), into, options=waypost.Options(**OPTIONS))
    return "\n".join(differences(target, expected, *entries))


# --- in the test ----------------------------------------------------------------------------


def by_rank(outcomes: list[Any], key: Any) -> str:
    """What each rank says of the key, where it says anything."""
    said = []
    for rank, outcome in enumerate(outcomes):
        text = outcome.error or f"signal {outcome.signal}"
        if outcome.result is not None:
            text = outcome.result[key]
        if text:
            said.append(f"rank {rank} of {len(outcomes)}: {text}")
    return "\n".join(said)


def check_silent(said: str) -> None:
    """Fails with the whole of what the ranks said, if they said anything."""
    if said:
        pytest.fail(said, pytrace=False)


def check_opened(url: str, full: Full, *, has_optimizer: bool) -> None:
    """One process without a process group sees the full tensors, and nothing is damaged."""
    snapshot = waypost.open(url)
    report = snapshot.verify()
    assert report.ok, report.problems
    model = snapshot.state_dict("model")
    assert set(model) == set(full.tensors)
    for name, tensor in full.tensors.items():
        assert_same_tensor(model[name], tensor, name)
    moments = snapshot.state_dict("moments")
    assert set(moments) == set(full.flat_moments())
    for name, tensor in full.flat_moments().items():
        assert_same_tensor(moments[name], tensor, name)
    if has_optimizer:
        check_optimizer(snapshot.state_dict("optimizer"), full)


def check_optimizer(state: dict[str, Any], full: Full) -> None:
    """AdamW's state by parameter name, in full, with the groups it was made with."""
    for kind in MOMENTS:
        assert set(state["state"]) == set(full.moments[kind])
        for name, tensor in full.moments[kind].items():
            assert_same_tensor(state["state"][name][kind], tensor, f"{kind} of {name}")
    assert {float(of["step"]) for of in state["state"].values()} == {float(STEPS)}
    groups = state["param_groups"]
    assert [group["lr"] for group in groups] == [RATE, RATE_OF_VECTORS]
    named = [name for group in groups for name in group["params"]]
    assert sorted(named) == sorted(full.moments[MOMENTS[0]])


def check_plain_safetensors(url: str, full: Full) -> None:
    """The weights of one rank are a safetensors file with the module's own names."""
    (path,) = Path(url).rglob("model.*.safetensors")
    tensors = load_file(path)
    assert set(tensors) == set(full.tensors) - {TIED[1]}
    for name, tensor in tensors.items():
        assert_same_tensor(tensor, full.tensors[name], name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_loads_as_every_other(
    tmp_path: Path, seed: int, subtests: pytest.Subtests
) -> None:
    """All pairs of layouts, on all numbers of ranks; and each snapshot opened in one process."""
    folder = str(tmp_path)
    full = full_state(seed)
    saved: list[Source] = []
    for size in SAVED_ON:
        outcomes = run_world(size, save_all, folder=folder, seed=seed)
        for kind in layouts_of(size):
            with subtests.test(f"{kind} on {size} ranks is saved"):
                check_silent(by_rank(outcomes, kind))
                saved.append((size, kind))
    for size, kind in saved:
        with subtests.test(f"{kind} on {size} ranks is opened in one process"):
            url = url_of(folder, (size, kind))
            check_opened(url, full, has_optimizer=kind != "sharded_tensor")
    for kind in ("plain", "ddp"):
        with subtests.test(f"{kind} on one rank is a plain safetensors file"):
            check_plain_safetensors(url_of(folder, (1, kind)), full)
    assert saved, "nothing was saved, so nothing can be loaded"
    for size in LOADED_ON:
        outcomes = run_world(size, load_all, timeout_s=200, folder=folder, seed=seed, sources=saved)
        for source in saved:
            for kind in layouts_of(size):
                with subtests.test(f"{source[1]} on {source[0]} → {kind} on {size}"):
                    check_silent(by_rank(outcomes, (source, kind)))
