"""Values that lie: random streams that would read outside of memory, names of things not there.

The documents are signed, so only the meaning of a value can refuse it. The answer is the library's
own error, never a crash, and never an exception of whatever lies below.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waypost
from _kit import Outcome
from _kit.forgery import Forgery, bounded

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory limits need /proc"
)

REFUSED = (waypost.FormatError, waypost.UnsupportedError)


def _attempt(action: Callable[[], Any]) -> Callable[[], tuple[str, str]]:
    """Runs in a child: what came of it, as text."""

    def attempt() -> tuple[str, str]:
        try:
            action()
        except REFUSED as error:
            return "refused", str(error)
        return "accepted", ""

    return attempt


def _kind(outcome: Outcome) -> str:
    assert outcome.signal is None, f"died of signal {outcome.signal}"
    kind, said = outcome.expect_result()
    assert len(said) < 20_000, "the message repeats the attack"
    return kind


@pytest.fixture
def forged(tmp_path: Path) -> Forgery:
    """A sound snapshot with a model, a value, and one random stream of each kind."""
    url = tmp_path / "snap"
    streams = {
        "legacy": np.random.RandomState(1),
        "mt": np.random.Generator(np.random.MT19937(1)),
        "philox": np.random.Generator(np.random.Philox(1)),
        "pcg": np.random.default_rng(1),
        "sfc": np.random.Generator(np.random.SFC64(1)),
    }
    state = {"model": {"w": torch.ones(3)}, "x": {"v": 1}, "g": streams, "rng": waypost.RNG()}
    waypost.save(str(url), state)
    return Forgery(url)


def _entry(forged: Forgery, name: str) -> Any:
    for document in (forged.structure, forged.index):
        if name in document["entries"]:
            return document["entries"][name]
    raise AssertionError(f"no entry {name}")


def _stream(forged: Forgery, name: str) -> Any:
    return _entry(forged, "g")["tree"][name]["$generator"][1]


def _draw(stream: Any) -> None:
    for _ in range(3):
        stream.integers(0, 10, 700) if hasattr(stream, "integers") else stream.randint(0, 10, 700)


POSITIONS = [-1, -(10**7), -99999999, 625, 10**9, 2**31 - 1, -(2**31), 2**70, "x", None]


def _put_position(forged: Forgery, name: str, position: Any) -> None:
    state = _stream(forged, name)
    holder = state["state"] if name in ("legacy", "mt") else state
    key = "pos" if name in ("legacy", "mt") else "buffer_pos"
    assert key in holder
    holder[key] = {"$int": hex(position)} if isinstance(position, int) else position


@pytest.mark.parametrize("position", POSITIONS, ids=repr)
@pytest.mark.parametrize("name", ["legacy", "mt", "philox"])
def test_a_stream_does_not_read_outside_of_its_memory(
    name: str, position: Any, forged: Forgery
) -> None:
    """Refused when it is read; if it were not, drawing from it would tell."""
    _put_position(forged, name, position)
    forged.sign()

    def read() -> None:
        _draw(waypost.open(str(forged.root)).state_dict("g")[name])

    assert _kind(bounded(_attempt(read))) == "refused"


@pytest.mark.parametrize("position", [-1, 5, 10**6, -99999999])
def test_a_counter_stream_has_four_places(position: int, forged: Forgery) -> None:
    """A position that another kind of stream may have is out of this one."""
    _put_position(forged, "philox", position)
    forged.sign()

    def read() -> None:
        _draw(waypost.open(str(forged.root)).state_dict("g")["philox"])

    assert _kind(bounded(_attempt(read))) == "refused"


SHORT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "key of the legacy stream": ("legacy", lambda state: state["state"].update(key=[1])),
    "key as a tuple": ("legacy", lambda state: state["state"].update(key={"$tuple": [1] * 3})),
    "key of a stream": ("mt", lambda state: state["state"].update(key=[])),
    "counter": ("philox", lambda state: state["state"].update(counter=[1])),
    "key of a counter stream": ("philox", lambda state: state["state"].update(key=[1])),
    "buffer": ("philox", lambda state: state.update(buffer=[1])),
    "no buffer": ("philox", lambda state: state.pop("buffer")),
    "flag": ("philox", lambda state: state.update(has_uint32=7)),
    "negative flag": ("pcg", lambda state: state.update(has_uint32=-1)),
    "text for a number": ("pcg", lambda state: state["state"].update(state="x")),
    "no state": ("pcg", lambda state: state.pop("state")),
    "state of another": ("pcg", lambda state: state.update(bit_generator="MT19937")),
    "no dict": ("sfc", lambda state: state.update(state=5)),
}


@pytest.mark.parametrize(("name", "change"), SHORT.values(), ids=SHORT)
def test_a_stream_of_the_wrong_size_is_refused(name: str, change: Any, forged: Forgery) -> None:
    """Too short, of another kind, or not a stream at all."""
    change(_stream(forged, name))
    forged.sign()

    def read() -> None:
        _draw(waypost.open(str(forged.root)).state_dict("g")[name])

    assert _kind(bounded(_attempt(read))) == "refused"


@pytest.mark.parametrize("position", [-(10**7), -1, 625, 10**9])
@pytest.mark.parametrize("into", ["the program's streams", "a stream of the target"])
def test_a_stream_that_is_set_is_checked_too(into: str, position: int, forged: Forgery) -> None:
    """Loaded into numpy's own stream or one of the user's: refused, and the next draw is safe."""
    if into == "the program's streams":
        _entry(forged, "rng")["tree"]["numpy"]["state"]["pos"] = position
        target: dict[str, Any] = {"rng": waypost.RNG()}
    else:
        _entry(forged, "g")["tree"] = _entry(forged, "g")["tree"]["legacy"]
        _entry(forged, "g")["tree"]["$generator"][1]["state"]["pos"] = position
        target = {"g": np.random.RandomState(0)}
    forged.sign()

    def load() -> None:
        try:
            waypost.load(str(forged.root), target)
        finally:
            np.random.randint(0, 10, 700)
            _draw(target.get("g", np.random.RandomState(0)))

    assert _kind(bounded(_attempt(load))) == "refused"


NODES: dict[str, Any] = {
    "device": {"$device": "bogus"},
    "device number": {"$device": "cuda:99999999999"},
    "device list": {"$device": ["cuda", 1]},
    "dtype": {"$dtype": "_inductor"},
    "dtype function": {"$dtype": "load"},
    "dtype number": {"$dtype": 3},
    "layout": {"$layout": "strided.x"},
    "torch generator": {"$generator": ["torch:bogus", {"device": "cpu", "state": 1}]},
    "meta generator": {"$generator": ["torch:meta", {"device": "cpu", "state": 1}]},
    "absent generator": {"$generator": ["torch:xpu:7", {"device": "xpu:7", "state": 1}]},
    "generator state": {"$generator": ["torch:cpu", {"device": "cpu", "state": 1}]},
    "python stream": {"$generator": ["python", {"version": 3, "state": [1], "gauss": None}]},
    "generator alone": {"$generator": ["python"]},
    "complex": {"$complex": "00"},
    "complex odd": {"$complex": "0"},
    "nan": {"$float": "nan:00"},
    "nan text": {"$float": "nan:xyz"},
    "float": {"$float": "x"},
    "zone": {"$timezone": ["zone", "a" * 5000]},
    "zone folder": {"$timezone": ["zone", "America"]},
    "zone outside": {"$timezone": ["zone", "../../../etc/passwd"]},
    "zone nul": {"$timezone": ["zone", "a\0b"]},
    "zone surrogate": {"$timezone": ["zone", "\udcff"]},
    "zone offset": {"$timezone": ["fixed", [99, 0, 0], None]},
    "time difference": {"$timedelta": [10**12, 0, 0]},
    "date": {"$date": "9999-99-99"},
    "numpy dtype call": {"$numpy_dtype": "(1,((((i4"},
    "numpy dtype dict": {"$numpy_dtype": "{'names':1}"},
    "numpy dtype brackets": {"$numpy_dtype": "(1," + "(" * 1000 + "i4"},
    "numpy dtype spaces": {"$numpy_dtype": "(" + " " * 20000 + "1" + " " * 20000 + "x"},
    "numpy dtype number": {"$numpy_dtype": 5},
    "numpy dtype fields": {"$numpy_dtype": [["a"]]},
    "numpy objects": {"$numpy": ["O", "AAAAAAAAAAA="]},
    "numpy objects within": {"$numpy": [[["a", "O"]], "AAAAAAAAAAA="]},
    "numpy text type": {"$numpy": ["T", "AAAAAAAAAAAAAAAAAAAAAA=="]},
    "numpy scalar": {"$numpy": ["S2000000000", ""]},
    "range": {"$range": [0, 5, 0]},
    "range of floats": {"$range": [0.5, 2]},
    "deque": {"$deque": [-1, [1]]},
    "deque length": {"$deque": [2**70, [1]]},
    "size": {"$size": ["x"]},
    "set of lists": {"$set": [[1]]},
    "key list": {"$dict": [[[1], 2]]},
    "pair of three": {"$dict": [[1, 2, 3]]},
    "slice of four": {"$slice": [1, 2, 3, 4]},
    "enum": {"$enum": ["re:RegexFlag", "x"]},
    "enum class list": {"$enum": [[1], 1]},
    "registered": {"$registered": [[1], 1]},
    "dataclass": {"$dataclass": ["torch:nn.Module", {}]},
    "namedtuple": {"$namedtuple": ["os:stat_result", {}]},
    "decimal": {"$decimal": "x"},
    "fraction": {"$fraction": ["0x1", "0x0"]},
    "uuid": {"$uuid": "x"},
    "bytes": {"$bytes": "!!"},
    "unknown": {"$zzz": 1},
}


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_a_value_that_is_none_is_refused_in_waypost_own_words(node: Any, forged: Forgery) -> None:
    """Read alone or with others; the message names the leaf or its entry."""
    _entry(forged, "x")["tree"]["v"] = copy.deepcopy(node)
    forged.sign()

    def read() -> None:
        waypost.open(str(forged.root)).state_dict("x")

    outcome = bounded(_attempt(read))
    assert _kind(outcome) == "refused"
    assert outcome.expect_result()[1].startswith(("x/v", "x:"))

    def load() -> None:
        waypost.load(str(forged.root), {"x": {"v": 0}, "model": {"w": torch.zeros(3)}})

    assert _kind(bounded(_attempt(load))) == "refused"


@pytest.mark.parametrize("key", ["device", "nan", "zone folder", "complex"])
def test_a_bad_value_below_others_is_refused(key: str, forged: Forgery) -> None:
    """In a list, a tuple, a key and a set."""
    for tree in (
        {"v": [1, [NODES[key]]]},
        {"v": {"$tuple": [NODES[key]]}},
        {"v": {"$dict": [[NODES[key], 1]]}},
        {"v": {"$set": [NODES[key]]}},
    ):
        _entry(forged, "x")["tree"] = copy.deepcopy(tree)
        forged.sign()
        read = _attempt(lambda: waypost.open(str(forged.root)).state_dict("x"))
        assert _kind(bounded(read)) == "refused"


def test_sound_streams_are_accepted(forged: Forgery) -> None:
    """What is refused above is refused for what was changed."""
    forged.sign()
    for stream in waypost.open(str(forged.root)).state_dict("g").values():
        _draw(stream)


GLOB_SECONDS_MAX = 5
GLOBS = ["**/" * 9 + "x", "a*a*a*a*a*a*a*b", "**" * 12 + "b", "*a" * 12, "**/a/" * 4 + "b"]


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_with_many_stars_ends_soon(glob: str) -> None:
    """However the path is made."""
    state: Any = {"x": torch.ones(1)}
    for _ in range(60):
        state = {"a": state}
    url = "memory://globs/snap"
    waypost.save(url, {"a": state, "a" * 80: {"x": 1}}, overwrite=True)

    def match() -> None:
        list(waypost.open(url).leaves(glob))

    assert _kind(bounded(_attempt(match), seconds=GLOB_SECONDS_MAX)) == "accepted"


def test_a_glob_that_crosses_too_often_is_refused() -> None:
    """More than four `**` would try too many ways; that is said at once."""
    url = "memory://globs/crossing"
    waypost.save(url, {"x": torch.ones(1)}, overwrite=True)
    with pytest.raises(ValueError, match="more than 4"):
        waypost.open(url).leaves("**/a/" * 9 + "b")


@pytest.mark.parametrize("glob", ["m[!a]x", "m[^a]x", "m[.-0]x"])
def test_a_set_in_a_glob_does_not_match_a_slash(glob: str) -> None:
    """It stands for one sign of one segment."""
    url = "memory://globs/slash"
    waypost.save(url, {"m": {"x": torch.ones(1)}}, overwrite=True)
    assert list(waypost.open(url).leaves(glob)) == []
