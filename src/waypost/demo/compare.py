"""Compares two runs bit for bit and says where they first differ.

A value is flattened into leaves: its type, dtype and shape in words and its content in bytes. Two
values are the same when their leaves are, so ``0.0`` and ``-0.0``, two kinds of NaN, a list and a
tuple, or float32 and float64 all count as different.
"""

from __future__ import annotations

import importlib.util
import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

import waypost
from waypost.demo import ENTRIES
from waypost.demo.supervise import Strike, required_hits
from waypost.demo.train import DigitReader, Digits
from waypost.demo.trainer import Course
from waypost.demo.watch import Incarnation, LoggedStep, read_log

TITLES = {
    "model": "weights",
    "ema": "averaged weights (EMA)",
    "optimizer": "optimizer state",
    "schedule": "learning rate schedule",
    "data": "data loader",
    "rng": "random generators",
    "progress": "progress counters",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value or the outline of one container, at a path."""

    path: str
    kind: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: what was compared, how much of it, and what is wrong, if anything."""

    title: str
    extent: str
    problem: str | None = None
    verdict: str = "same"  # the word for no problem


def flatten(value: object, path: str) -> Iterator[Leaf]:
    """Yields the leaves of a value, containers before their items.

    Raises:
        TypeError: The value is of a type that this function cannot compare exactly.
    """
    name = type(value).__qualname__
    if isinstance(value, Mapping):
        yield Leaf(path=path, kind=f"{name} of {len(value)}", content=repr(list(value)).encode())
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        yield Leaf(path=path, kind=f"{name} of {len(value)}", content=b"")
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}/{index}")
    else:
        kind, content = _content(value, path)
        yield Leaf(path=path, kind=f"{name} {kind}".strip(), content=content)


def first_difference(left: list[Leaf], right: list[Leaf]) -> str | None:
    """Returns where and how two lists of leaves first differ, or None."""
    for ours, theirs in itertools.zip_longest(left, right):
        if ours is None or theirs is None:
            leaf, owner = (theirs, "second") if ours is None else (ours, "first")
            return f"{leaf.path}: only the {owner} has it"
        if ours.path != theirs.path:
            return f"{ours.path} against {theirs.path}"
        if ours.kind != theirs.kind:
            return f"{ours.path}: {ours.kind} against {theirs.kind}"
        if ours.content != theirs.content:
            return f"{ours.path}: {_differing_bytes(ours.content, theirs.content)}"
    return None


def compare_courses(left: Course, right: Course, strikes: list[Strike]) -> list[Check]:
    """Makes every comparison of the demo; the left one is the run that was not disturbed."""
    checks = check_strikes(strikes)
    checks += compare_logs(read_log(left.log), read_log(right.log))
    checks += compare_snapshots(left.run, right.run)
    checks += [verify_run(left.run), verify_run(right.run)]
    if right.forget != "model":
        checks.append(check_safetensors(right.run))
    if right.forget != "ema":
        checks.append(check_accuracy(left.run, right.run))
    return checks


def compare_snapshots(left_run: Path, right_run: Path) -> list[Check]:
    """Compares the newest snapshots of two runs, one check per entry."""
    left = waypost.open(f"{left_run}@latest")
    right = waypost.open(f"{right_run}@latest")
    steps = None if left.step == right.step else f"step {left.step} against step {right.step}"
    checks = [Check(title="last step", extent=f"step {left.step}", problem=steps)]
    for entry in ENTRIES:
        title = TITLES[entry]
        missing = [run.url for run in (left, right) if entry not in run.entries]
        if missing:
            checks.append(Check(title=title, extent="", problem=f"not in {missing[0]}"))
            continue
        ours = list(flatten(left.state_dict(entry), entry))
        theirs = list(flatten(right.state_dict(entry), entry))
        size_bytes = sum(len(leaf.content) for leaf in ours)
        extent = f"{len(ours)} values, {size_bytes:,} bytes"
        checks.append(Check(title=title, extent=extent, problem=first_difference(ours, theirs)))
    return checks


def compare_logs(left: list[Incarnation], right: list[Incarnation]) -> list[Check]:
    """Compares every step that any incarnation logged with the same step of the other run."""
    ours = [step for incarnation in left for step in incarnation.steps]
    theirs = [step for incarnation in right for step in incarnation.steps]
    by_number = {step.number: step for step in ours}
    extent = f"{len(ours)} steps, {len(theirs) - len(ours)} done twice"
    gap = _gap(left, right)
    return [
        Check(title="loss curve", extent=extent, problem=gap or _loss_problem(by_number, theirs)),
        Check(title="data order", extent=extent, problem=gap or _batch_problem(by_number, theirs)),
    ]


def check_strikes(strikes: list[Strike]) -> list[Check]:
    """Checks that the disturbances were what the demo promises, and that none cost a snapshot."""
    lost = [
        f"restart {number} went on from step {strike.resumed_from}, not {strike.newest_step}"
        for number, strike in enumerate(strikes, 1)
        if strike.resumed_from != strike.newest_step
    ]
    kills = [strike for strike in strikes if strike.exit_code < 0]
    hits = sum(strike.is_in_save for strike in kills)
    wanted = required_hits(len(kills))
    few = None if hits >= wanted else f"at least {wanted} wanted"
    late = [
        f"the last step was {strike.step}, the newest snapshot is of {strike.newest_step}"
        for strike in strikes
        if strike.exit_code > 0 and strike.step != strike.newest_step
    ]
    return [
        Check(
            title="restarts",
            extent=f"{len(strikes)}, from the newest",
            problem=next(iter(lost), None),
            verdict="yes",
        ),
        Check(
            title="kills inside a save",
            extent=f"{hits} of {len(kills)}",
            problem=few,
            verdict="enough",
        ),
        Check(
            title="SIGTERM",
            extent="saved, exit code 143",
            problem=next(iter(late), None),
            verdict="yes",
        ),
    ]


def verify_run(run: Path) -> Check:
    """Reads every byte of every complete snapshot of a run and checks it."""
    title = f"verify {run.parent.name}"
    records = [record for record in waypost.snapshots(str(run)) if record.problem is None]
    size_bytes = 0
    for record in records:
        report = waypost.open(record.url).verify(deep=True)
        size_bytes += report.nbytes
        if not report.ok:
            return Check(title=title, extent=record.name, problem=str(report.problems[0]))
    extent = f"{len(records)} snapshots, {size_bytes:,} bytes"
    return Check(title=title, extent=extent, verdict="intact")


def check_safetensors(run: Path) -> Check:
    """Opens the newest weights with the safetensors package alone and compares them."""
    title = "weights by safetensors"
    if importlib.util.find_spec("safetensors") is None:
        return Check(title=title, extent="not installed", verdict="skipped")
    from safetensors import safe_open

    snapshot = waypost.open(f"{run}@latest")
    file = Path(snapshot.url) / "data" / snapshot.attempt / "model.r00000-000.safetensors"
    if not file.is_file():
        return Check(title=title, extent="", problem=f"no file {file}")
    with safe_open(file, framework="pt") as weights:
        plain = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    ours: Any = snapshot.state_dict("model")
    left = list(flatten({name: ours[name] for name in sorted(ours)}, "model"))
    right = list(flatten({name: plain[name] for name in sorted(plain)}, "model"))
    return Check(title=title, extent=f"{len(plain)} tensors", problem=first_difference(left, right))


def check_accuracy(left_run: Path, right_run: Path) -> Check:
    """Lets the averaged weights of both runs read the digits that were held out."""
    left, right = (_count_right(run) for run in (left_run, right_run))
    total = len(Digits(held_out=True))
    return Check(
        title="held-out digits",
        extent=f"{left} of {total} read right",
        problem=None if left == right else f"{left} against {right}",
    )


def _count_right(run: Path) -> int:
    ema = AveragedModel(DigitReader())
    waypost.load(f"{run}@latest", {"ema": ema})
    digits = Digits(held_out=True)
    with torch.inference_mode():
        guesses = ema.eval()(digits.pixels).argmax(dim=1)
    return int((guesses == digits.labels).sum())


def _content(value: object, path: str) -> tuple[str, bytes]:
    match value:
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            return f"{value.dtype} {tuple(value.shape)}", flat.view(torch.uint8).numpy().tobytes()
        case np.ndarray() | np.generic():
            return f"{value.dtype} {value.shape}", value.tobytes()
        case float():
            return "", struct.pack(">d", value)
        case None | bool() | int() | str() | bytes():
            return "", repr(value).encode()
        case _:
            raise TypeError(f"{path}: a {type(value).__qualname__} cannot be compared exactly")


def _differing_bytes(left: bytes, right: bytes) -> str:
    if len(left) != len(right) or len(left) <= 16:
        return f"{left[:40]!r} against {right[:40]!r}"
    positions = [at for at, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    return f"{len(positions)} of {len(left)} bytes differ, the first is byte {positions[0]}"


def _gap(left: list[Incarnation], right: list[Incarnation]) -> str | None:
    # Each life must log step after step, none may begin beyond what is done, and both runs must
    # reach the same last step.
    reached = []
    for run in (left, right):
        last = 0
        for life in run:
            numbers = [life.steps_done, *(step.number for step in life.steps)]
            if life.steps_done > last or numbers != list(range(numbers[0], numbers[-1] + 1)):
                return f"the steps logged after step {min(last, life.steps_done)} have a gap"
            last = max(last, numbers[-1])
        reached.append(last)
    return None if reached[0] == reached[1] else f"last step {reached[0]} against {reached[1]}"


def _loss_problem(by_number: dict[int, LoggedStep], steps: list[LoggedStep]) -> str | None:
    for step in steps:
        other = by_number[step.number].loss
        if step.loss != other:
            return f"step {step.number}: {other} against {step.loss}"
    return None


def _batch_problem(by_number: dict[int, LoggedStep], steps: list[LoggedStep]) -> str | None:
    for step in steps:
        other = by_number[step.number].batch
        if step.batch != other:
            return f"step {step.number}: batch {other} against {step.batch}"
    return None
