"""Every place of every document gets every odd value, signed: the numbers, or a Waypost error."""

import copy
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same
from _kit.forgery import Forgery, bounded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    10**30,
    1.5,
    1e308,
    "",
    "x",
    "..",
    "/etc/passwd",
    "\0",
    "x" * 10_000,
    "F32[99999999999]",
    [],
    [[]],
    {},
    {"$tensor": "F32[3]"},
    {"$tuple": []},
    {"": None},
]
SAMPLES = 400


def _state() -> dict[str, Any]:
    tensor = torch.arange(6.0)
    return {
        "model": {"w": tensor, "view": tensor[1:4], "c": torch.ones(2, dtype=torch.complex64)},
        "loop": {"epoch": 3, "log": [(1, 2.5), {1: None}]},
    }


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else ()
    children = enumerate(node) if isinstance(node, list) else children
    for key, value in children:
        yield from _places(value, (*path, key))


def _put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    if value is _REMOVED:
        del document[path[-1]]
    else:
        document[path[-1]] = value


_REMOVED = object()


def _mutations(forged: Forgery) -> list[tuple[str, tuple[Any, ...], Any]]:
    return [
        (which, path, value)
        for which in ("manifest", "structure", "index")
        for path in _places(getattr(forged, which))
        for value in [*ODD, _REMOVED]
    ]


def _try(url: Path) -> str:
    """ "refused" or "read"; anything but a Waypost error or well-formed content is a failure."""
    try:
        snapshot = waypost.open(str(url))
        found = {entry: snapshot.state_dict(entry) for entry in snapshot.entries}
        snapshot.verify()
        snapshot.leaves()
        repr((snapshot.created, snapshot.step, snapshot.metrics, snapshot.metadata))
        waypost.snapshots(str(url.parent))
    except waypost.WaypostError:
        return "refused"
    if isinstance(found.get("model"), dict):
        _no_other_numbers(found["model"])
    return "read"


def _no_other_numbers(model: Any) -> None:
    """What is read under a tensor's own name and type has the saved numbers."""
    for name, wanted in _state()["model"].items():
        actual = model.get(name)
        if not isinstance(actual, torch.Tensor) or name == "view":
            continue
        if actual.shape == wanted.shape and actual.dtype == wanted.dtype:
            assert_same(actual, wanted, name)


def test_odd_values_anywhere_are_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    """A seeded sample of (document, place, value), in one child with a memory limit."""
    url = tmp_path / "run" / "step-000000001"
    waypost.save(str(url), _state(), step=1, metrics={"loss": 0.5}, metadata={"a": [1]})
    sound = Forgery(url)
    mutations = _mutations(sound)
    chosen = random.Random(seed).sample(mutations, min(SAMPLES, len(mutations)))

    def sweep() -> tuple[dict[str, int], dict[str, str]]:
        counts = {"refused": 0, "read": 0}
        problems: dict[str, str] = {}
        for which, path, value in chosen:
            forged = copy.deepcopy(sound)
            _put(getattr(forged, which), path, value)
            try:
                forged.sign()
            except (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError):
                continue  # the forger itself needs this place
            try:
                counts[_try(url)] += 1
            except BaseException as error:
                site = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__}: {error} ({site.name})"[:300]
                problems.setdefault(kind, f"{which} {path} = {str(value)[:40]!r}")
            sound.sign()
        return counts, problems

    counts, problems = bounded(sweep, 60).expect_result()
    assert not problems, "\n" + "\n".join(f"{kind} at {at}" for kind, at in problems.items())
    assert counts["refused"] > 50
