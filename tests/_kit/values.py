"""The documented value set, one or more examples of each kind, and classes that go with it."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import struct
import uuid
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import torch


class Phase(enum.Enum):
    """A plain enumeration."""

    WARMUP = "warmup"
    MAIN = ("main", 2)


class Level(enum.IntEnum):
    """An enumeration whose members are also ints."""

    LOW = 1
    HIGH = 2


class Colour(enum.Flag):
    """An enumeration whose members combine."""

    RED = enum.auto()
    BLUE = enum.auto()


class Point(NamedTuple):
    """A namedtuple class."""

    x: int
    y: Any


@dataclasses.dataclass
class Settings:
    """A dataclass that holds other values."""

    rate: float
    names: list[str]
    nested: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass with slots."""

    depth: int
    phase: Phase


def bits_of_nan(bits: int) -> float:
    """The float with exactly these bits."""
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    return value


def _generators() -> dict[str, Any]:
    torch_generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=torch_generator)
    numpy_generator = np.random.default_rng(6)
    numpy_generator.normal(size=3)
    legacy = np.random.RandomState(7)
    legacy.normal()
    python = random.Random(8)
    python.gauss(0, 1)
    return {
        "torch_generator": torch_generator,
        "numpy_generator": numpy_generator,
        "numpy_philox": np.random.Generator(np.random.Philox(9)),
        "numpy_legacy": legacy,
        "python_random": python,
    }


def _scalars() -> dict[str, Any]:
    return {
        "none": None,
        "true": True,
        "false": False,
        "zero": 0,
        "int_large": 2**200 + 1,
        "int_negative": -(2**63) - 1,
        "int_double_limit": 2**53 + 1,
        "float": 0.1,
        "float_negative_zero": -0.0,
        "float_inf": float("inf"),
        "float_minus_inf": float("-inf"),
        "float_nan": float("nan"),
        "float_nan_payload": bits_of_nan(0xFFF8000000012345),
        "float_subnormal": 5e-324,
        "float_whole": 3.0,
        "complex": complex(-0.0, float("nan")),
        "str": "plain",
        "str_empty": "",
        "str_odd": "a\x00b\n\r\t\x1f\x7f \u2028 \u00e9 e\u0301 \U0001f4a9 \ufeff",
        "str_tag": "$tuple",
        "bytes": bytes(range(256)),
        "bytes_empty": b"",
        "bytearray": bytearray(b"\x00\xff mutable"),
    }


def _containers() -> dict[str, Any]:
    return {
        "list": [1, [2, []], ()],
        "tuple": (1, (2, ()), []),
        "dict": {"a": {}, "b": {"c": None}},
        "dict_order": {"z": 1, "a": 2, "m": 3},
        "dict_tags": {"$tuple": [1], "$": 2, "~": 3, "type": "x", "__class__": "y"},
        "ordered_dict": collections.OrderedDict([("z", 1), ("a", [2])]),
        "set": {1, "1", (1,), None, 2.5},
        "frozenset": frozenset({frozenset(), b"x"}),
        "set_empty": set(),
        "deque": collections.deque([1, [2]], maxlen=5),
        "deque_unbounded": collections.deque(),
        "defaultdict_list": collections.defaultdict(list, {"a": [1]}),
        "defaultdict_int": collections.defaultdict(int, {(1, 2): 3}),
        "defaultdict_none": collections.defaultdict(None, {"x": 1}),
        "counter": collections.Counter("abracadabra"),
        "namedtuple": Point(1, (2, 3)),
        "dataclass": Settings(0.5, ["a"], Settings(float("nan"), [])),
        "dataclass_frozen": Frozen(3, Phase.MAIN),
        "range": range(10, -5, -3),
        "slice": slice(None, 5, None),
    }


def _library_types() -> dict[str, Any]:
    kolkata = zoneinfo.ZoneInfo("Asia/Kolkata")
    minutes = datetime.timezone(datetime.timedelta(minutes=-90), "odd")
    return {
        "enum": Phase.WARMUP,
        "enum_int": Level.HIGH,
        "enum_flag": Colour.RED | Colour.BLUE,
        "date": datetime.date(1, 1, 1),
        "time": datetime.time(23, 59, 59, 999999, tzinfo=datetime.UTC, fold=1),
        "datetime": datetime.datetime(2026, 10, 25, 2, 30, 0, 1, fold=1),
        "datetime_utc": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        "datetime_zone": datetime.datetime(2026, 1, 1, tzinfo=kolkata),
        "datetime_offset": datetime.datetime(2026, 1, 1, tzinfo=minutes),
        "timedelta": datetime.timedelta(days=-1, microseconds=1),
        "timezone": minutes,
        "zoneinfo": kolkata,
        "path": pathlib.Path("/a b/*?/\u6d4b\u8bd5"),
        "path_relative": pathlib.Path("../x"),
        "pure_windows_path": pathlib.PureWindowsPath("C:/x"),
        "decimal": decimal.Decimal("-0.100"),
        "decimal_nan": decimal.Decimal("sNaN123"),
        "fraction": fractions.Fraction(-1, 3),
        "uuid": uuid.UUID(int=5),
    }


def _torch_and_numpy() -> dict[str, Any]:
    odd = np.array([0x7FC12345, 0x80000000], dtype=np.uint32).view(np.float32)
    return {
        "torch_size": torch.Size([3, 0, 5]),
        "torch_dtype": torch.float8_e4m3fn,
        "torch_device": torch.device("cuda", 3),
        "torch_layout": torch.sparse_csr,
        "torch_memory_format": torch.channels_last,
        "np_float32": np.float32(0.1),
        "np_float64": np.float64("nan"),
        "np_int64": np.int64(-5),
        "np_uint8": np.uint8(255),
        "np_bool": np.bool_(True),
        "np_complex": np.complex64(1 - 2j),
        "np_half": np.float16(6e-8),
        "np_datetime": np.datetime64("2026-01-01T00:00:01", "ms"),
        "np_str": np.str_("text"),
        "np_array": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "np_array_nan": odd,
        "np_array_scalar": np.array(2.5),
        "np_array_empty": np.zeros((3, 0), dtype=np.complex128),
        "np_array_big_endian": np.arange(4, dtype=">i4"),
        "np_array_fortran": np.asfortranarray(np.random.default_rng(0).random((3, 5))),
        "np_array_text": np.array(["a", "\u00e9\u00e9\u00e9"]),
        "np_array_bytes": np.array([b"a", b"bcd"]),
        "np_structured": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]),
        "np_dtype": np.dtype(">f4"),
        "np_dtype_structured": np.dtype([("a", "<i4"), ("b", "S3", (2,))]),
        "tensor": torch.arange(6.0).reshape(2, 3),
    }


def documented_values() -> dict[str, Any]:
    """Examples of everything that a snapshot stores type-exactly."""
    return {
        **_scalars(),
        **_containers(),
        **_library_types(),
        **_torch_and_numpy(),
        **_generators(),
    }


def nested(value: Any) -> Any:
    """The value five containers deep, each container of another kind."""
    layers = collections.OrderedDict(a=[value])
    return {"one": [({"three": Settings(1.0, [], layers)},), None]}


def innermost(value: Any) -> Any:
    """What `nested` wrapped."""
    return value["one"][0][0]["three"].nested["a"][0]


ODD_KEYS: dict[str, str] = {
    "slash": "a/b",
    "dot": "a.b",
    "percent": "100%",
    "escaped_slash": "a%2Fb",
    "newline": "a\nb",
    "nul": "a\x00b",
    "emoji": "\U0001f4a9\u6d4b\u8bd5",
    "nfc": "\u00e9",
    "nfd": "e\u0301",
    "long": "x" * 300,
    "long_emoji": "\U0001f4a9" * 300,
    "empty": "",
    "tilde": "~x",
    "tilde_zero": "~0",
    "tilde_true": "~true",
    "tilde_only": "~",
    "dollar": "$x",
    "one_dot": ".",
    "two_dots": "..",
    "backslash": "a\\b",
    "star": "*",
    "stars": "**",
    "brackets": "[a]?",
    "space": " a ",
    "quote": "\"'",
    "decimal": "0",
    "metadata": "__metadata__",
}
