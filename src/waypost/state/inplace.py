"""Leaves of a target against leaves of a snapshot, one tensor at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from waypost.errors import Difference
from waypost.format import paths, shardings, tensornodes, tensortypes, trees
from waypost.format.documents import Entry
from waypost.format.shardings import Ranks, whole
from waypost.format.tensortypes import TensorType
from waypost.format.trees import Leaf
from waypost.state import aliases, shards, tensors
from waypost.state.memory import InPlaceTarget, is_direct, is_writable
from waypost.state.restore import Region, Restorer
from waypost.state.selection import Selection

if TYPE_CHECKING:
    from waypost.state.match import Plan


_NATIVE: Final = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A target in memory, by address, and the stored tensor that fills it."""

    start: int
    stop: int
    root: str
    path: str
    tensor: torch.Tensor


class TensorMatcher:
    """Compares tensors of the target with leaves of the snapshot and plans how to fill them.

    Args:
        restorer: Told what has to be read.
        selection: The caller's choices.
        plan: Gets the differences and the steps.
        ranks: Who loads.
    """

    def __init__(self, restorer: Restorer, selection: Selection, plan: Plan, ranks: Ranks) -> None:
        self._ranks = ranks
        self._restorer = restorer
        self._selection = selection
        self._plan = plan
        self._leaves: dict[str, Leaf] = {}
        self._by_entry: dict[str, list[str]] = {}
        self._filled: set[tuple[Any, ...]] = set()
        self._placed: list[_Placed] = []
        self._made: dict[str, torch.Tensor] = {}

    def index(self, entries: Mapping[str, Entry]) -> None:
        """Learns the snapshot's leaves under the names that they have in the target."""
        for name, entry in entries.items():
            path = paths.segment(name)
            walk = trees.items if entry.kind == "module" else trees.leaves
            for leaf in walk(entry.tree, path):
                target = (
                    self._selection.renamed(leaf.path) if self._selection.renames else leaf.path
                )
                if self._selection.takes(leaf.path):
                    if target in self._leaves:
                        raise ValueError(
                            f"rename gives both {self._leaves[target].path} and {leaf.path} the "
                            f"name {target}"
                        )
                    self._leaves[target] = leaf
                    self._by_entry.setdefault(paths.entry_of(target), []).append(target)

    def has_below(self, path: str) -> bool:
        """Tells whether any chosen leaf goes to the entry at ``path``."""
        return path in self._by_entry

    def below(self, path: str) -> list[Leaf]:
        """Returns the chosen leaves that go to the entry at ``path``."""
        return [self._leaves[target] for target in self._by_entry.get(path, [])]

    def keep_or_need(self, leaf: Leaf, targets: Mapping[str, torch.Tensor]) -> None:
        """Plans a tensor of a container that is put together anew around the target's tensors.

        One that is not to be loaded stays the target's own.
        """
        target = targets.get(self._selection.renamed(leaf.path))
        if self._selection.takes(leaf.path):
            if target is None:
                self._restorer.need_tensor(leaf.tensor_node, leaf.path)
        elif target is not None:
            self._restorer.stand_in(leaf.path, target, is_exact=False)
        else:
            raise ValueError(
                f"{leaf.path} is left out, and the target has no tensor to stay in its place; "
                f"leave the plain values of the entry out too"
            )

    def match(
        self,
        targets: Mapping[str, torch.Tensor],
        entry: str,
        *,
        values: Collection[str] | None = None,
        in_place: bool = True,
    ) -> list[str]:
        """Plans the tensors of one entry; returns the target paths that will have a value.

        Args:
            targets: The target's tensors by path.
            entry: The entry's path.
            values: Paths of the target's leaves that are not tensors; None when those of the
                snapshot are of no concern.
            in_place: Fill the tensors; otherwise only restore what belongs to them.
        """
        wanted = [*targets, *(values or ())]
        saved = self._by_entry.get(entry, [])
        planned: list[str] = []
        for path in wanted:
            leaf = self._leaves.get(path)
            if leaf is None:
                self._missing(path, targets.get(path))
            elif path in targets and leaf.is_tensor and leaf.tag == tensornodes.TAG:
                if self._tensor(path, targets[path], leaf, in_place=in_place):
                    planned.append(path)
            elif path in targets:
                self._differ("type", path, _text(targets[path]), "a value")
            else:
                self._value(leaf)
                planned.append(path)
        known = set(wanted)
        for path in saved:
            leaf = self._leaves[path]
            if path in known or leaf.is_inner:
                continue
            if leaf.tag == tensornodes.TAG or values is not None:
                self._differ("unexpected", path, "", _leaf_text(leaf))
                self._plan.unexpected.append(path)
        self._check_common(entry, wanted, planned)
        return planned

    def _check_common(self, entry: str, wanted: list[str], planned: list[str]) -> None:
        """Refuses an entry of which nothing at all would be loaded, however lenient the caller."""
        asked = [path for path in wanted if self._selection.takes(path)]
        if asked and not planned and not self._selection.strict:
            self._differ("type", entry, f"leaves such as {asked[0]}", "none of them")

    def check_overlaps(self) -> None:
        """Finds targets that share memory although the snapshot holds separate tensors for them."""
        self._placed.sort(key=lambda placed: placed.start)
        still_open: list[_Placed] = []
        for placed in self._placed:
            still_open = [other for other in still_open if other.stop > placed.start]
            for other in still_open:
                if other.root != placed.root and aliases.overlap([other.tensor, placed.tensor]):
                    self._differ(
                        "tie",
                        placed.path,
                        f"shares its memory with {other.path}",
                        "holds two separate tensors",
                    )
            still_open.append(placed)

    def restored(self, path: str) -> Any:
        """Returns the restored value for a target path, once everything was read."""
        if path in self._made:
            return self._made[path]
        leaf = self._leaves[path]
        if leaf.tag == tensornodes.TAG:
            return self._restorer.tensor(leaf.tensor_node, leaf.path)
        return self._restorer.value(leaf.node, leaf.path)

    def try_in_place(self, path: str, tensor: torch.Tensor) -> None:
        """Fills ``tensor`` from the leaf at ``path`` if it fits exactly; does nothing if not."""
        leaf = self._leaves.get(path)
        if leaf is None or leaf.tag != tensornodes.TAG:
            return
        description = tensornodes.described(leaf.tensor_node, leaf.path)
        if shards.is_dtensor(tensor):
            self._try_sharded(leaf, tensor)
            return
        if "alias" in description or not _is_plain(tensor) or not is_direct(tensor):
            return
        fits = tensortypes.parse(description["type"]) == tensors.type_of(tensor)
        base = self._restorer.base_of(leaf.tensor_node, leaf.path)
        if fits and base == leaf.path:
            self._restorer.fill(base, Region(InPlaceTarget(tensor)))
            self._restorer.stand_in(base, tensor, is_exact=True)

    def make_sharded(self, state: Iterable[Leaf], parameter: torch.Tensor) -> None:
        """Makes the tensors among ``state``, the state of a sharded parameter, sharded as well.

        Those of the parameter's shape are spread like it; others that were sharded become equal on
        its mesh.
        """
        for leaf in state:
            is_new = not self._restorer.is_filled(leaf.path)
            if not is_new or leaf.tag != tensornodes.TAG or leaf.is_inner:
                continue
            kind = leaf_type(leaf)
            if kind.shape == tuple(parameter.shape):
                fresh = shards.empty_like(parameter, getattr(torch, kind.dtype))
            elif _is_divided(leaf):
                empty = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
                fresh = shards.replicated_like(empty, parameter)
            else:
                continue
            self._try_sharded(leaf, fresh)

    def make_like(self, live: Mapping[str, torch.Tensor]) -> None:
        """Makes values that will be handed over sharded where the target's own are."""
        for path, tensor in live.items():
            leaf = self._leaves.get(path)
            if leaf is None or leaf.tag != tensornodes.TAG or not shards.is_dtensor(tensor):
                continue
            kind = leaf_type(leaf)
            if kind.shape == tuple(tensor.shape):
                fresh = shards.empty_like(tensor, getattr(torch, kind.dtype))
                self._try_sharded(leaf, fresh)

    def _try_sharded(self, leaf: Leaf, tensor: torch.Tensor) -> None:
        """Fills a sharded tensor whose type and shape fit exactly."""
        held = shards.held(tensor, self._ranks, leaf.path)
        if leaf_type(leaf) == TensorType(tensors.dtype_name(tensor.dtype), held.shape):
            self._fill_sharded(leaf, held)
            self._restorer.stand_in(leaf.path, tensor, is_exact=False)

    def _tensor(self, path: str, target: torch.Tensor, leaf: Leaf, *, in_place: bool) -> bool:
        description = tensornodes.described(leaf.tensor_node, leaf.path)
        saved = tensortypes.parse(description["type"])
        if not self._fits(path, target, saved, description):
            return False
        self._plan.loaded.append(leaf.path)
        if shards.is_sharded(target):
            self._sharded(path, target, leaf, saved, in_place=in_place)
            return True
        self._place(path, target, leaf)
        base = self._restorer.base_of(leaf.tensor_node, leaf.path)
        if not in_place:
            self._restorer.need_tensor(leaf.tensor_node, leaf.path)
        elif (
            base is not None
            and saved.dtype == tensors.dtype_name(target.dtype)
            and (_is_plain(target))
        ):
            self._fill(target, base)
            self._restorer.stand_in(leaf.path, target, is_exact=True)
        else:
            self._restorer.need_tensor(leaf.tensor_node, leaf.path)
            self._restorer.stand_in(leaf.path, target, is_exact=False)
            self._plan.then(lambda: _copy(self.restored(path), target))
        return True

    def _sharded(
        self,
        path: str,
        target: torch.Tensor,
        leaf: Leaf,
        saved: TensorType,
        *,
        in_place: bool,
    ) -> None:
        """Plans a tensor of which this rank holds a part, or which is equal over a mesh."""
        if not in_place:
            self._made[path] = shards.empty_like(target, getattr(torch, saved.dtype))
            self._fill_sharded(leaf, shards.held(self._made[path], self._ranks, path))
            return
        held = shards.held(target, self._ranks, path)
        if saved.dtype == tensors.dtype_name(target.dtype):
            self._fill_sharded(leaf, held)
        else:
            fresh_parts = [
                shards.Piece(
                    piece.box, torch.empty(piece.tensor.shape, dtype=getattr(torch, saved.dtype))
                )
                for piece in held.pieces
            ]
            self._fill_sharded(leaf, replace(held, pieces=tuple(fresh_parts)))
            for new, old in zip(fresh_parts, held.pieces, strict=True):
                self._plan.then(functools.partial(_copy, new.tensor, old.tensor))
        self._restorer.stand_in(leaf.path, target, is_exact=False)

    def _fill_sharded(self, leaf: Leaf, held: shards.Held) -> None:
        """Plans to read the boxes of this rank into their memory."""
        base = self._restorer.base_of(leaf.tensor_node, leaf.path)
        if base is None:
            self._restorer.need_tensor(leaf.tensor_node, leaf.path)
            for piece in held.pieces:
                self._plan.then(functools.partial(self._copy_box, leaf, piece))
            return
        replicas, spread = None, ""
        if held.sharding is not None and held.pieces:
            replicas, spread = held.sharding.replicas(self._ranks.rank), held.sharding.text
        for piece in held.pieces:
            memory = (piece.tensor.data_ptr(), piece.box, base)
            if memory in self._filled:
                continue
            self._filled.add(memory)
            is_whole = piece.box == whole(held.shape)
            self._restorer.fill(
                base,
                Region(
                    InPlaceTarget(piece.tensor), None if is_whole else piece.box, replicas, spread
                ),
            )

    def _copy_box(self, leaf: Leaf, piece: shards.Piece) -> None:
        whole_tensor = self._restorer.tensor(leaf.tensor_node, leaf.path)
        _copy(whole_tensor[tuple(slice(*pair) for pair in piece.box)], piece.tensor)

    def _fill(self, target: torch.Tensor, base: str) -> None:
        """Plans to read a piece into the target; memory that two targets share is read once."""
        memory = (target.data_ptr(), target.shape, target.stride(), base)
        if target.numel() and memory in self._filled:
            return
        self._filled.add(memory)
        self._restorer.fill(base, Region(InPlaceTarget(target)))

    def _place(self, path: str, target: torch.Tensor, leaf: Leaf) -> None:
        """Remembers where a target lies and which stored tensor it is filled from."""
        if target.numel() and target.layout == torch.strided and type(target) in _NATIVE:
            start, stop = aliases.byte_range(target)
            address = target.untyped_storage().data_ptr()
            roots = list(tensornodes.aliases(leaf.tensor_node, leaf.path))
            root = roots[0] if roots else leaf.path
            self._placed.append(_Placed(address + start, address + stop, root, path, target))

    def _fits(
        self,
        path: str,
        target: torch.Tensor,
        saved: tensortypes.TensorType,
        description: dict[str, Any],
    ) -> bool:
        refusal = _refusal(target)
        if refusal:
            self._differ("type", path, refusal, saved.text)
            return False
        wanted = tensors.type_of(target)
        layout, stored = "strided", description.get("layout", "strided")
        if not shards.is_sharded(target):
            layout = str(target.layout).removeprefix("torch.")
            problem = _kind_problem(target, description)
        else:
            is_composite = "parts" in description
            problem = ("a sharded tensor", "a composite tensor") if is_composite else None
        if problem is not None:
            self._differ("type", path, *problem)
            return False
        if wanted.shape != saved.shape:
            self._differ("shape", path, str(wanted.shape), str(saved.shape))
        if layout != stored:
            self._differ("type", path, f"layout {layout}", f"layout {stored}")
        if wanted.dtype != saved.dtype:
            if self._selection.cast:
                self._plan.cast.append(path)
            else:
                self._differ("dtype", path, wanted.dtype, saved.dtype)
        fits = wanted.shape == saved.shape and layout == stored
        return fits and (self._selection.cast or wanted.dtype == saved.dtype)

    def _value(self, leaf: Leaf) -> None:
        self._plan.loaded.append(leaf.path)
        self._restorer.need(leaf.node, leaf.path)

    def _missing(self, path: str, target: torch.Tensor | None) -> None:
        if self._selection.takes(path):
            expected = "a value" if target is None else _text(target)
            self._differ("missing", path, expected, "")
            self._plan.missing.append(path)

    def _differ(self, kind: str, path: str, expected: str, actual: str) -> None:
        self._plan.differences.append(
            Difference(kind=kind, path=path, expected=expected, actual=actual)
        )


def _kind_problem(target: torch.Tensor, description: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns how target and snapshot differ in the kind of tensor, if they do."""
    if "context" in description and not hasattr(target, "__tensor_flatten__"):
        return "an ordinary tensor", f"a {description['class']}"
    if target.is_quantized != ("qscheme" in description):
        quantised = ("quantised elements", "ordinary elements")
        return quantised if target.is_quantized else quantised[::-1]
    if target.is_quantized:
        wanted, saved = tensors.scheme_name(target), description["qscheme"]
        return (wanted, saved) if wanted != saved else None
    layout = description.get("layout", "strided")
    if layout.startswith("sparse_") and layout != "sparse_coo" and target.layout != torch.strided:
        wanted_count = int(target.values().numel())
        values = tensornodes.described(description["parts"]["values"][tensornodes.TAG], "")
        saved_count = math.prod(tensortypes.parse(values["type"]).shape)
        if wanted_count != saved_count:
            return f"{wanted_count} stored elements", f"{saved_count} stored elements"
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor's own memory can be filled with stored bytes."""
    return (
        tensor.layout == torch.strided
        and not hasattr(tensor, "__tensor_flatten__")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_divided(leaf: Leaf) -> bool:
    """Tells whether ranks held different parts of a tensor."""
    text = tensornodes.described(leaf.tensor_node, leaf.path).get("sharding")
    if text is None:
        return False
    sharding = shardings.parse(text)
    return sharding.boxes is not None or bool(sharding.divided)


def leaf_type(leaf: Leaf) -> TensorType:
    """Returns type and shape of a leaf that is a tensor."""
    return tensortypes.parse(tensornodes.described(leaf.tensor_node, leaf.path)["type"])


def _refusal(target: torch.Tensor) -> str | None:
    if shards.is_sharded(target):
        return None
    if type(target) in (UninitializedParameter, UninitializedBuffer):
        return "a lazy parameter; run the module once before loading"
    if target.is_meta:
        return "a tensor on the device 'meta'; call to_empty() before loading"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, which must not change outside of inference mode"
    if target.layout == torch.strided and not is_writable(target):
        return "a tensor whose own elements share memory (expanded?); clone it before loading"
    return None


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad(), tensors.quiet_quantization():
        target.copy_(source.detach())


def _text(tensor: torch.Tensor) -> str:
    return f"{tensors.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _leaf_text(leaf: Leaf) -> str:
    if leaf.tag != tensornodes.TAG:
        return "a value"
    kind = leaf_type(leaf)
    return f"{kind.dtype} {kind.shape}"
