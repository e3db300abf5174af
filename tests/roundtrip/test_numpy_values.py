"""numpy data comes back with exactly its dtype, or is refused when it is saved, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waypost
from _kit import assert_same, new_place, refusal

DTYPES: dict[str, Callable[[], np.dtype[Any]]] = {
    "plain fields": lambda: np.dtype([("a", "<i4"), ("b", ">f8")]),
    "aligned": lambda: np.dtype([("a", "u1"), ("b", "f8")], align=True),
    "aligned, no padding": lambda: np.dtype([("a", "f8"), ("b", "f8")], align=True),
    "padded": lambda: np.dtype(
        {"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8], "itemsize": 32}
    ),
    "offset": lambda: np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 16}),
    "out of order": lambda: np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}
    ),
    "overlapping": lambda: np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}
    ),
    "titles": lambda: np.dtype([(("title", "a"), "u1")]),
    "sub-array field": lambda: np.dtype([("a", "u1", (2, 3)), ("b", [("c", ">i4"), ("d", "S3")])]),
    "nested aligned": lambda: np.dtype([("a", np.dtype([("x", "u1"), ("y", "i4")], align=True))]),
    "record": lambda: np.dtype((np.record, [("a", "i4")])),
    "field named f0": lambda: np.dtype("i4,f8"),
    "field without bytes": lambda: np.dtype([("a", "V0"), ("b", "i4")]),
    "void": lambda: np.dtype("V5"),
    "text": lambda: np.dtype("U3"),
    "bytes": lambda: np.dtype("S3"),
    "big-endian": lambda: np.dtype(">f4"),
    "dates": lambda: np.dtype("M8[25s]"),
    "durations": lambda: np.dtype("m8[ns]"),
    "metadata": lambda: np.dtype("f4", metadata={"unit": "m"}),
    "long double": lambda: np.dtype(np.longdouble),
    "long complex": lambda: np.dtype(np.clongdouble),
    "odd names": lambda: np.dtype([("é", "i4"), (" ", "i4"), ("a/b", "i4"), ("~", "i4")]),
}
SUB_ARRAYS: dict[str, Callable[[], np.dtype[Any]]] = {
    "sub-array": lambda: np.dtype(("f4", (2, 3))),
    "sub-array of fields": lambda: np.dtype(([("a", "i4")], (2,))),
}


def _check_same_dtype(actual: np.dtype[Any], expected: np.dtype[Any]) -> None:
    assert actual == expected
    assert actual.type is expected.type
    assert actual.itemsize == expected.itemsize
    assert actual.isalignedstruct == expected.isalignedstruct
    assert actual.names == expected.names
    assert actual.fields == expected.fields
    assert actual.subdtype == expected.subdtype
    assert dict(actual.metadata or {}) == dict(expected.metadata or {})
    assert repr(actual) == repr(expected)
    for name in expected.names or ():
        _check_same_dtype(actual[name], expected[name])


def _saved(value: Any) -> Any:
    """The value as it comes back, or None when it was refused by name."""
    url = new_place("memory", Path())
    refused = refusal(lambda: waypost.save(url, {"e": {"x": [value]}}))
    if refused is not None:
        assert refused.path.startswith("e/x"), refused.path
        assert refused.path in str(refused)
        return None
    return waypost.open(url).state_dict("e")["x"][0]


@pytest.mark.parametrize("make", [*DTYPES.values(), *SUB_ARRAYS.values()], ids=DTYPES | SUB_ARRAYS)
def test_a_dtype_comes_back_exactly_or_is_refused(make: Callable[[], np.dtype[Any]]) -> None:
    """As a value of its own."""
    read = _saved(make())
    if read is not None:
        _check_same_dtype(read, make())


@pytest.mark.parametrize("make", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (3, 2)], ids=str)
def test_an_array_comes_back_exactly_or_is_refused(
    make: Callable[[], np.dtype[Any]], shape: tuple[int, ...]
) -> None:
    """The dtype, each of its fields and all bytes."""
    array = np.zeros(shape, make())
    read = _saved(array)
    if read is not None:
        _check_same_dtype(read.dtype, array.dtype)
        assert_same(read, array)


@pytest.mark.parametrize("make", DTYPES.values(), ids=DTYPES)
def test_a_scalar_comes_back_exactly_or_is_refused(make: Callable[[], np.dtype[Any]]) -> None:
    """Also a row of a record array, with its own type."""
    scalar = np.zeros(1, make())[0]
    read = _saved(scalar)
    if read is not None:
        assert type(read) is type(scalar)
        _check_same_dtype(read.dtype, scalar.dtype)
        assert read.tobytes() == scalar.tobytes()


@pytest.mark.parametrize(
    "name", ["plain fields", "sub-array field", "text", "bytes", "big-endian", "dates", "durations"]
)
def test_ordinary_dtypes_are_not_refused(name: str) -> None:
    """An exact description is no excuse for refusing what was always stored."""
    array = np.zeros(3, DTYPES[name]())
    assert_same(_saved(array), array)


def test_padding_is_no_data() -> None:
    """What lies between the fields is not turned into a field."""
    dtype = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    array = np.array([(1, 2.5), (3, 4.5)], dtype)
    read = _saved(array)
    if read is not None:
        assert read.dtype.names == ("a", "b")
        assert read["b"].tolist() == [2.5, 4.5]


EMPTY: dict[str, Any] = {
    "str": np.str_(""),
    "bytes": np.bytes_(b""),
    "array of str": np.array(["", ""]),
    "array of bytes": np.array([b"", b""]),
    "no bytes at all": np.empty(3, "U0"),
    "scalar array": np.array(""),
    "big-endian, empty": np.zeros((0, 3), ">f4"),
    "not a number": np.datetime64("NaT"),
    "not a number of a unit": np.datetime64("NaT", "ns"),
}


@pytest.mark.parametrize("value", EMPTY.values(), ids=EMPTY)
def test_empty_text_and_bytes_come_back(value: Any) -> None:
    """Nothing is a value too."""
    url = new_place("memory", Path())
    waypost.save(url, {"e": {"x": value}})
    read = waypost.open(url).state_dict("e")["x"]
    assert type(read) is type(value)
    assert read.dtype == value.dtype
    assert read.tobytes() == value.tobytes()


@pytest.mark.parametrize("key", [np.str_(""), np.bytes_(b""), np.str_("k")], ids=repr)
def test_empty_numpy_text_is_a_key(key: Any) -> None:
    """It hashes like any other."""
    url = new_place("memory", Path())
    waypost.save(url, {"e": {"x": {key: 1}}})
    (read,) = waypost.open(url).state_dict("e")["x"]
    assert type(read) is type(key)
    assert read == key


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ma.array([1, 2], mask=[0, 1]),
        lambda: np.matrix([[1]]),
        lambda: np.rec.array([(1,)]),
    ],
    ids=["masked", "matrix", "record"],
)
def test_subclasses_of_arrays_are_refused_or_kept(make: Callable[[], Any]) -> None:
    """Never turned into plain arrays without a word."""
    read = _saved(make())
    assert read is None or type(read) is type(make())
