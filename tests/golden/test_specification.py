"""A second reader, written from docs/spec/format-v1.md alone: it imports nothing of Waypost.

Each check names the section it is from. What it accepts and what the library writes must agree.
"""

import base64
import itertools
import json
import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import xxhash

V1 = Path(__file__).parent / "v1"
PAGE = Path(__file__).parents[2] / "docs" / "spec" / "format-v1.md"
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
    *("numpy", "numpy_dtype", "ndarray", "per_rank"),
}

Box = tuple[tuple[int, int], ...]
Nodes = dict[str, dict[str, Any]]


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
    assert manifest["world_size"] == len(manifest["indexes"]) >= 1
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


def pieces_of(node: Any, path: str, found: Nodes, aliases: dict[str, str]) -> None:
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


def pairs_of(pairs: Any, path: str, found: Nodes, aliases: dict[str, str]) -> None:
    for key, node in pairs.items() if isinstance(pairs, dict) else pairs:
        pieces_of(node, f"{path}/{segment(key)}", found, aliases)


def tensor_pieces(node: Any, path: str, found: Nodes, aliases: dict[str, str]) -> None:
    if isinstance(node, str):
        found[path] = {"type": node}
    elif "alias" in node:
        aliases[path] = node["alias"]
    elif "parts" in node:
        for name, part in node["parts"].items():
            tensor_pieces(part["$tensor"], f"{path}/~:{name}", found, aliases)
    else:
        found[path] = node


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


def ranks_of(text: str) -> list[int]:
    """Section "Sharding": the ranks, in the order of the mesh."""
    found: list[int] = []
    for run in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:\+(\d+))?)?", run)
        assert match
        first = int(match[1])
        found += range(first, int(match[2] or first) + 1, int(match[3] or 1))
    assert len(set(found)) == len(found)
    return found


def box_of(text: str) -> Box:
    pairs = [tuple(map(int, pair.split(":"))) for pair in text.split(",") if pair]
    return tuple((start, stop) for start, stop in pairs)


def boxes_of(sharding: str, shape: list[int]) -> dict[int, list[Box]]:
    """Section "Sharding": what each rank holds."""
    first, middle, last = sharding.split("/")
    ranks = ranks_of(first)
    if middle == "=":
        held = [[box_of(box) for box in each.split("+") if box] for each in last.split(";")]
        return dict(zip(ranks, held, strict=True))
    mesh, placements = [int(size) for size in middle.split("x")], last.split(",")
    assert math.prod(mesh) == len(ranks)
    coordinates = itertools.product(*map(range, mesh))
    return {
        rank: held_at(coordinate, mesh, placements, shape)
        for rank, coordinate in zip(ranks, coordinates, strict=True)
    }


def held_at(
    coordinate: Iterable[int], mesh: list[int], placements: list[str], shape: list[int]
) -> list[Box]:
    indexes = [list(range(size)) for size in shape]
    for index, size, placement in zip(coordinate, mesh, placements, strict=True):
        match = re.fullmatch(r"R|S(\d+)(?:\*(\d+))?", placement)
        assert match
        if match[1] is not None:
            dimension = int(match[1])
            groups = chunks(indexes[dimension], int(match[2] or 1))
            indexes[dimension] = [i for group in groups for i in chunks(group, size)[index]]
    return list(itertools.product(*map(runs, indexes)))


def chunks(items: list[int], count: int) -> list[list[int]]:
    length = -(-len(items) // count)
    return [items[number * length : (number + 1) * length] for number in range(count)]


def runs(items: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for item in items:
        begin = found.pop()[0] if found and found[-1][1] == item else item
        found.append((begin, item + 1))
    return found


def part_of(key: str, shape: list[int]) -> tuple[str, Box, range, bool]:
    """Section "Parts": the leaf's key, the box, the range of its elements, whether it is all."""
    match = re.fullmatch(r"(.*)/~@([0-9:,]*)(?:@(\d+):(\d+))?", key, re.DOTALL)
    if match is None:
        box = tuple((0, size) for size in shape)
        return key, box, range(math.prod(shape)), True
    box = box_of(match[2])
    count = math.prod(stop - start for start, stop in box)
    if match[3] is None:
        return match[1], box, range(count), True
    return match[1], box, range(int(match[3]), int(match[4])), False


def elements(box: Box, part: range, shape: list[int]) -> list[int]:
    """The numbers, in the whole tensor's row-major order, of the elements of a part."""
    found = []
    for place in itertools.islice(
        itertools.product(*(range(*pair) for pair in box)), part.start, part.stop
    ):
        number = 0
        for index, size in zip(place, shape, strict=True):
            number = number * size + index
        found.append(number)
    return found


def writers(cuts: list[list[Any]], path: str) -> set[int]:
    """Section "Structure": who wrote a piece that all ranks hold alike."""
    inside = [cut for cut in cuts if cut[0] == path]
    before = [cut for cut in cuts if cut[0] < path]
    if before and (not inside or inside[0][2] > 0):
        inside.append(before[-1])
    return {rank for _, rank, _ in inside}


def check_parts(
    node: dict[str, Any], path: str, stored: list[tuple[int, str, Any]], cuts: list[list[Any]]
) -> None:
    """Sections "Sharding", "Parts" and "Verifying": parts make up a piece, each element once."""
    dtype, sizes = stored_form(node["type"])
    shape = sizes if dtype == node["type"].partition("[")[0] else sizes[:-1]
    tail = sizes[len(shape) :]
    covered: list[int] = []
    owners = set()
    for rank, key, item in stored:
        _, box, part, is_box = part_of(key, shape)
        lengths = [stop - start for start, stop in box] if is_box else [len(part)]
        assert (item["dtype"], item["shape"]) == (dtype, [*lengths, *tail]), key
        covered += elements(box, part, shape)
        owners.add(rank)
        if "sharding" in node and math.prod(shape):
            assert box in boxes_of(node["sharding"], shape)[rank], key
    assert sorted(covered) == list(range(math.prod(shape))), path
    if "sharding" in node:
        held = boxes_of(node["sharding"], shape)
        union = {box for boxes in held.values() for box in boxes}
        assert sum(len(elements(box, range(2**40), shape)) for box in union) == math.prod(shape)
    elif cuts and covered:
        assert owners == writers(cuts, path)


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda path: path.name)
def test_the_specification_reads_what_the_library_wrote(snapshot: Path) -> None:
    manifest = manifest_of(snapshot)
    structure = document_of(snapshot, manifest["structure"])
    indexes = [document_of(snapshot, record) for record in manifest["indexes"]]
    assert [index["rank"] for index in indexes] == list(range(manifest["world_size"]))
    cuts = structure["cuts"]
    assert cuts == sorted(cuts, key=lambda cut: (cut[0], cut[2]))

    folder = snapshot / "data" / manifest["attempt"]
    stored: dict[str, list[tuple[int, str, Any]]] = {}
    named = {"structure.json", *(Path(record["path"]).name for record in manifest["indexes"])}
    for index in indexes:
        for file in index["files"]:
            assert file["name"] not in named
            named.add(file["name"])
            for key, item in items_of(folder / file["name"], file, index).items():
                leaf = part_of(key, item["shape"])[0]
                path = file["entry"] if leaf == file["entry"] else f"{file['entry']}/{leaf}"
                stored.setdefault(path, []).append((index["rank"], key, item))
    assert named == {path.name for path in folder.iterdir()}
    assert manifest["bytes"] == sum(
        file["bytes"] - file["data_start"] for index in indexes for file in index["files"]
    )

    shared: Nodes = {}
    aliases: dict[str, str] = {}
    for name, entry in structure["entries"].items():
        assert entry["scope"] != "per_rank"
        pieces_of(entry["tree"], segment(name), shared, aliases)
    for path, node in shared.items():
        check_parts(node, path, stored.pop(path, []), cuts if len(indexes) > 1 else [])
    for index in indexes:
        own: Nodes = {}
        assert set(index["entries"]) | set(structure["entries"]) == set(manifest["entries"])
        for name, entry in index["entries"].items():
            assert entry["scope"] == "per_rank"
            pieces_of(entry["tree"], segment(name), own, aliases)
        for path, node in index["nodes"].items():
            pieces_of(node, path, own, aliases)
        for path, node in own.items():
            (item,) = [each for each in stored[path] if each[0] == index["rank"]]
            stored[path].remove(item)
            check_parts(node, path, [item], [])
    assert all("/~:storage" in path or not left for path, left in stored.items())
    assert set(aliases.values()) <= set(shared) | {path for path, left in stored.items() if left}


def test_the_examples_of_shardings_are_what_the_rules_give() -> None:
    """The table of section "Sharding"."""
    pattern = r"^\| `([\d,+-]+/[^`]+)` \| ([\d×]+) \| (.*) \|$"
    rows = re.findall(pattern, PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) >= 6
    for text, sizes, said in rows:
        shape = [int(size) for size in sizes.split("×")]
        held = {
            rank: " ".join(",".join(f"{a}:{b}" for a, b in box) for box in boxes)
            for rank, boxes in boxes_of(text, shape).items()
        }
        found = "; ".join(f"{rank}: {boxes or '–'}" for rank, boxes in held.items())
        assert said.replace("`", "") == found
