"""The documents of a snapshot: manifest, structure and rank indexes.

The manifest is the commit record: small, readable, and signed by its own digest. It names the
structure (what the entries are made of) and one index per rank (which files hold their bytes), each
with size and digest; an index names the data files. So the manifest's digest covers every byte.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Final, TypeVar

import msgspec

from waypost import clock, limits
from waypost.errors import CorruptionError, FormatError
from waypost.format import digests, jsontext
from waypost.format.jsontext import Json

FORMAT: Final = "waypost"
VERSION: Final = 1
REQUIRED_FEATURES: Final = frozenset({"pickle"})
"""Features that this reader understands; a snapshot that requires another one is refused."""

MANIFEST: Final = "manifest.json"
SCOPES: Final = ("sharded", "replicated", "per_rank")
KINDS: Final = ("module", "optimizer", "stateful", "tensor", "value")

_TAIL_KEY: Final = b',\n "digest": "'
_ALGORITHM = re.compile(r"[a-z][a-z0-9-]{2,30}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_Document = TypeVar("_Document")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the manifest names: path relative to the snapshot, size in bytes, digest."""

    path: str
    bytes: int
    digest: str


class EntrySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``show`` says of an entry without reading more: counts and payload bytes."""

    kind: str
    scope: str
    tensors: int
    bytes: int


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot that this one goes on from."""

    step: int | None
    attempt: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit record of a snapshot."""

    format: str
    version: int
    required: list[str]
    optional: list[str]
    attempt: str
    step: int | None
    created: str
    world_size: int
    bytes: int
    entries: dict[str, EntrySummary]
    structure: FileRecord
    indexes: list[FileRecord]
    run: str | None = None
    incarnation: int = 0
    reason: str | None = None
    parent: Parent | None = None
    epoch: int | None = None
    metrics: Any = None
    metadata: Any = None
    environment: dict[str, str] = {}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the state: what it was, who owns it, and its tree of value nodes.

    ``versions`` maps a version of a module's own state, as text, to the names of the parts that
    have it; parts not named have version 1.
    """

    kind: str
    scope: str
    tree: Any
    versions: dict[str, list[str]] = {}


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that all ranks share.

    ``cuts`` says who wrote what all ranks hold alike; see :mod:`waypost.format.cuts`.
    """

    entries: dict[str, Entry]
    cuts: list[tuple[str, int, int]] = []


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A safetensors file of one entry and rank, with a digest for each chunk of its data.

    ``chunks`` is the concatenation, in base64, of the raw digests of each ``chunk_bytes`` of data;
    ``header`` is the digest of the bytes before the data; ``digest`` covers header and chunks.
    """

    name: str
    entry: str
    bytes: int
    data_start: int
    header: str
    chunks: str
    digest: str


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote: its files, its own entries, and its own nodes in shared entries."""

    rank: int
    algorithm: str
    chunk_bytes: int
    files: list[DataFile]
    entries: dict[str, Entry]
    nodes: dict[str, Any] = {}


def encode_manifest(manifest: Manifest, algorithm: digests.Algorithm) -> bytes:
    """Returns the manifest's bytes, ended by the digest of all that precedes it."""
    document = msgspec.to_builtins(manifest)
    body = jsontext.dump_pretty(document)
    body = body.removesuffix(b"\n}")
    return body + _tail(body, algorithm)


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Returns the manifest in ``data``, after checking its digest, version and features.

    Raises:
        CorruptionError: Empty, torn, or not the bytes that were written.
        FormatError: Not a manifest, a newer version, or a required feature that is not known.
    """
    if len(data) > limits.MANIFEST_BYTES_MAX:
        raise FormatError(f"{name}: {len(data)} bytes, the limit is {limits.MANIFEST_BYTES_MAX}")
    if not data.strip(b"\0"):
        what = "filled with zeros" if data else "empty"
        raise CorruptionError(f"{name}: the manifest is {what}", file=name)
    body, key, _ = data.rpartition(_TAIL_KEY)
    if not key:
        raise CorruptionError(f"{name}: the manifest is cut off or not a manifest", file=name)
    algorithm = _algorithm_of(data[len(body) + len(_TAIL_KEY) :], body, name)
    if data[len(body) :] != _tail(body, algorithm):
        raise CorruptionError(
            f"{name}: the manifest's digest does not fit its bytes", file=name, offset=0
        )
    document = jsontext.parse(data, name, bytes_max=limits.MANIFEST_BYTES_MAX)
    _check_version(document, name)
    manifest = _convert(document, Manifest, name)
    _check_manifest(manifest, name)
    return manifest


def encode(document: Structure | Index) -> bytes:
    """Returns the bytes of a structure or an index."""
    return jsontext.dump(msgspec.to_builtins(document)) + b"\n"


def decode_structure(data: bytes, name: str) -> Structure:
    """Returns the structure in ``data``, whose digest was checked before.

    Raises:
        FormatError: Not such a document.
    """
    structure = _convert(_parse(data, name), Structure, name)
    _check_entries(structure.entries, name)
    if any(entry.scope == "per_rank" for entry in structure.entries.values()):
        raise FormatError(f"{name}: an entry of one rank among those that ranks share")
    places = [(path, start) for path, _, start in structure.cuts]
    if places != sorted(places) or any(min(rank, start) < 0 for _, rank, start in structure.cuts):
        raise FormatError(f"{name}: the cuts are out of order")
    return structure


def decode_index(data: bytes, name: str) -> Index:
    """Returns the rank index in ``data``, whose digest was checked before.

    Raises:
        FormatError: Not such a document, or sizes and names out of bounds.
    """
    index = _convert(_parse(data, name), Index, name)
    algorithm = digests.algorithm(index.algorithm)
    _check_entries(index.entries, name)
    if any(entry.scope != "per_rank" for entry in index.entries.values()):
        raise FormatError(f"{name}: an entry that ranks share among those of one rank")
    if not 4096 <= index.chunk_bytes <= limits.GIB:
        raise FormatError(f"{name}: chunks of {index.chunk_bytes} bytes are out of bounds")
    names = [file.name for file in index.files]
    if len(set(names)) != len(names):
        raise FormatError(f"{name}: a data file is named twice")
    for file in index.files:
        _check_file_name(file.name, name)
        data_bytes = file.bytes - file.data_start
        if not 8 < file.data_start <= limits.HEADER_BYTES_MAX + 8 or not 0 <= data_bytes < 2**62:
            raise FormatError(f"{name}: {file.name}: sizes are out of bounds")
        expected = chunk_count(file, index.chunk_bytes) * algorithm.size_bytes
        if len(chunk_digests(file)) != expected:
            raise FormatError(f"{name}: {file.name}: the number of chunk digests is wrong")
    return index


def chunk_count(file: DataFile, chunk_bytes: int) -> int:
    """Returns how many chunks the file's data has."""
    return -(-(file.bytes - file.data_start) // chunk_bytes)


def chunk_digests(file: DataFile) -> bytes:
    """Returns the raw digests of the file's chunks, one after the other."""
    try:
        return base64.b64decode(file.chunks, validate=True)
    except ValueError as error:
        raise FormatError(f"{file.name}: chunk digests are not base64") from error


def _tail(body: bytes, algorithm: digests.Algorithm) -> bytes:
    return _TAIL_KEY + algorithm.of(body).encode() + b'"\n}\n'


def _algorithm_of(tail: bytes, body: bytes, name: str) -> digests.Algorithm:
    """Returns the algorithm that the manifest's digest names.

    Raises:
        CorruptionError: The digest is damaged, be it only the algorithm's name.
        FormatError: It needs an algorithm that is not known or not installed here.
    """
    text = tail.partition(b'"')[0].decode("ascii", "replace")
    known, _, hexadecimal = text.partition(":")
    default = digests.algorithm("xxh3-128")
    if _ALGORITHM.fullmatch(known) and default.one_shot(body).hex() != hexadecimal:
        try:
            algorithm = digests.algorithm(known)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
        if len(hexadecimal) == 2 * algorithm.size_bytes:
            return algorithm
    elif known == default.name:
        return default
    raise CorruptionError(f"{name}: the manifest's digest is damaged", file=name)


def _parse(data: bytes, name: str) -> Json:
    return jsontext.parse(data, name, bytes_max=limits.INDEX_BYTES_MAX)


def _convert(document: Json, kind: type[_Document], name: str) -> _Document:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{name}: not a valid {kind.__name__.lower()}: {error}") from error


def _check_version(document: Json, name: str) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{name}: not a Waypost manifest")
    version = document.get("version")
    required = document.get("required")
    unknown = (
        sorted(set(map(str, required)) - REQUIRED_FEATURES) if (isinstance(required, list)) else []
    )
    if version != VERSION or unknown:
        needs = f"version {version}" if version != VERSION else f"features {', '.join(unknown)}"
        raise FormatError(
            f"{name}: written by a newer Waypost (needs {needs}; this reader knows version "
            f"{VERSION}); upgrade waypost to read it"
        )


def _check_manifest(manifest: Manifest, name: str) -> None:
    if manifest.step is not None and not 0 <= manifest.step <= limits.STEP_MAX:
        raise FormatError(f"{name}: step {manifest.step} is out of bounds")
    try:
        clock.parse_timestamp(manifest.created)
    except ValueError as error:
        raise FormatError(f"{name}: not a time: {manifest.created[:80]!r}") from error
    if not _NAME.fullmatch(manifest.attempt):
        raise FormatError(f"{name}: bad attempt id {manifest.attempt[:80]!r}")
    if manifest.world_size != len(manifest.indexes) or not manifest.indexes:
        raise FormatError(
            f"{name}: {len(manifest.indexes)} indexes for {manifest.world_size} ranks"
        )
    if len({file.path for file in manifest.indexes}) != len(manifest.indexes):
        raise FormatError(f"{name}: two ranks have one index")
    for file in [manifest.structure, *manifest.indexes]:
        folder, _, base = file.path.rpartition("/")
        if folder != f"data/{manifest.attempt}":
            raise FormatError(f"{name}: the path {file.path[:120]!r} leads elsewhere")
        _check_file_name(base, name)
        if not 0 <= file.bytes <= limits.INDEX_BYTES_MAX:
            raise FormatError(f"{name}: {base}: {file.bytes} bytes is out of bounds")
        digests.split(file.digest)


def _check_entries(entries: dict[str, Entry], name: str) -> None:
    for key, entry in entries.items():
        if entry.kind not in KINDS or entry.scope not in SCOPES:
            raise FormatError(
                f"{name}: entry {key[:80]!r} has kind {entry.kind[:40]!r} and scope "
                f"{entry.scope[:40]!r}"
            )


def _check_file_name(base: str, name: str) -> None:
    if not _NAME.fullmatch(base) or ".." in base:
        raise FormatError(f"{name}: bad file name {base[:80]!r}")
