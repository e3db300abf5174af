"""Leaves of a target against leaves of a snapshot, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from waypost.errors import Difference
from waypost.format import paths, tensornodes, tensortypes, trees
from waypost.format.documents import Entry
from waypost.format.trees import Leaf
from waypost.state import tensors
from waypost.state.memory import InPlaceTarget, is_writable
from waypost.state.restore import Restorer
from waypost.state.selection import Selection

if TYPE_CHECKING:
    from waypost.state.match import Plan


class TensorMatcher:
    """Compares tensors of the target with leaves of the snapshot and plans how to fill them.

    Args:
        restorer: Told what has to be read.
        selection: The caller's choices.
        plan: Gets the differences and the steps.
    """

    def __init__(self, restorer: Restorer, selection: Selection, plan: Plan) -> None:
        self._restorer = restorer
        self._selection = selection
        self._plan = plan
        self._leaves: dict[str, Leaf] = {}
        self._by_entry: dict[str, list[str]] = {}
        self._memory: dict[tuple[Any, ...], tuple[str, str]] = {}

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
        """Tells whether any leaf goes to the entry at ``path``."""
        return path in self._by_entry

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
            if path not in known and (leaf.is_tensor or values is not None):
                self._differ("unexpected", path, "", _leaf_text(leaf))
                self._plan.unexpected.append(path)
        return planned

    def restored(self, path: str) -> Any:
        """Returns the restored value for a target path, once everything was read."""
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
        if "alias" in description or not _is_plain(tensor):
            return
        fits = tensortypes.parse(description["type"]) == tensors.type_of(tensor)
        base = self._restorer.base_of(leaf.tensor_node, leaf.path)
        if fits and base == leaf.path:
            self._restorer.fill(base, InPlaceTarget(tensor))
            self._restorer.stand_in(base, tensor, is_exact=True)

    def _tensor(self, path: str, target: torch.Tensor, leaf: Leaf, *, in_place: bool) -> bool:
        description = tensornodes.described(leaf.tensor_node, leaf.path)
        saved = tensortypes.parse(description["type"])
        if not self._fits(path, target, saved, description):
            return False
        self._plan.loaded.append(leaf.path)
        base = self._restorer.base_of(leaf.tensor_node, leaf.path)
        if not in_place:
            self._restorer.need_tensor(leaf.tensor_node, leaf.path)
        elif (
            base is not None
            and saved.dtype == tensors.dtype_name(target.dtype)
            and (_is_plain(target))
        ):
            self._fill(path, target, base)
            self._restorer.stand_in(leaf.path, target, is_exact=True)
        else:
            self._restorer.need_tensor(leaf.tensor_node, leaf.path)
            self._restorer.stand_in(leaf.path, target, is_exact=False)
            self._plan.then(lambda: _copy(self.restored(path), target))
        return True

    def _fill(self, path: str, target: torch.Tensor, base: str) -> None:
        """Plans to read a piece into the target; memory that two targets share is read once."""
        if target.numel():
            memory = (target.device, target.data_ptr(), target.numel(), target.stride())
            known = self._memory.setdefault(memory, (base, path))
            if known[0] != base:
                self._differ(
                    "tie", path, f"shares its memory with {known[1]}", "holds two separate tensors"
                )
            if known != (base, path):
                return
        self._restorer.fill(base, InPlaceTarget(target))

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
        layout = str(target.layout).removeprefix("torch.")
        stored = description.get("layout", "strided")
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor's own memory can be filled with stored bytes."""
    return (
        tensor.layout == torch.strided
        and not hasattr(tensor, "__tensor_flatten__")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _refusal(target: torch.Tensor) -> str | None:
    if type(target) in (UninitializedParameter, UninitializedBuffer):
        return "a lazy parameter; run the module once before loading"
    if target.is_meta:
        return "a tensor on the device 'meta'; call to_empty() before loading"
    if target.layout == torch.strided and not is_writable(target):
        return "an expanded tensor, whose elements share memory; clone it before loading"
    return None


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad(), tensors.quiet_quantization():
        target.copy_(source.detach())


def _text(tensor: torch.Tensor) -> str:
    return f"{tensors.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _leaf_text(leaf: Leaf) -> str:
    if leaf.tag != tensornodes.TAG:
        return "a value"
    kind = tensortypes.parse(tensornodes.described(leaf.tensor_node, leaf.path)["type"])
    return f"{kind.dtype} {kind.shape}"
