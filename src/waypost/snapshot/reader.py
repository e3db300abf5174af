"""Looking into one snapshot: its leaves, single tensors, parts of tensors, whole entries."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import datetime
from typing import Any, SupportsIndex

import torch

from waypost import clock
from waypost.audit import verify
from waypost.audit.leaves import LeafInfo, leaf_infos
from waypost.audit.naming import locate
from waypost.errors import LeafNotFoundError, UnsupportedError
from waypost.format import paths, tensornodes, tensortypes, trees, values
from waypost.format.paths import Globs
from waypost.options import Options, Settings
from waypost.options import resolve as resolve_options
from waypost.snapshot.contents import Contents, open_contents
from waypost.snapshot.load import check_pickle
from waypost.snapshot.metadata import decode_metadata
from waypost.snapshot.view import View
from waypost.state import boxes, modules
from waypost.state.memory import FreshTarget, as_plain
from waypost.state.restore import Region, Restorer
from waypost.storage.urls import Url


class Snapshot:
    """A committed snapshot, read-only; get one from :func:`waypost.open`.

    Documents are read when it is opened, data when it is asked for. Thread-safe.
    """

    def __init__(self, contents: Contents, settings: Settings) -> None:
        self._contents = contents
        self._settings = settings
        self._manifest = contents.documents.manifest
        self._shared = View(contents, 0 if contents.documents.world_size == 1 else None)
        self._entries = self._shared.entries

    def __repr__(self) -> str:
        return (
            f"<Snapshot {self.url} step={self.step} entries={', '.join(self.entries)} "
            f"bytes={self.nbytes}>"
        )

    @property
    def url(self) -> str:
        """Where it is."""
        return self._contents.location.url

    @property
    def step(self) -> int | None:
        """Optimizer steps done when it was saved."""
        return self._manifest.step

    @property
    def epoch(self) -> int | None:
        """Epochs done when it was saved, if a run manager counted them."""
        return self._manifest.epoch

    @property
    def attempt(self) -> str:
        """Id of the attempt that was committed."""
        return self._manifest.attempt

    @property
    def created(self) -> datetime:
        """When it was committed, UTC."""
        return clock.parse_timestamp(self._manifest.created)

    @property
    def nbytes(self) -> int:
        """Payload bytes: those of all leaves, each stored once."""
        return self._manifest.bytes

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self._manifest.world_size

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the entries, in the order of the state."""
        return tuple(self._entries)

    @property
    def metrics(self) -> dict[str, int | float]:
        """Metrics given at save, at full precision."""
        found: dict[str, int | float] = values.decode_plain(self._manifest.metrics, "metrics")
        return found

    @property
    def metadata(self) -> object:
        """Metadata given at save."""
        return decode_metadata(self._manifest.metadata)

    @property
    def environment(self) -> dict[str, str]:
        """Versions of the software that wrote it."""
        return dict(self._manifest.environment)

    def leaves(self, glob: Globs = None) -> list[LeafInfo]:
        """Returns the leaves, in order, that match any of the globs; all if None."""
        return leaf_infos(self._entries, glob, self._contents.documents.structure.cuts)

    def read(
        self,
        path: str,
        *,
        out: torch.Tensor | None = None,
        box: Sequence[slice | tuple[int, int]] | None = None,
        rank: SupportsIndex | None = None,
    ) -> object:
        """Returns one leaf, or a part of a tensor, whole however it was spread over ranks.

        Args:
            path: The leaf.
            out: A tensor of the same dtype, and of the leaf's or the box's shape, to fill.
            box: For each dimension a slice without step or a pair (start, stop); only the chunks
                that hold it are read.
            rank: Of a leaf that each rank has for itself, whose.

        Raises:
            LeafNotFoundError: There is no such leaf.
            CorruptionError: Stored bytes are not what was saved.
            ValueError: ``out`` or ``box`` does not fit the tensor, or ``rank`` is lacking.
        """
        view = self._view(rank)
        leaf = self._find(path, view)
        self._contents.check_entries(
            name for name in self._entries if paths.segment(name) == paths.entry_of(path)
        )
        if box is not None:
            found: Any = self._read_box(view, leaf, box)
        else:
            check_pickle(self._contents, self._settings, self._names_of(leaf))
            self._check_owner(view, leaf.path, leaf)
            restorer = self._restorer(view)
            restorer.need(leaf.node, leaf.path)
            self._fill(view, restorer)
            found = restorer.value(leaf.node, leaf.path)
        if out is None:
            return found
        return _copy_out(found, out, path)

    def state_dict(self, entry: str, rank: SupportsIndex | None = None) -> object:
        """Returns an entry as it was saved: type-exact, on the CPU, ties tied, shards put together.

        Args:
            entry: Its name.
            rank: Of an entry that each rank has for itself, whose.

        Raises:
            LeafNotFoundError: There is no such entry.
            CorruptionError: Stored bytes are not what was saved.
            UnsupportedError: It needs pickle, or a class that is not imported.
            ValueError: Each rank has its own, and ``rank`` is lacking.
        """
        view = self._view(rank)
        found = view.entries.get(entry)
        if found is None:
            raise LeafNotFoundError(
                f"{self.url}: no entry {entry!r}; there are {', '.join(self._entries)}"
            )
        self._contents.check_entries([entry])
        check_pickle(self._contents, self._settings, [entry])
        path = paths.segment(entry)
        self._check_owner(view, path, *trees.leaves(found.tree, path))
        restorer = self._restorer(view)
        restorer.need(found.tree, path)
        self._fill(view, restorer)
        state: Any = restorer.value(found.tree, path)
        if found.kind == "module":
            modules.attach_versions(state, found.versions)
        return state

    def verify(self, deep: bool = True) -> verify.VerifyReport:
        """Returns what is wrong with the stored bytes; see :class:`~waypost.VerifyReport`.

        Args:
            deep: Read and compare every byte; otherwise documents, headers and sizes only.
        """
        return verify.verify(self._contents.location, deep=deep)

    def _view(self, rank: SupportsIndex | None) -> View:
        if rank is None:
            return self._shared
        number = operator.index(rank)
        if not 0 <= number < self.world_size:
            raise ValueError(f"{self.url}: rank {number}; it was saved by {self.world_size} ranks")
        return View(self._contents, number)

    def _check_owner(self, view: View, path: str, *leaves: trees.Leaf) -> None:
        """Makes sure that it is said whose leaves are meant, where each rank has its own."""
        if view.rank is not None:
            return
        is_own = any(
            entry.scope == "per_rank" and paths.segment(name) == paths.entry_of(path)
            for name, entry in view.entries.items()
        )
        if is_own or any(leaf.tag == trees.PER_RANK for leaf in leaves):
            raise ValueError(
                f"{self.url}: {path}: each of the {self.world_size} ranks has its own; say "
                f"rank=0 to {self.world_size - 1}"
            )

    def _find(self, path: str, view: View) -> trees.Leaf:
        for name, entry in view.entries.items():
            if paths.segment(name) == paths.entry_of(path):
                for leaf in trees.leaves(entry.tree, paths.segment(name)):
                    if leaf.path == path:
                        return leaf
        raise LeafNotFoundError(f"{self.url}: no leaf {path!r}")

    def _names_of(self, leaf: trees.Leaf) -> list[str]:
        """Returns the entry's name when the leaf itself was pickled."""
        if not trees.holds_pickle(leaf.node):
            return []
        return [name for name in self._entries if paths.segment(name) == paths.entry_of(leaf.path)]

    def _restorer(self, view: View) -> Restorer:
        return Restorer(view.entries, view.size, allow_pickle=self._settings.allow_pickle)

    def _fill(self, view: View, restorer: Restorer) -> None:
        view.read(restorer.targets, self._settings, verify=True)

    def _read_box(
        self, view: View, leaf: trees.Leaf, box: Sequence[slice | tuple[int, int]]
    ) -> torch.Tensor:
        self._check_owner(view, leaf.path, leaf)
        if leaf.tag != trees.TENSOR:
            raise UnsupportedError(f"{leaf.path}: a box of a value", path=leaf.path)
        kind = tensortypes.parse(tensornodes.described(leaf.tensor_node, leaf.path)["type"])
        bounds = boxes.bounds(box, kind.shape)
        base = self._restorer(view).base_of(leaf.tensor_node, leaf.path)
        if base is None:
            whole: Any = self.read(leaf.path, rank=view.rank)
            part: torch.Tensor = whole[tuple(slice(*pair) for pair in bounds)].clone()
            return part
        shape = tuple(stop - start for start, stop in bounds)
        fresh = FreshTarget(tensortypes.TensorType(kind.dtype, shape).nbytes)
        view.read({base: [Region(fresh, bounds)]}, self._settings, verify=True)
        return fresh.tensor.view(getattr(torch, kind.dtype)).reshape(shape)


def open_snapshot(url: Url, *, options: Options | None = None) -> Snapshot:
    """Returns the snapshot at ``url``, opened for reading; needs no process group.

    Args:
        url: A snapshot, or ``run@latest``, ``run@1200``.
        options: See :class:`~waypost.Options`.

    Raises:
        NotFoundError: No snapshot is there.
        CorruptionError: Its documents are not what was saved.
        FormatError: It needs a newer Waypost, or is not a snapshot.
    """
    return Snapshot(open_contents(locate(url)), resolve_options(options))


def _copy_out(found: Any, out: torch.Tensor, path: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{path}: is a value, not a tensor to fill")
    if found.shape != out.shape or found.dtype != out.dtype:
        raise ValueError(
            f"{path}: is {found.dtype} {tuple(found.shape)}, out is {out.dtype} {tuple(out.shape)}"
        )
    if found.layout != torch.strided or found.is_quantized:
        with torch.no_grad():
            return out.copy_(found)
    as_plain(out).copy_(as_plain(found))
    return out
