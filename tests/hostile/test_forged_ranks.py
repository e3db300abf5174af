"""Forged documents of a snapshot of several ranks: clear errors, in bounded time."""

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.tensor import Shard

import waypost
from _kit.ranks import distribute, mesh_of, noise, options, save_made
from waypost.audit import opening, verify
from waypost.core import commit
from waypost.format import digests, jsontext
from waypost.storage import resolve

LONGEST_S = 5.0


def _saved(path: Path) -> str:
    """Two ranks with rows of a tensor, a table that both hold, and a counter of each."""
    url = str(path / "snap")
    full, table = noise((8, 4), 1), noise((90_000,), 2)

    def make(group: Any) -> dict[str, Any]:
        rows = distribute(full, mesh_of(group.rank, 2), [Shard(0)])
        return {"m": {"w": rows, "table": table, "own": group.rank}}

    save_made(url, make, world_size=2, per_rank=["m/own"])
    return url


def _forge(url: str, change: Any) -> None:
    """Rewrites the structure, and signs it as an attacker can."""
    snapshot = resolve(url)
    opened = opening.open_documents(snapshot)
    tree = msgspec.to_builtins(opened.structure)
    change(tree)
    algorithm = digests.algorithm("xxh3-128")
    data = jsontext.dump(tree) + b"\n"
    folder = snapshot / "data" / opened.manifest.attempt
    snapshot.storage.remove((folder / "structure.json").path)
    record = commit.write_document(folder, "structure.json", data, algorithm, durable=False)
    manifest = msgspec.structs.replace(opened.manifest, structure=record)
    commit.publish_manifest(snapshot, manifest, algorithm, replace=True, durable=False)


def _sharding(text: object) -> Any:
    def change(tree: Any) -> None:
        tree["entries"]["m"]["tree"]["w"]["$tensor"]["sharding"] = text

    return change


FORGERIES = {
    "division": _sharding("0-1/2/S0*999999999"),
    "divisions": _sharding("0-1/2x1/S0*99999999,S0*99999999"),
    "dimension": _sharding("0-1/2/S5"),
    "ranks": _sharding("0-999999999/1000000000/S0"),
    "foreign rank": _sharding("0,7/2/S0"),
    "mesh": _sharding("0-1/3/S0"),
    "boxes outside": _sharding("0-1/=/0:4,0:4;4:99,0:4"),
    "boxes of another shape": _sharding("0-1/=/0:4;4:8"),
    "text": _sharding("S0"),
    "number": _sharding(7),
    "cuts out of order": lambda tree: tree["cuts"].reverse(),
    "cut of a foreign rank": lambda tree: tree["cuts"].append(["zzz", 99, 0]),
    "cut of a foreign path": lambda tree: tree["cuts"].append(["zzz", 1, 0]),
    "no cuts": lambda tree: tree["cuts"].clear(),
}


HARMLESS = ("cut of a foreign path",)
"""Nobody looks there, and nothing is lacking."""


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_structure_is_an_error_or_harmless(forgery: str, tmp_path: Path) -> None:
    """Whatever it says, what is loaded is what was saved, or an error says why not."""
    url = _saved(tmp_path)
    expected = waypost.open(url).read("m/w")
    _forge(url, FORGERIES[forgery])
    began_s = time.monotonic()
    target: dict[str, Any] = {"m": {"w": torch.zeros(8, 4), "table": torch.zeros(90_000)}}
    with contextlib.suppress(waypost.FormatError, waypost.CorruptionError, waypost.MismatchError):
        waypost.load(url, target, include=["m/w", "m/table"], strict=False, options=options())
        assert torch.equal(target["m"]["w"], expected)
    report = verify.verify(resolve(url))  # raises nothing about what a snapshot says
    assert report.problems or forgery in HARMLESS
    assert time.monotonic() - began_s < LONGEST_S
