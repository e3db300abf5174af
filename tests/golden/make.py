"""Golden snapshots: their states, built from formulas alone, and the program that writes them.

    PYTHONPATH=src:tests python -m golden.make FOLDER

writes all of them below FOLDER, which must be new. Files under `v1` are never changed: a snapshot
of a new kind gets a new name. All but ids, times and software versions is the same each time.
"""

import collections
import contextlib
import datetime
import decimal
import fractions
import math
import os
import pathlib
import platform
import random
import struct
import sys
import tempfile
import uuid
import warnings
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard

import waypost
from _kit.meshes import distributed, inner_first, strided
from golden import shapes
from waypost.testing import run_ranks
from waypost.testing import values as results_of

V1 = Path(__file__).parent / "v1"
RUN = "run"
RUN_STEPS = (1, 2, 3)
RANKS = "ranks"
RANKS_MESH = (2, 2)
_HOST = "golden"

waypost.register_value(
    shapes.Vocabulary,
    name="golden.vocabulary",
    encode=lambda value: value.words,
    decode=shapes.Vocabulary,
)

_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")),
]


def content(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor whose bytes follow a formula and meet all byte values."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = bytes((number * 73 + seed * 31 + 128) % 256 for number in range(count))
    if dtype is torch.bool:
        data = bytes(byte >> 7 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def dtypes() -> dict[str, Any]:
    """Every element type that the format knows: a matrix, a scalar, nothing."""
    found = {}
    for name in _NAMES:
        dtype = getattr(torch, name)
        found[name] = {
            "matrix": content(dtype, 2, 3),
            "scalar": content(dtype, seed=5),
            "empty": content(dtype, 3, 0),
        }
    return {"dtypes": found}


def tensors() -> dict[str, Any]:
    """Every form of a tensor node."""
    base = content(torch.float32, 3, 4)
    buffer = content(torch.int16, 10, seed=1)
    memory = content(torch.float32, 2, 3, 4, 5, seed=2)
    return {
        "plain": {
            "base": base,
            "same": base,
            "tied": base.detach(),
            "row": base[1],
            "column": base[:, 2],
            "as_integers": base.view(torch.int32)[1:],
            "left": buffer[:6],
            "right": buffer[4:],
            "channels_last": memory.contiguous(memory_format=torch.channels_last),
            "strided": content(torch.float64, 8, seed=3)[::3],
            "expanded": content(torch.float32, 1, seed=4).expand(3),
            "parameter": torch.nn.Parameter(content(torch.float32, 2, seed=5)),
            "frozen": torch.nn.Parameter(content(torch.int8, 2, seed=6), requires_grad=False),
            "buffer": torch.nn.Buffer(content(torch.float32, 2, seed=7), persistent=False),
            "gradient": content(torch.float16, 2, seed=8).requires_grad_(),
            "conjugate": content(torch.complex64, 2, seed=9).conj(),
            "negative": torch._neg_view(torch.tensor([1.0, -0.0, 2.5])),
        },
        "sparse": {
            "coo": _pairs(),
            "coalesced": _pairs().coalesce(),
            "csr": _grid().to_sparse_csr(),
            "csc": _grid().to_sparse_csc(),
            "bsr": _grid().to_sparse_bsr((2, 2)),
            "bsc": _grid().to_sparse_bsc((2, 2)),
        },
        "quantised": _quantised(),
        "classes": {
            "marked": content(torch.float32, 3, seed=10).as_subclass(shapes.Marked),
            "scaled": shapes.Scaled(content(torch.int8, 2, 2), torch.tensor([0.5]), "int8"),
        },
        "alone": content(torch.bfloat16, 4, seed=11),
        "other": {"tied_to_another_entry": base},
    }


def values() -> dict[str, Any]:
    """Every value tag, and keys of every type."""
    return {"values": {**_plain_values(), **_container_values(), **_library_values()}}


def pickled() -> dict[str, Any]:
    """What needs the required feature `pickle`, beside an entry that does not."""
    return {"opaque": shapes.Opaque(7), "plain": {"w": content(torch.float32, 3)}}


def cryptographic() -> dict[str, Any]:
    """Saved with BLAKE3 digests."""
    return {"w": content(torch.float32, 64)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "dtypes": dtypes,
    "tensors": tensors,
    "values": values,
    "pickled": pickled,
    "cryptographic": cryptographic,
}
OPTIONS = {
    "pickled": waypost.Options(allow_pickle=True),
    "cryptographic": waypost.Options(digest="blake3"),
}


def run_state() -> dict[str, Any]:
    """The objects of a training run, before their first step."""
    model = shapes.Net()
    groups = [
        {"params": [model.embed.weight], "lr": 0.5, "weight_decay": 0.0},
        {"params": list(model.norm.parameters()), "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "rng": waypost.RNG(),
        "progress": waypost.Progress(tokens=0),
    }


def set_step(state: dict[str, Any], step: int) -> None:
    """Gives all of a run's state the content that it has after `step` steps; no arithmetic."""
    model, optimizer = state["model"], state["optimizer"]
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 8 + number + step)
        for number, moments in enumerate(optimizer.state.values()):
            moments["step"].fill_(step)
            moments["exp_avg"].fill_(number + step / 4)
            moments["exp_avg_sq"].fill_(number + step / 8)
    for group in optimizer.param_groups:
        group["lr"] = 1 / 2**step
    state["progress"].samples = 64 * step
    state["progress"].tokens = 8192 * step
    seed_streams(step)


def whole_tensors() -> dict[str, torch.Tensor]:
    """What four ranks save together, each tensor as a whole."""
    return {
        "rows": content(torch.float32, 7, 3, seed=20),
        "columns": content(torch.bfloat16, 3, 4, seed=21),
        "few": content(torch.int64, 1, 2, seed=22),
        "strided": content(torch.float32, 8, 2, seed=23),
        "grid": content(torch.complex128, 3, 5, seed=24),
        "empty": content(torch.float32, 0, 3),
        "table": content(torch.uint8, 262_160, seed=25),
        "scale": content(torch.float64, seed=26),
        "experts.0": content(torch.float32, 2, 2, seed=27),
        "experts.3": content(torch.float32, 2, 2, seed=28),
    }


def own_state(rank: int) -> dict[str, Any]:
    """What a rank has for itself, in an entry of its own and within a shared one."""
    return {
        "data": {"position": 10 * rank, "seen": content(torch.int32, rank + 1, seed=rank)},
        "mixed": {"limit": 5, "rank": rank, **({"extra": torch.ones(2)} if rank == 2 else {})},
    }


def ranks_state(rank: int) -> dict[str, Any]:
    """What one of four ranks holds: sharded on a mesh of 2 × 2, replicated, its own."""
    whole = whole_tensors()
    shard, replicate = Shard, Replicate()
    spread = {
        "rows": [replicate, shard(0)],
        "columns": [replicate, shard(1)],
        "few": [shard(0), replicate],
        "grid": [shard(0), shard(1)],
        "empty": [replicate, shard(0)],
    }
    model: dict[str, Any] = {
        name: distributed(whole[name], RANKS_MESH, placements, rank)
        for name, placements in spread.items()
    }
    part = inner_first(whole["strided"], RANKS_MESH, 0, rank)
    placements = strided(RANKS_MESH, 0)
    model["strided"] = distributed(whole["strided"], RANKS_MESH, placements, rank, part)
    model |= {name: whole[name] for name in ("table", "scale")}
    model["tied"] = model["rows"]
    if rank in (0, 3):
        model[f"experts.{rank}"] = whole[f"experts.{rank}"]
    return {"model": model, **own_state(rank)}


def seed_streams(step: int) -> None:
    """Sets all random streams of the process."""
    random.seed(step)
    np.random.seed(step)
    torch.manual_seed(step)


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Puts the process's random streams back."""
    before = waypost.RNG().state_dict()
    try:
        yield
    finally:
        waypost.RNG().load_state_dict(before)


def write(folder: Path) -> None:
    """Writes all golden snapshots below a new folder."""
    folder.mkdir(parents=True)
    for name, build in STATES.items():
        write_one(name, build(), folder / name)
    write_run(folder / RUN)
    write_ranks(folder / RANKS)


def write_one(name: str, state: dict[str, Any], place: Path) -> None:
    """Writes one of the single snapshots."""
    waypost.save(
        place,
        state,
        step=None if name == "values" else 12,
        metrics={"loss": 0.5, "count": 3, "nan": float("nan")},
        metadata={"tags": ("golden", name), "limit": float("inf")},
        options=OPTIONS.get(name),
    )


def write_run(place: Path) -> None:
    """Writes the run: one snapshot for each step, by a Checkpointer."""
    with streams_kept():
        state = run_state()
        with waypost.Checkpointer(
            place, state, save_every=waypost.EverySteps(1), save_on=("end",)
        ) as ckpt:
            for step in RUN_STEPS:
                state["progress"].step = step
                set_step(state, step)
                ckpt.step_done(metrics={"loss": 1 / step})


def write_ranks(place: Path) -> None:
    """Writes the snapshot of four ranks."""

    def body(group: Any) -> None:
        waypost.save(
            place,
            ranks_state(group.rank),
            step=12,
            per_rank=["data", "mixed/rank", "mixed/extra"],
            process_group=group,
        )

    results_of(run_ranks(math.prod(RANKS_MESH), body))


def _pairs() -> torch.Tensor:
    places = [[1, 0], [0, 2]]
    return torch.sparse_coo_tensor(places, [1.5, 2.5], (2, 3), check_invariants=True)


def _grid() -> torch.Tensor:
    grid = torch.zeros(4, 4)
    grid[0, 1], grid[3, 2] = 1.5, -2.5
    return grid


def _quantised() -> dict[str, torch.Tensor]:
    whole = torch.tensor([[-1.0, 0.5, 2.0], [0.25, -0.75, 1.0]])
    scales = torch.tensor([0.25, 0.5], dtype=torch.float64)
    return {
        "qint8": torch.quantize_per_tensor(whole, 0.25, 3, torch.qint8),
        "quint8": torch.quantize_per_tensor(whole, 0.25, 3, torch.quint8),
        "qint32": torch.quantize_per_tensor(whole, 0.25, 3, torch.qint32),
        "channels": torch.quantize_per_channel(whole, scales, torch.tensor([0, 1]), 0, torch.qint8),
    }


def _plain_values() -> dict[str, Any]:
    (nan,) = struct.unpack(">d", bytes.fromhex("fff8000000012345"))
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53, 2**53 + 1, -(2**200)],
        "floats": [0.1, -0.0, 3.0, 5e-324, 1e300, float("inf"), float("-inf"), nan],
        "complex": complex(-0.0, nan),
        "text": "a\x00b\n \u00e9 \u2028 \U0001f4a9",
        "tag": "$tuple",
        "bytes": bytes(range(256)),
        "bytearray": bytearray(b"\x00\xff"),
        "ellipsis": ...,
        "range": range(10, -5, -3),
        "slice": slice(None, 5, None),
        **dict.fromkeys(("", "~x", "a/b", "100%", "a.b", "__metadata__", "$x", "\n"), "odd key"),
        **dict.fromkeys((0, (1, 2), None, True, 1.5, b"k", frozenset({1})), "other key"),
    }


def _container_values() -> dict[str, Any]:
    return {
        "list": [1, [2, []], ()],
        "tuple": (1, (2, ()), []),
        "dict": {"z": {}, "a": {"b": None}},
        "tags": {"$tuple": [1], "~": 2},
        "mixed": {0: 1, "0": 2},
        "ordered": collections.OrderedDict([("z", 1), ("a", [2])]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "default_none": collections.defaultdict(None, {(1, 2): 3}),
        "counter": collections.Counter("abracadabra"),
        "set": {1, "1", (1,), None, 2.5},
        "frozenset": frozenset({frozenset(), b"x"}),
        "deque": collections.deque([1, [2]], maxlen=5),
        "namedtuple": shapes.Point(1, (2, 3)),
        "dataclass": shapes.Config(0.5, ["a"]),
        "enum": shapes.Phase.MAIN,
        "flags": shapes.Colour.RED | shapes.Colour.BLUE,
        "registered": shapes.Vocabulary(["a", "b"]),
    }


def _library_values() -> dict[str, Any]:
    odd_zone = datetime.timezone(datetime.timedelta(minutes=-90), "odd")
    kolkata = zoneinfo.ZoneInfo("Asia/Kolkata")
    return {
        "date": datetime.date(1, 1, 1),
        "time": datetime.time(23, 59, 59, 999999, tzinfo=datetime.UTC, fold=1),
        "datetimes": [
            datetime.datetime(2026, 10, 25, 2, 30, 0, 1, fold=1),
            datetime.datetime(2026, 1, 1, tzinfo=odd_zone),
            datetime.datetime(2026, 1, 1, tzinfo=kolkata),
        ],
        "timedelta": datetime.timedelta(days=-1, microseconds=1),
        "zones": [datetime.UTC, odd_zone, kolkata],
        "decimals": [decimal.Decimal("-0.100"), decimal.Decimal("sNaN123")],
        "fraction": fractions.Fraction(-1, 3),
        "uuid": uuid.UUID(int=5),
        "paths": [pathlib.PurePosixPath("/a b/*?"), pathlib.PureWindowsPath("C:/x"), Path("../x")],
        "torch": [
            torch.Size([3, 0]),
            torch.float8_e4m3fn,
            torch.device("cuda", 3),
            torch.sparse_csr,
            torch.channels_last,
        ],
        "numpy_scalars": [np.float32(0.1), np.bool_(True), np.datetime64("2026-01-01", "D")],
        "numpy_dtypes": [np.dtype(">f4"), np.dtype([("a", "<i4"), ("b", "S3", (2,))])],
        "arrays": {
            "row_major": np.arange(6, dtype=np.int16).reshape(2, 3),
            "column_major": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
            "scalar": np.array(2.5),
            "big_endian": np.arange(4, dtype=">i4"),
            "text": np.array(["a", "\u00e9\u00e9"]),
            "structured": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]),
        },
        "generators": {
            "torch": torch.Generator().manual_seed(5),
            "numpy": np.random.default_rng(6),
            "philox": np.random.Generator(np.random.Philox(7)),
            "numpy_legacy": np.random.RandomState(8),
            "python": random.Random(9),
        },
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    platform.node = lambda: _HOST
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        os.umask(0o022)  # git keeps no other modes
        write(target)
