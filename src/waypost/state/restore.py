"""From stored bytes back to values: what has to be read for a tree, and how it is put together.

A restorer first collects what is needed, as targets for each stored piece; when those are filled it
puts values together. A tensor that stands in the target may be filled where it lies instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from waypost.buffers import Target
from waypost.errors import FormatError
from waypost.format import paths, tensornodes, trees, values
from waypost.format.documents import Entry
from waypost.format.jsontext import Json
from waypost.format.shardings import Box
from waypost.state.extensions import ExtensionDecoder
from waypost.state.memory import FreshTarget
from waypost.state.tensors import TensorDecoder


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to be filled with a box of a stored piece.

    Attributes:
        target: The memory, of the box in row-major order.
        box: In global coordinates; None for all of the piece.
        replicas: The ranks that fill the same box of the same piece; None for all ranks.
        spread: How the target is spread over ranks, as text; empty when all ranks hold all of it.
    """

    target: Target
    box: Box | None = None
    replicas: tuple[int, ...] | None = None
    spread: str = ""


class Restorer:
    """Restores parts of a snapshot; one per load.

    Args:
        entries: All entries of the snapshot.
        size: Returns the bytes of a stored piece by path.
        allow_pickle: Unpickle what was pickled.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        size: Callable[[str], int],
        *,
        allow_pickle: bool = False,
    ) -> None:
        self._entries = entries
        self._size = size
        self._fresh: dict[str, FreshTarget] = {}
        self._filled: dict[str, torch.Tensor] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._typed: dict[str, torch.Tensor] = {}
        self._leaves: dict[str, trees.Leaf] | None = None
        self.targets: dict[str, list[Region]] = {}
        self._values = values.Decoder(self._restore, allow_pickle=allow_pickle)
        self._tensors = TensorDecoder(self._piece, self._values.value, self._tensor_at)
        self._extensions = ExtensionDecoder(self._values.value, self._tensors)

    def need(self, node: Json, path: str) -> None:
        """Notes that everything below ``node`` is to be restored."""
        for leaf in trees.leaves(node, path):
            if leaf.is_tensor:
                self.need_tensor(leaf.tensor_node, leaf.path)

    def need_tensor(self, node: Json, path: str) -> None:
        """Notes that the tensor at ``path`` is to be restored in new memory."""
        if path in self._filled:
            return
        for piece, kind in tensornodes.pieces(node, path):
            self._need_piece(piece, kind.nbytes)
        for base in tensornodes.aliases(node, path):
            leaf = self._leaf(base)
            if leaf is None:
                self._need_piece(base, self._size(base))
            elif base != path:
                self.need_tensor(leaf.tensor_node, base)

    def fill(self, path: str, region: Region) -> None:
        """Notes that the piece at ``path``, or a box of it, goes into existing memory.

        Raises:
            FormatError: What is stored has another size.
        """
        if region.box is None:
            self._check_size(path, region.target.nbytes)
        self.targets.setdefault(path, []).append(region)

    def stand_in(self, path: str, tensor: torch.Tensor, *, is_exact: bool) -> None:
        """Notes that values contain ``tensor`` where the leaf at ``path`` stands.

        Args:
            path: The leaf.
            tensor: Filled by other means.
            is_exact: It will hold the very bytes that are stored, so ties may be taken from it.
        """
        self._stand_ins[path] = tensor
        if is_exact:
            self._filled[path] = tensor

    def is_filled(self, path: str) -> bool:
        """Tells whether the leaf at ``path`` is restored in existing memory."""
        return path in self._stand_ins

    def value(self, node: Json, path: str) -> Any:
        """Returns the value of ``node``, once all that it needs was read."""
        return self._values.value(node, path)

    def tensor(self, node: Json, path: str) -> torch.Tensor:
        """Returns the tensor of ``node``, the payload of a tensor tag."""
        return self._tensors.tensor(node, path)

    def pairs(self, entry: str) -> Iterator[tuple[str, str, Json]]:
        """Yields key, path and node of each item of an entry that is a dictionary."""
        found = trees.children(self._entries[entry].tree, paths.segment(entry))
        for key, path, node in found or ():
            if not isinstance(key, str):
                raise FormatError(f"{path}: expected a name")
            yield key, path, node

    def base_of(self, node: Json, path: str) -> str | None:
        """Returns the path of the piece that holds exactly this tensor, following ties.

        None when the tensor is put together from several pieces, or is a part of another.
        """
        for _ in range(3):
            description = tensornodes.described(node, path)
            if "parts" in description or "offset" in description or "class" in description:
                return None
            if "alias" not in description:
                return path
            path = description["alias"]
            leaf = self._leaf(path)
            if leaf is None:
                return None
            node = leaf.tensor_node
        raise FormatError(f"{path}: an alias of an alias")

    def _need_piece(self, path: str, nbytes: int) -> None:
        if path not in self._fresh:
            self._check_size(path, nbytes)
            self._fresh[path] = FreshTarget(nbytes)
            self.targets.setdefault(path, []).append(Region(self._fresh[path]))

    def _check_size(self, path: str, nbytes: int) -> None:
        if self._size(path) != nbytes:
            raise FormatError(
                f"{path}: {self._size(path)} bytes are stored, its type wants {nbytes}"
            )

    def _piece(self, path: str) -> torch.Tensor:
        return self._fresh[path].tensor

    def _tensor_at(self, path: str) -> torch.Tensor:
        if path not in self._typed:
            leaf = self._leaf(path)
            if path in self._filled:
                self._typed[path] = self._filled[path]
            elif leaf is None:
                self._typed[path] = self._piece(path)
            else:
                self._typed[path] = self._tensors.tensor(leaf.tensor_node, path)
        return self._typed[path]

    def _restore(self, tag: str, payload: Any, path: str) -> Any:
        if tag == tensornodes.TAG:
            if path in self._stand_ins:
                return self._stand_ins[path]
            description = tensornodes.described(payload, path)
            if "alias" not in description:
                return self._typed_once(payload, path)
        return self._extensions.restore(tag, payload, path)

    def _typed_once(self, payload: Json, path: str) -> torch.Tensor:
        if path not in self._typed:
            self._typed[path] = self._tensors.tensor(payload, path)
        return self._typed[path]

    def _leaf(self, path: str) -> trees.Leaf | None:
        if self._leaves is None:
            self._leaves = {
                leaf.path: leaf
                for name, entry in self._entries.items()
                for leaf in trees.leaves(entry.tree, paths.segment(name))
                if leaf.is_tensor
            }
        return self._leaves.get(path)
