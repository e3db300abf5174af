"""A second reader, written from docs/spec/format-v1.md alone: it imports nothing of Waypost.

Each check names the section it is from. What it accepts and what the library writes must agree.
"""

import base64
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

V1 = Path(__file__).parent / "v1"
SNAPSHOTS = sorted(path.parent for path in V1.rglob("manifest.json"))

DIGEST_BYTES = {"xxh3-128": 16, "blake3": 32}
STORED = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
    "F8_E8M0": 1,
}
FOREIGN = {
    "complex32": ("F16", 2),
    "complex128": ("F64", 2),
    "float4_e2m1fn_x2": ("U8", 1),
    **{f"{sign}int{bits}": ("U8", 1) for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(["bits8", "bits1x8", "bits2x4", "bits4x2"], ("U8", 1)),
    "bits16": ("U8", 2),
}
TAGS = {
    *("int", "float", "complex", "bytes", "bytearray", "ellipsis", "range", "slice"),
    *("tuple", "dict", "odict", "defaultdict", "counter", "set", "frozenset", "deque"),
    *("decimal", "fraction", "uuid", "date", "time", "datetime", "timedelta", "timezone", "path"),
    *("namedtuple", "dataclass", "enum", "registered", "pickle"),
    *("size", "dtype", "layout", "memory_format", "device", "tensor", "generator"),
    *("numpy", "numpy_dtype", "ndarray"),
}


def digest(algorithm: str, data: bytes) -> bytes:
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128_digest(data)
    blake3 = pytest.importorskip("blake3")
    return bytes(blake3.blake3(data).digest())


def digest_text(algorithm: str, data: bytes) -> str:
    return f"{algorithm}:{digest(algorithm, data).hex()}"


def strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "documents: duplicate keys"
    return dict(pairs)


def parse(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"), object_pairs_hook=strict)


def manifest_of(snapshot: Path) -> dict[str, Any]:
    """Section "Manifest": the tail, then the fields."""
    data = (snapshot / "manifest.json").read_bytes()
    found = re.search(rb',\n "digest": "([a-z0-9-]+):([0-9a-f]+)"\n}\n\Z', data)
    assert found
    algorithm = found[1].decode()
    assert digest(algorithm, data[: found.start()]).hex().encode() == found[2]
    manifest = parse(data)
    assert list(manifest)[-1] == "digest"
    assert (manifest["format"], manifest["version"]) == ("waypost", 1)
    assert set(manifest["required"]) <= {"pickle"}
    assert manifest["optional"] == []
    assert re.fullmatch(r"a[0-9a-f]{16}", manifest["attempt"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", manifest["created"])
    assert manifest["world_size"] == len(manifest["indexes"]) == 1
    return manifest


def document_of(snapshot: Path, record: dict[str, Any]) -> Any:
    """Section "Reading", step 4."""
    data = (snapshot / record["path"]).read_bytes()
    assert len(data) == record["bytes"]
    assert digest_text(record["digest"].partition(":")[0], data) == record["digest"]
    return parse(data)


def items_of(path: Path, file: dict[str, Any], index: dict[str, Any]) -> dict[str, Any]:
    """Sections "Rank index", "Digests" and "Data files": one file, whole."""
    data, start, algorithm = path.read_bytes(), file["data_start"], index["algorithm"]
    assert len(data) == file["bytes"]
    assert struct.unpack("<Q", data[:8])[0] + 8 == start
    assert start % 4096 == 0
    header = digest(algorithm, data[:start])
    assert file["header"] == f"{algorithm}:{header.hex()}"
    body, size = data[start:], index["chunk_bytes"]
    chunks = [digest(algorithm, body[at : at + size]) for at in range(0, len(body), size)]
    assert base64.b64decode(file["chunks"]) == b"".join(chunks)
    assert all(len(chunk) == DIGEST_BYTES[algorithm] for chunk in chunks)
    assert file["digest"] == digest_text(algorithm, header + b"".join(chunks))
    assert data[8:start].rstrip(b" ").endswith(b"}")
    items = parse(data[8:start])
    assert items.pop("__metadata__")["format"] == "pt"
    position = 0
    for item in sorted(items.values(), key=lambda item: item["data_offsets"]):
        begin, end = item["data_offsets"]
        assert begin == position
        assert end - begin == math.prod(item["shape"]) * STORED[item["dtype"]]
        assert begin % STORED[item["dtype"]] == 0, "elements are aligned to their own size"
        position = end
    assert position == len(body)
    return items


def pieces_of(node: Any, path: str, found: dict[str, str], aliases: dict[str, str]) -> None:
    """Sections "Leaf paths", "Value nodes" and "Tensor nodes": the pieces that a tree names."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            pieces_of(item, f"{path}/{number}", found, aliases)
    if not isinstance(node, dict):
        return
    tag = next(iter(node), "")
    if len(node) != 1 or not tag.startswith("$"):
        pairs_of(node, path, found, aliases)
        return
    assert tag[1:] in TAGS
    payload = node[tag]
    if tag == "$tensor":
        tensor_pieces(payload, path, found, aliases)
    elif tag == "$ndarray":
        tensor_pieces(payload["tensor"]["$tensor"], path, found, aliases)
    elif tag in ("$dict", "$odict", "$counter"):
        pairs_of(payload, path, found, aliases)
    elif tag in ("$defaultdict", "$namedtuple", "$dataclass"):
        pairs_of(payload[1], path, found, aliases)
    elif tag == "$tuple":
        pieces_of(payload, path, found, aliases)
    elif tag in ("$deque", "$generator", "$registered"):
        pieces_of(payload[1], path, found, aliases)


def pairs_of(pairs: Any, path: str, found: dict[str, str], aliases: dict[str, str]) -> None:
    for key, node in pairs.items() if isinstance(pairs, dict) else pairs:
        pieces_of(node, f"{path}/{segment(key)}", found, aliases)


def tensor_pieces(node: Any, path: str, found: dict[str, str], aliases: dict[str, str]) -> None:
    if isinstance(node, str):
        found[path] = node
    elif "alias" in node:
        aliases[path] = node["alias"]
    elif "parts" in node:
        for name, part in node["parts"].items():
            tensor_pieces(part["$tensor"], f"{path}/~:{name}", found, aliases)
    else:
        found[path] = node["type"]


def segment(key: Any) -> str:
    """Section "Leaf paths", rules 1 to 4."""
    text = (
        key if isinstance(key, str) else json.dumps(key, ensure_ascii=False, separators=(",", ":"))
    )
    if key == "" or key == "__metadata__":
        return "%" if key == "" else "%5F_metadata__"
    escaped = re.sub(
        r"[%/\x00-\x1f\x7f\ud800-\udfff]",
        lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")),
        text,
    )
    if not isinstance(key, str):
        return "~" + escaped
    return "%7E" + escaped[1:] if escaped.startswith("~") else escaped


def stored_form(type_text: str) -> tuple[str, list[int]]:
    """Section "Tensor types"."""
    name, _, sizes = type_text.removesuffix("]").partition("[")
    shape = [int(size) for size in sizes.split(",") if size]
    if name in STORED:
        return name, shape
    stored, last = FOREIGN[name]
    return stored, [*shape, last]


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda path: path.name)
def test_the_specification_reads_what_the_library_wrote(snapshot: Path) -> None:
    manifest = manifest_of(snapshot)
    structure = document_of(snapshot, manifest["structure"])
    (index,) = [document_of(snapshot, record) for record in manifest["indexes"]]
    assert index["rank"] == 0
    entries = {**structure["entries"], **index["entries"]}
    assert set(entries) == set(manifest["entries"])
    assert all(
        (each["scope"] == "per_rank") == (name in index["entries"])
        for name, each in entries.items()
    )

    stored: dict[str, Any] = {}
    folder = snapshot / "data" / manifest["attempt"]
    for file in index["files"]:
        for key, item in items_of(folder / file["name"], file, index).items():
            path = file["entry"] if key == file["entry"] else f"{file['entry']}/{key}"
            stored[path] = (item["dtype"], item["shape"])
    named = {path.name for path in folder.iterdir()} - {"structure.json", "r00000.index.json"}
    assert named == {file["name"] for file in index["files"]}
    assert manifest["bytes"] == sum(file["bytes"] - file["data_start"] for file in index["files"])

    pieces: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for name, entry in entries.items():
        pieces_of(entry["tree"], segment(name), pieces, aliases)
    assert {path: stored_form(text) for path, text in pieces.items()} == {
        path: item for path, item in stored.items() if "/~:storage" not in path
    }
    assert set(aliases.values()) <= set(stored)
