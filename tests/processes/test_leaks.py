"""Many saves and loads of a long job: what each process and the common store hold at the end."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import waypost
from _kit.processes import run_world


def save_and_load(folder: str) -> list[tuple[int, int]]:
    """Descriptors of this process and keys of the store, after 5, 10 and 15 rounds."""
    store = dist.distributed_c10d._get_default_store()
    state = {"m": torch.ones(300_000), "k": 3}
    found = []
    for number in range(1, 16):
        waypost.save(f"{folder}/snap", state, step=number, overwrite=True)
        waypost.load(f"{folder}/snap", state)
        if number % 5 == 0:
            dist.barrier()
            found.append((len(os.listdir("/proc/self/fd")), store.num_keys()))
            dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_saves_and_loads_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither connections nor keys grow."""
    for outcome in run_world(2, save_and_load, folder=str(tmp_path)):
        assert not outcome.error, outcome
        descriptors, keys = zip(*outcome.result, strict=True)
        assert len(set(descriptors)) == 1, descriptors
        assert len(set(keys)) == 1, keys
