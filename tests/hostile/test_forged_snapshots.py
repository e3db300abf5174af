"""Manifests, indexes and headers that lie, with all digests right: refused, in bounded memory.

The writer of a snapshot may be anybody. Whatever the documents say, reading them never leaves the
snapshot's own folder, never runs code, never takes more memory than the files are worth, and never
ends in anything but the saved numbers or an error of Waypost.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same
from _kit.forgery import Forgery, bounded, header_of, replace_header

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory limits need /proc"
)

REFUSED = (waypost.FormatError, waypost.CorruptionError)


def _state() -> dict[str, Any]:
    tensor = torch.arange(6.0)
    return {
        "model": {"w": tensor, "tied": tensor, "view": tensor[1:4], "n": torch.arange(3)},
        "loop": {"epoch": 3, "log": [(1, 2.5), {"x": None}]},
    }


def _read(url: Path) -> dict[str, Any]:
    snapshot = waypost.open(str(url))
    report = snapshot.verify()
    if not report.ok:
        raise waypost.CorruptionError(str(report.problems))
    return {entry: snapshot.state_dict(entry) for entry in snapshot.entries}


def _load(url: Path) -> dict[str, Any]:
    into: dict[str, Any] = {
        "model": {
            "w": torch.zeros(6),
            "tied": torch.zeros(6),
            "view": torch.zeros(3),
            "n": torch.zeros(3, dtype=torch.int64),
        },
        "loop": {"epoch": 0, "log": []},
    }
    waypost.load(str(url), into)
    return into


def _is_refused(url: Path) -> str:
    """What opening, verifying, reading and loading say; each must refuse, in bounds."""

    def attempt() -> str:
        said = []
        for action in (_read, _load):
            try:
                action(url)
            except waypost.WaypostError as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                raise AssertionError(f"{action.__name__} accepted it")
        return "\n".join(said)

    said = bounded(attempt).expect_result()
    assert len(said) < 20_000, "the message repeats the attack"
    return said


@pytest.fixture
def forged(tmp_path: Path) -> Forgery:
    """A sound snapshot, ready to be forged."""
    url = tmp_path / "run" / "step-000000001"
    waypost.save(str(url), _state(), step=1)
    return Forgery(url)


def test_a_snapshot_signed_again_without_a_lie_is_accepted(forged: Forgery) -> None:
    """The forger's digests are right: what is refused below is refused for its meaning."""
    content = (forged.root / "manifest.json").read_bytes()
    forged.sign(documents=False)
    assert (forged.root / "manifest.json").read_bytes() == content
    forged.sign_file(0)
    forged.sign()
    assert_same(_read(forged.root), _state())


PATHS = [
    "../outside",
    "../../outside",
    "data/../../outside",
    "/etc/passwd",
    "//etc/passwd",
    "~/outside",
    "file:///etc/passwd",
    "..\\outside",
    "C:\\outside",
    "",
    ".",
    "..",
    "a\0b",
    "data",
    "manifest.json",
    "./data/x",
    "x" * 5000,
    5,
    None,
    ["data"],
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path)[:30])
@pytest.mark.parametrize("which", ["structure", "index", "file"])
def test_a_path_that_leaves_the_snapshot_is_refused(which: str, path: Any, forged: Forgery) -> None:
    """Also when a file with the right content and digest lies where the path leads."""
    source = forged.data / forged.index["files"][0]["name"] if which == "file" else None
    source = source or forged._path(which)
    content = source.read_bytes()
    for folder in (forged.root.parent, forged.root.parent.parent, forged.data.parent):
        (folder / "outside").write_bytes(content)
    if which == "file":
        forged.index["files"][0]["name"] = path
    forged.sign()
    if which != "file":
        forged._record(which)["path"] = path
    forged.write_manifest(forged.manifest)
    _is_refused(forged.root)


@pytest.mark.parametrize("target", ["file", "data_dir", "structure", "index"])
def test_a_symlink_out_of_the_snapshot_is_refused(
    target: str, forged: Forgery, tmp_path: Path
) -> None:
    """A file of the snapshot that is a link to a valid copy elsewhere is not followed."""
    path = {
        "file": forged.data / forged.index["files"][0]["name"],
        "data_dir": forged.data,
        "structure": forged._path("structure"),
        "index": forged._path("index"),
    }[target]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    _is_refused(forged.root)


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
@pytest.mark.parametrize("target", ["manifest", "structure", "index", "file"])
def test_a_special_file_neither_blocks_nor_fills_memory(
    target: str, kind: str, forged: Forgery
) -> None:
    """A FIFO, an endless device or a folder in place of a file ends in an error, soon."""
    path = {
        "manifest": forged.root / "manifest.json",
        "structure": forged._path("structure"),
        "index": forged._path("index"),
        "file": forged.data / forged.index["files"][0]["name"],
    }[target]
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    _is_refused(forged.root)


def test_an_endless_manifest_is_refused_by_its_size(forged: Forgery) -> None:
    """100 GB of nothing (a sparse file) is not read into memory, for any document."""
    for path in (forged.root / "manifest.json", forged._path("structure"), forged._path("index")):
        content = path.read_bytes()
        os.truncate(path, 100 << 30)
        _is_refused(forged.root)
        path.write_bytes(content)
    assert_same(_read(forged.root), _state())


def _headers(header: dict[str, Any], size: int) -> Iterator[tuple[str, bytes]]:
    w = header["w"]

    def changed(**entry: Any) -> bytes:
        return json.dumps({**header, "w": {**w, **entry}}).encode()

    yield "overlap", changed(data_offsets=header["n"]["data_offsets"])
    yield "negative", changed(data_offsets=[-24, 0])
    yield "reversed", changed(data_offsets=w["data_offsets"][::-1])
    yield "outside", changed(data_offsets=[size, size + 24])
    yield "huge", changed(data_offsets=[0, 2**63])
    yield "beyond_64_bits", changed(data_offsets=[0, 2**200])
    yield "float", changed(data_offsets=[0.0, 24.0])
    yield "shape", changed(shape=[7])
    yield "shape_huge", changed(shape=[2**40, 2**40])
    yield "shape_negative", changed(shape=[-6])
    yield "dtype", changed(dtype="F64")
    yield "dtype_unknown", changed(dtype="X7")
    yield "missing", json.dumps({k: v for k, v in header.items() if k != "w"}).encode()
    yield "extra", json.dumps({**header, "more": w}).encode()
    yield "list", b"[]"
    yield "empty", b""
    yield "duplicate", json.dumps(header).encode()[:-1] + b',"w":' + json.dumps(w).encode() + b"}"
    yield "nul", b"\0" * 100
    yield "not_utf8", b'{"\xff": 1}'


HEADERS = [
    name for name, _ in _headers({"w": {"data_offsets": [0, 0]}, "n": {"data_offsets": 0}}, 0)
]


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_that_lies_is_refused(lie: str, forged: Forgery) -> None:
    """Overlapping, negative, reversed, outside: refused by `verify` and by `load`."""
    file = forged.data / forged.index["files"][0]["name"]
    size = file.stat().st_size - forged.index["files"][0]["data_start"]
    replace_header(file, dict(_headers(header_of(file), size))[lie])
    forged.sign_file(0)
    forged.sign()
    _is_refused(forged.root)


@pytest.mark.parametrize("length", [0, 1, 2**32, 2**63 - 1, 2**64 - 1, 5000, 4000])
def test_a_header_length_that_lies_is_refused(length: int, forged: Forgery) -> None:
    """No allocation of what the first eight bytes claim."""
    file = forged.data / forged.index["files"][0]["name"]
    replace_header(file, json.dumps(header_of(file)).encode(), length=length)
    forged.sign_file(0)
    forged.sign()
    _is_refused(forged.root)


def _set(path: str, value: Any) -> Callable[[Forgery], None]:
    """A change of one place in one document: "index/files/0/bytes"."""
    which, *steps, last = path.split("/")

    def change(forged: Forgery) -> None:
        node = getattr(forged, which)
        for step in steps:
            node = node[int(step) if isinstance(node, list) else step]
        node[int(last) if isinstance(node, list) else last] = value

    return change


LIES: dict[str, Callable[[Forgery], None]] = {
    "version_next": _set("manifest/version", 2),
    "version_text": _set("manifest/version", "1"),
    "version_bool": _set("manifest/version", True),
    "format": _set("manifest/format", "other"),
    "required_feature": _set("manifest/required", ["teleportation"]),
    "step_negative": _set("manifest/step", -1),
    "step_huge": _set("manifest/step", 2**63),
    "step_float": _set("manifest/step", 1.0),
    "world_size": _set("manifest/world_size", 10**9),
    "world_zero": _set("manifest/world_size", 0),
    "no_index": _set("manifest/indexes", []),
    "many_indexes": lambda forged: forged.manifest.update(indexes=forged.manifest["indexes"] * 2),
    "structure_bytes": lambda forged: forged.manifest["structure"].update(bytes=1),
    "attempt": _set("manifest/attempt", "../../x"),
    "chunk_zero": _set("index/chunk_bytes", 0),
    "chunk_negative": _set("index/chunk_bytes", -1),
    "chunk_huge": _set("index/chunk_bytes", 2**62),
    "algorithm": _set("index/algorithm", "crc32"),
    "rank": _set("index/rank", 7),
    "file_bytes": _set("index/files/0/bytes", 2**62),
    "file_start": _set("index/files/0/data_start", 0),
    "file_start_negative": _set("index/files/0/data_start", -4096),
    "file_start_outside": _set("index/files/0/data_start", 2**40),
    "file_twice": lambda forged: forged.index["files"].append(forged.index["files"][0]),
    "file_entry": _set("index/files/0/entry", "nobody"),
    "file_gone": _set("index/files", []),
    "chunks_short": _set("index/files/0/chunks", ""),
    "chunks_text": _set("index/files/0/chunks", "not base64!"),
    "chunks_long": _set("index/files/0/chunks", "A" * 10**6),
    "digest_wrong": _set("index/files/0/digest", "xxh3-128:" + "0" * 32),
    "digest_short": _set("index/files/0/digest", "xxh3-128:00"),
    "digest_none": _set("index/files/0/digest", None),
    "header_wrong": _set("index/files/0/header", "xxh3-128:" + "0" * 32),
    "shape_claim": _set("structure/entries/model/tree/w", {"$tensor": "F32[1000000000000]"}),
    "shape_overflow": _set(
        "structure/entries/model/tree/w", {"$tensor": "F32[4294967296,4294967296,4294967296]"}
    ),
    "shape_negative": _set("structure/entries/model/tree/w", {"$tensor": "F32[-6]"}),
    "shape_text": _set("structure/entries/model/tree/w", {"$tensor": "F32[6"}),
    "dtype_unknown": _set("structure/entries/model/tree/w", {"$tensor": "X9[6]"}),
    "dtype_other": _set("structure/entries/model/tree/w", {"$tensor": "I32[6]"}),
    "tensor_list": _set("structure/entries/model/tree/w", {"$tensor": ["F32", [6]]}),
    "tag_unknown": _set("structure/entries/loop/tree/epoch", {"$frobnicate": 1}),
    "class_os": _set("structure/entries/loop/tree/epoch", {"$enum": ["os.system", "x"]}),
    "kind": _set("structure/entries/model/kind", "teapot"),
    "scope": _set("structure/entries/model/scope", "everywhere"),
    "entry_gone": lambda forged: forged.structure["entries"].pop("model"),
    "alias_itself": _set(
        "structure/entries/model/tree/tied",
        {"$tensor": {"type": "F32[6]", "alias": "model/tied", "same": True}},
    ),
    "alias_nobody": _set(
        "structure/entries/model/tree/tied",
        {"$tensor": {"type": "F32[6]", "alias": "model/nobody", "same": True}},
    ),
    "alias_larger": _set(
        "structure/entries/model/tree/tied",
        {"$tensor": {"type": "F32[600]", "alias": "model/w", "same": True}},
    ),
    "view_outside": _set(
        "structure/entries/model/tree/view",
        {"$tensor": {"type": "F32[3]", "alias": "model/w", "offset": 16, "stride": [1]}},
    ),
    "view_negative": _set(
        "structure/entries/model/tree/view",
        {"$tensor": {"type": "F32[3]", "alias": "model/w", "offset": -4, "stride": [1]}},
    ),
    "view_stride": _set(
        "structure/entries/model/tree/view",
        {"$tensor": {"type": "F32[3]", "alias": "model/w", "offset": 0, "stride": [10**12]}},
    ),
    "view_stride_negative": _set(
        "structure/entries/model/tree/view",
        {"$tensor": {"type": "F32[3]", "alias": "model/w", "offset": 20, "stride": [-1]}},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_document_that_lies_is_refused(lie: str, forged: Forgery) -> None:
    """Each lie is refused by `verify` or `open`, and by `load`; nothing is allocated for it."""
    LIES[lie](forged)
    if lie == "structure_bytes":
        forged.write_manifest(forged.manifest)
    else:
        forged.sign()
    _is_refused(forged.root)


def test_two_aliases_of_each_other_are_refused(forged: Forgery) -> None:
    """A circle of ties has no bytes behind it."""
    tree = forged.structure["entries"]["model"]["tree"]
    for name, other in (("w", "tied"), ("tied", "w")):
        tree[name] = {"$tensor": {"type": "F32[6]", "alias": f"model/{other}", "same": True}}
    forged.sign()
    _is_refused(forged.root)


@pytest.mark.parametrize("which", ["structure", "index", "manifest"])
def test_duplicate_keys_are_refused(which: str, forged: Forgery) -> None:
    """Two values for one key: readers would disagree on which one counts."""
    forged.sign()
    if which == "manifest":
        forged.write_manifest(forged.manifest, ' "step": 99,\n')
    else:
        content = forged._path(which).read_bytes()
        key = b'"entries":' if which == "structure" else b'"rank":'
        value = b"{}" if which == "structure" else b"0"
        forged.write(which, content[:-1] + b"," + key + value + b"}")
        forged.write_manifest(forged.manifest)
    _is_refused(forged.root)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1_000, 100_000, 5_000_000])
@pytest.mark.parametrize("which", ["structure", "index"])
def test_deep_nesting_is_refused(which: str, depth: int, forged: Forgery) -> None:
    """Depth that would end a recursive parser ends in an error of Waypost."""
    document = json.dumps(getattr(forged, which), separators=(",", ":"))
    nest = "[" * depth + "]" * depth
    spot = '"tree":{' if which == "structure" else '"files":['
    bomb = f'"$":{nest},' if which == "structure" else f"{nest},"
    assert spot in document
    forged.write(which, document.replace(spot, spot + bomb, 1).encode())
    forged.write_manifest(forged.manifest)
    _is_refused(forged.root)


@pytest.mark.slow
@pytest.mark.parametrize("count", [30_000])
def test_a_leaf_table_that_is_too_long_is_bounded(count: int, forged: Forgery) -> None:
    """Leaves that no file holds: refused without more memory than they are worth."""
    leaves = ",".join(f'"l{number}":{{"$tensor":"F32[6]"}}' for number in range(count))
    document = json.dumps(forged.structure, separators=(",", ":"))
    spot = '"tree":{"w"'
    assert spot in document
    forged.write("structure", document.replace(spot, f'"tree":{{{leaves},"w"', 1).encode())
    forged.write_manifest(forged.manifest)
    _is_refused(forged.root)


def test_a_billion_claimed_leaves_are_only_a_claim(forged: Forgery) -> None:
    """10^9 tensors and 2^62 bytes in the manifest: refused, or nothing is allocated for them."""
    forged.manifest["entries"]["model"].update(tensors=10**9, bytes=2**62)
    forged.manifest["bytes"] = 2**62
    forged.sign()

    def attempt() -> bool:
        try:
            found = _read(forged.root)
        except waypost.WaypostError:
            return True
        assert_same(found, _state())
        return False

    assert bounded(attempt).expect_result() in (True, False)
