"""Verifying: every byte that a manifest names, read again and compared with its digest.

Problems are collected, not raised, so that one look shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from waypost import limits
from waypost.audit import opening
from waypost.errors import CorruptionError, FormatError, NotFoundError, StorageError, WaypostError
from waypost.format import digests, documents, paths, safetensors
from waypost.format.documents import DataFile, Index
from waypost.format.tensornodes import Consistency
from waypost.storage import Location, ReadFile

Advance = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    ``kind`` is ``corrupt``, ``missing``, ``format`` or ``unreadable``.
    """

    kind: str
    file: str
    leaf: str | None
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at and what is wrong.

    Attributes:
        url: The snapshot.
        problems: In the order in which they were found.
        nbytes: Bytes of data read and compared.
        chunks: Chunks compared.
        debris: Files in the snapshot's folder that the manifest does not name.
    """

    url: str
    problems: tuple[Problem, ...]
    nbytes: int
    chunks: int
    debris: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Fraction:
    """The part of all chunks that a verification reads: number ``part`` of ``parts``."""

    part: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.part <= self.parts:
            raise ValueError(f"fraction {self.part}/{self.parts}: expected 1/n to n/n")

    def takes(self, chunk: int) -> bool:
        """Tells whether a chunk, numbered through all files, belongs to the part."""
        return chunk % self.parts == self.part - 1


@dataclass(slots=True)
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    nbytes: int = 0
    chunks: int = 0

    def add(self, error: WaypostError, file: str) -> None:
        kind = "unreadable"
        leaf = None
        if isinstance(error, CorruptionError):
            kind, leaf = "corrupt", error.leaf
            file = error.file or file
        elif isinstance(error, FormatError):
            kind = "format"
        elif isinstance(error, NotFoundError):
            kind = "missing"
        self.problems.append(Problem(kind, file, leaf, str(error)))


def verify(
    snapshot: Location,
    *,
    deep: bool = True,
    fraction: Fraction | None = None,
    advance: Advance | None = None,
) -> VerifyReport:
    """Returns what is wrong with a snapshot; raises nothing about its content.

    Args:
        snapshot: Where it is.
        deep: Read and compare every byte; otherwise documents, headers, and sizes only.
        fraction: Compare only this part of the chunks.
        advance: Told of progress.
    """
    findings = _Findings()
    try:
        opened = opening.open_documents(snapshot)
    except WaypostError as error:
        findings.add(error, documents.MANIFEST)
        return VerifyReport(snapshot.url, tuple(findings.problems), 0, 0, ())
    manifest = opened.manifest
    named = {documents.MANIFEST, manifest.structure.path}
    named.update(record.path for record in manifest.indexes)
    consistency = Consistency()
    first_chunk = 0
    for index in _indexes(opened, findings):
        algorithm = digests.algorithm(index.algorithm)
        for file in index.files:
            path = opening.data_path(manifest, file)
            named.add(path)
            chunks = documents.chunk_count(file, index.chunk_bytes)
            check = _FileCheck(snapshot, path, file, algorithm, index.chunk_bytes, first_chunk)
            first_chunk += chunks
            items = check.run(findings, fraction or Fraction(), deep=deep, advance=advance)
            _collect(consistency, file.entry, index.rank, items, findings)
    if not findings.problems:
        _check_consistency(opened, consistency, findings)
    return VerifyReport(
        snapshot.url,
        tuple(findings.problems),
        findings.nbytes,
        findings.chunks,
        tuple(sorted(set(_files(snapshot)) - named)),
    )


@dataclass(frozen=True, slots=True)
class _FileCheck:
    snapshot: Location
    path: str
    file: DataFile
    algorithm: digests.Algorithm
    chunk_bytes: int
    first_chunk: int

    def run(
        self, findings: _Findings, fraction: Fraction, *, deep: bool, advance: Advance | None
    ) -> dict[str, safetensors.Item]:
        items: dict[str, safetensors.Item] = {}
        try:
            with opening.open_data(self.snapshot, self.path, self.file) as opened:
                items = opening.read_header(opened, self.path, self.file, self.algorithm)
                if deep:
                    self._chunks(opened, items, findings, fraction, advance)
        except (CorruptionError, FormatError, NotFoundError, StorageError) as error:
            findings.add(error, self.path)
        return items

    def _chunks(
        self,
        opened: ReadFile,
        items: dict[str, safetensors.Item],
        findings: _Findings,
        fraction: Fraction,
        advance: Advance | None,
    ) -> None:
        leaf_at = opening.leaf_finder(self.file.entry, items)
        expected = documents.chunk_digests(self.file)
        size = self.algorithm.size_bytes
        data_bytes = self.file.bytes - self.file.data_start
        buffer = memoryview(bytearray(min(self.chunk_bytes, data_bytes)))
        for chunk in range(-(-data_bytes // self.chunk_bytes)):
            start = chunk * self.chunk_bytes
            view = buffer[: min(self.chunk_bytes, data_bytes - start)]
            if advance is not None:
                advance(len(view))
            if not fraction.takes(self.first_chunk + chunk):
                continue
            got = opened.read(self.file.data_start + start, [view])
            findings.nbytes += got
            findings.chunks += 1
            wanted = expected[chunk * size : (chunk + 1) * size]
            if got != len(view) or self.algorithm.one_shot(view) != wanted:
                offset = self.file.data_start + start
                leaf = leaf_at(start)
                message = (
                    f"{self.path}: bytes {offset} to {offset + len(view)} are not what was saved "
                    f"(leaf {leaf})"
                )
                findings.problems.append(Problem("corrupt", self.path, leaf, message))


def _indexes(opened: opening.Documents, findings: _Findings) -> Iterator[Index]:
    """Yields the indexes of all ranks; notes those that are damaged."""
    for rank in range(opened.world_size):
        try:
            yield opened.index(rank)
        except WaypostError as error:
            findings.add(error, opened.manifest.indexes[rank].path)


def _collect(
    consistency: Consistency,
    entry: str,
    rank: int,
    items: dict[str, safetensors.Item],
    findings: _Findings,
) -> None:
    try:
        consistency.add_items(entry, rank, items)
    except FormatError as error:
        findings.add(error, entry)


def _check_consistency(
    opened: opening.Documents, consistency: Consistency, findings: _Findings
) -> None:
    try:
        for name, entry in opened.structure.entries.items():
            consistency.add_tree(entry.tree, paths.segment(name))
        for rank in range(opened.world_size):
            opened.entries_of(rank)
            index = opened.index(rank)
            for name, entry in index.entries.items():
                consistency.add_tree(entry.tree, paths.segment(name), rank)
            for path, node in index.nodes.items():
                consistency.add_tree(node, path, rank)
        consistency.check()
        if opened.world_size > 1:
            consistency.check_writers(opened.structure.cuts)
    except FormatError as error:
        findings.add(error, opened.manifest.structure.path)


def _files(folder: Location, prefix: str = "", depth: int = 0) -> list[str]:
    found: list[str] = []
    if depth > limits.FOLDER_DEPTH_MAX:
        return found
    for name in folder.storage.list(folder.path):
        path = f"{prefix}{name.name}"
        if name.is_folder:
            found.extend(_files(folder / name.name, f"{path}/", depth + 1))
        elif not path.startswith("notes/"):
            found.append(path)
    return found
