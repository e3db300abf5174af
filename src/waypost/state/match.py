"""A target against a snapshot: every difference found, and a plan made, before a byte moves.

Each entry of the target is handled by what it is: a module and a container of tensors are filled
in place, leaf by leaf; an optimizer by the names of its parameters; anything else takes its whole
state back. Nothing of the target changes until :meth:`Plan.place`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from waypost.errors import Difference, FormatError, MismatchError
from waypost.format import classes, paths, shardings, trees
from waypost.format.documents import Entry
from waypost.format.jsontext import Json
from waypost.format.shardings import Ranks
from waypost.state import containers, modules, optimizers, shards
from waypost.state.describe import has_state, is_last
from waypost.state.extensions import is_generator, set_generator
from waypost.state.inplace import TensorMatcher
from waypost.state.restore import Restorer
from waypost.state.selection import Selection


@dataclass(slots=True)
class Plan:
    """What a load will do.

    Attributes:
        loaded: Paths of the leaves that will be loaded.
        missing: Paths that the target has and the snapshot does not.
        unexpected: The reverse.
        cast: Paths whose elements change their type.
        ignored: Entries of the snapshot that the target does not ask for.
        differences: Everything that does not fit.
        elsewhere: What this rank's target does not have; no difference if another rank's does.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    elsewhere: list[Difference] = field(default_factory=list)
    _actions: list[Callable[[], None]] = field(default_factory=list)
    _last: list[Callable[[], None]] = field(default_factory=list)

    def then(self, action: Callable[[], None], *, last: bool = False) -> None:
        """Adds a step to be taken when all bytes are there."""
        (self._last if last else self._actions).append(action)

    def check(self, elsewhere: Iterable[Difference] | None = None) -> None:
        """Makes sure that the target fits.

        Args:
            elsewhere: What no rank's target has; this rank's own if None.

        Raises:
            MismatchError: It does not; with all differences. Nothing was changed.
        """
        found = [*self.differences, *(self.elsewhere if elsewhere is None else elsewhere)]
        if found:
            raise MismatchError(
                f"the target does not fit the snapshot: {len(found)} differences, nothing was "
                f"loaded",
                tuple(found),
            )

    def place(self) -> None:
        """Hands everything that was read to the target; random streams last."""
        try:
            with torch.no_grad():
                for action in [*self._actions, *self._last]:
                    action()
        except BaseException as error:
            error.add_note(
                "the load had filled tensors in place and stopped while it handed over the rest: "
                "a part of the target is new, a part is old"
            )
            raise


def match(
    into: MutableMapping[str, object],
    entries: Mapping[str, Entry],
    restorer: Restorer,
    selection: Selection,
    ranks: Ranks = shardings.ONE,
    skipped: Collection[str] = (),
) -> Plan:
    """Returns the plan for filling ``into``; ``restorer`` then knows what has to be read.

    Args:
        into: The target.
        entries: Of the snapshot, as this rank sees it.
        restorer: For values, and told what has to be read.
        selection: The caller's choices.
        ranks: Who loads.
        skipped: Entries that are restored by other means.

    Raises:
        MismatchError: There is nothing in common; nothing was changed.
        UnsupportedError: A class or a permission that the snapshot needs is not there.
    """
    return _Matcher(into, entries, restorer, selection, ranks, skipped).run()


class _Matcher:
    def __init__(
        self,
        into: MutableMapping[str, object],
        entries: Mapping[str, Entry],
        restorer: Restorer,
        selection: Selection,
        ranks: Ranks,
        skipped: Collection[str],
    ) -> None:
        self._is_many = ranks.world_size > 1
        self._skipped = skipped
        self._into = into
        self._entries = entries
        self._restorer = restorer
        self._selection = selection
        self._plan = Plan()
        self._sources = _sources(entries, selection)
        self._tensors = TensorMatcher(restorer, selection, self._plan, ranks)

    def run(self) -> Plan:
        plan = self._plan
        self._tensors.index(self._entries)
        for name, target in self._into.items():
            if name not in self._skipped:
                self._entry(name, target)
        self._tensors.check_overlaps()
        taken = {self._sources.get(paths.segment(name)) for name in self._into}
        plan.ignored = [name for name in self._entries if name not in taken]
        if not self._selection.strict:
            plan.differences = [
                difference
                for difference in plan.differences
                if difference.kind not in ("missing", "unexpected")
            ]
        if self._is_many:
            plan.elsewhere = [found for found in plan.differences if _may_be_elsewhere(found)]
            plan.differences = [f for f in plan.differences if not _may_be_elsewhere(f)]
        if not (plan.loaded or plan.differences or plan.elsewhere or self._skipped):
            raise MismatchError(
                f"nothing in common: the snapshot holds the entries {sorted(self._entries)}, the "
                f"target has {sorted(self._into)}; nothing was loaded",
                tuple(
                    Difference(kind="missing", path=name, expected=_name_of(target))
                    for name, target in self._into.items()
                ),
            )
        return plan

    def _entry(self, name: str, target: Any) -> None:
        path = paths.segment(name)
        source = self._sources.get(path)
        entry = None if source is None else self._entries[source]
        if not self._tensors.has_below(path):
            if source is None and self._is_wanted(path, target):
                self._differ("missing", path, _name_of(target), "")
                self._plan.missing.append(path)
            return
        if isinstance(target, torch.nn.Module):
            self._module(path, entry, target)
        elif isinstance(target, torch.Tensor):
            self._tensors.match({path: target}, path)
        elif isinstance(target, (dict, list)) and (found := containers.tensors(target, path)):
            self._container(name, entry, source, target, found)
        elif entry is None or source is None or self._moved_into(path, source):
            raise ValueError(
                f"rename takes the entry {path!r} apart; it can only be loaded whole, under one "
                f"new name"
            )
        elif self._takes_whole(entry, paths.segment(source)):
            self._whole(name, source, entry, target)

    def _is_wanted(self, path: str, target: Any) -> bool:
        """Tells whether an entry that the snapshot lacks was asked for at all."""
        if not self._selection.is_partial:
            return True
        if isinstance(target, torch.nn.Module):
            names = modules.clean_names(target, list(target.state_dict())).values()
            return any(self._selection.takes(f"{path}/{paths.segment(name)}") for name in names)
        return self._selection.takes(path)

    def _takes_whole(self, entry: Entry, path: str) -> bool:
        """Tells whether all leaves of an entry are to be loaded, or none.

        Raises:
            ValueError: Some are and some are not.
        """
        if not self._selection.is_partial:
            return True
        leaves = [leaf.path for leaf in trees.leaves(entry.tree, path)]
        fixed = [
            leaf for leaf in leaves if not (entry.kind == "optimizer" and _is_hyperparameter(leaf))
        ]
        chosen = {self._selection.takes(leaf) for leaf in fixed or leaves}
        is_partial = not any(chosen) and any(map(self._selection.takes, leaves))
        if len(chosen) > 1 or is_partial:
            raise ValueError(
                f"include and exclude select a part of the entry {path!r}, which can only be "
                f"loaded whole; of an optimizer, hyper-parameters may be excluded"
            )
        return chosen == {True}

    def _whole(self, name: str, source: str, entry: Entry, target: Any) -> None:
        path = paths.segment(source)
        if isinstance(target, torch.optim.Optimizer):
            self._optimizer(source, entry, target, path)
            return
        restorer = self._restorer
        classes.check_tree(entry.tree, path)
        if self._is_many and has_state(target):
            self._tensors.make_like(containers.tensors(target.state_dict(), path))
        restorer.need(entry.tree, path)
        self._plan.loaded.extend(leaf.path for leaf in trees.leaves(entry.tree, path))
        if has_state(target):
            self._plan.then(
                lambda: target.load_state_dict(restorer.value(entry.tree, path)),
                last=is_last(target),
            )
        elif is_generator(target):
            self._generator(entry, target, path)
        else:
            self._plan.then(lambda: self._replace(name, target, entry, path))

    def _replace(self, name: str, target: Any, entry: Entry, path: str) -> None:
        value = self._restorer.value(entry.tree, path)
        self._into[name] = containers.update(target, value, strict=True)

    def _generator(self, entry: Entry, target: Any, path: str) -> None:
        tree = entry.tree
        if not isinstance(tree, dict) or "$generator" not in tree:
            self._differ("type", path, _name_of(target), f"a {entry.kind}")
            return
        state = tree["$generator"][1]
        self._plan.then(
            lambda: set_generator(target, self._restorer.value(state, path)) and None, last=True
        )

    def _module(self, path: str, entry: Entry | None, target: torch.nn.Module) -> None:
        raw = dict(target.state_dict())
        cleaned = modules.clean_names(target, list(raw))
        wanted = {f"{path}/{paths.segment(cleaned[name])}": name for name in raw}
        tensors = {
            leaf: raw[name]
            for leaf, name in wanted.items()
            if isinstance(raw[name], torch.Tensor) and not modules.is_extra_state(name)
        }
        through_hooks = modules.needs_hooks(target, raw)
        own = {leaf: name for leaf, name in wanted.items() if leaf not in tensors}
        restored = self._tensors.match(tensors, path, values=set(own), in_place=not through_hooks)
        if through_hooks:
            versions = entry.versions if entry is not None else {}
            names = {wanted[leaf]: leaf for leaf in restored if leaf in wanted}
            self._plan.then(lambda: self._through_hooks(target, names, versions))
            return
        for leaf in restored:
            if leaf in own:
                self._extra_state(target, own[leaf], leaf)

    def _through_hooks(
        self, target: torch.nn.Module, names: dict[str, str], versions: dict[str, list[str]]
    ) -> None:
        state: Any = OrderedDict(
            (name, self._tensors.restored(leaf)) for name, leaf in names.items()
        )
        modules.attach_versions(state, versions)
        target.load_state_dict(state, strict=False)

    def _extra_state(self, target: torch.nn.Module, name: str, leaf: str) -> None:
        owner = target.get_submodule(name.rpartition(".")[0])
        self._plan.then(lambda: owner.set_extra_state(self._tensors.restored(leaf)))

    def _container(
        self,
        name: str,
        entry: Entry | None,
        source: str | None,
        target: Any,
        found: dict[str, torch.Tensor],
    ) -> None:
        path = paths.segment(name)
        self._tensors.match(found, path)
        self._refuse_values(path, source)
        if entry is None or source is None:
            return
        if self._is_many:
            tree = _held_part(entry.tree, paths.segment(source), found, self._selection.renamed)
            entry = msgspec.structs.replace(entry, tree=tree)
        leaves = list(trees.leaves(entry.tree, paths.segment(source)))
        values = [leaf for leaf in leaves if leaf.tag != trees.TENSOR or leaf.is_inner]
        chosen = {self._selection.takes(leaf.path) for leaf in values} or {True}
        if len(chosen) > 1:
            raise ValueError(
                f"include and exclude select a part of the plain values of {path!r}; they are "
                f"loaded together or not at all"
            )
        if chosen == {False}:
            return
        for leaf in leaves:
            if leaf.tag == trees.TENSOR and not leaf.is_inner:
                self._tensors.keep_or_need(leaf, found)
            else:
                self._plan.loaded.append(leaf.path)
                self._restorer.need(leaf.node, leaf.path)
        self._update(name, entry, paths.segment(source), target)

    def _moved_into(self, path: str, source: str | None) -> list[trees.Leaf]:
        """Returns the leaves of other entries that go to the entry at ``path``."""
        own = None if source is None else paths.segment(source)
        return [leaf for leaf in self._tensors.below(path) if paths.entry_of(leaf.path) != own]

    def _update(self, name: str, entry: Entry, source: str, target: Any) -> None:
        classes.check_tree(entry.tree, source)
        strict = self._selection.strict

        def update() -> None:
            value = self._restorer.value(entry.tree, source)
            self._into[name] = containers.update(target, value, strict=strict)

        self._plan.then(update)

    def _refuse_values(self, path: str, source: str | None) -> None:
        """Refuses a rename that puts plain values of other entries into a container."""
        values = [leaf for leaf in self._moved_into(path, source) if not leaf.is_tensor]
        if values:
            raise ValueError(
                f"rename puts plain values into {path!r} ({values[0].path}, …); only tensors can "
                f"be renamed one by one"
            )

    def _optimizer(self, name: str, entry: Entry, target: torch.optim.Optimizer, path: str) -> None:
        if entry.kind != "optimizer":
            self._differ("type", path, _name_of(target), f"a {entry.kind}")
            return
        names = optimizers.names_of(target, self._into)
        items = {key: (at, node) for key, at, node in self._restorer.pairs(name)}
        fixed: dict[str, Any] = {
            key: self._restorer.value(items[key][1], items[key][0])
            for key in ("shapes", "names", "class")
            if key in items
        }
        groups_path, groups_node = _group_nodes(items)
        self._restorer.need(items["param_groups"][1], groups_path)
        fixed["param_groups"] = [
            {**group, "params": self._restorer.value(group["params"], f"{groups_path}/{number}")}
            for number, group in enumerate(groups_node)
        ]
        found = optimizers.differences(target, names, fixed, path, strict=self._selection.strict)
        self._plan.differences.extend(found)
        if not all(self._is_many and _may_be_elsewhere(difference) for difference in found):
            return
        if found:
            entry = msgspec.structs.replace(entry, tree=_own_part(entry.tree, path, names))
        state_path, state_node = next(
            (at, node) for key, at, node in trees.children(entry.tree, path) or () if key == "state"
        )
        self._reuse_state(target, names, state_node, state_path)
        self._restorer.need(state_node, state_path)
        self._plan.loaded.extend(leaf.path for leaf in trees.leaves(entry.tree, path))
        self._plan.then(lambda: self._place_optimizer(target, names, entry, path))

    def _reuse_state(
        self, target: torch.optim.Optimizer, names: optimizers.Names, node: Json, path: str
    ) -> None:
        """Fills the optimizer's own tensors where they fit, so that no second copy is needed.

        Where a sharded parameter has no state yet, the state is made spread like the parameter.
        """
        parameters = [value for group in target.param_groups for value in group["params"]]
        unshared = optimizers.unshared_state(target)
        saved = {key: (at, child) for key, at, child in trees.children(node, path) or ()}
        for name, parameter in zip(names.by_position, parameters, strict=True):
            below = f"{path}/{paths.segment(name)}"
            live = target.state.get(parameter) or {}
            for key, tensor in live.items():
                if id(tensor) in unshared and isinstance(key, str):
                    self._tensors.try_in_place(f"{below}/{paths.segment(key)}", tensor)
            if shards.is_dtensor(parameter) and name in saved:
                self._tensors.make_sharded(trees.leaves(saved[name][1], saved[name][0]), parameter)

    def _place_optimizer(
        self, target: torch.optim.Optimizer, names: optimizers.Names, entry: Entry, path: str
    ) -> None:
        saved = self._restorer.value(entry.tree, path)
        if self._selection.is_partial:
            saved["param_groups"] = [
                {
                    key: value
                    for key, value in group.items()
                    if key == "params"
                    or self._selection.takes(f"{path}/param_groups/{number}/{paths.segment(key)}")
                }
                for number, group in enumerate(saved["param_groups"])
            ]
        optimizers.place(target, names, saved)

    def _differ(self, kind: str, path: str, expected: str, actual: str) -> None:
        self._plan.differences.append(
            Difference(kind=kind, path=path, expected=expected, actual=actual)
        )


def _sources(entries: Mapping[str, Entry], selection: Selection) -> dict[str, str]:
    """Returns, for each entry of the target, the saved one whose leaves all go there unchanged."""
    if not selection.renames:
        return {paths.segment(name): name for name in entries}
    found: dict[str, list[str]] = {}
    for name, entry in entries.items():
        moved = set()
        for leaf in trees.leaves(entry.tree, paths.segment(name)):
            target, _, rest = selection.renamed(leaf.path).partition("/")
            moved.add((target, rest == leaf.path.partition("/")[2]))
        if len(moved) == 1:
            target, is_unchanged = moved.pop()
            if is_unchanged:
                found.setdefault(target, []).append(name)
    return {target: names[0] for target, names in found.items() if len(names) == 1}


def _group_nodes(items: Mapping[str, tuple[str, Json]]) -> tuple[str, list[dict[str, Json]]]:
    """Returns path and nodes of an optimizer's parameter groups.

    Raises:
        FormatError: The entry is not what an optimizer is saved as.
    """
    path, groups = items.get("param_groups", ("", None))
    is_valid = isinstance(groups, list) and all(
        isinstance(group, dict) and "params" in group for group in groups
    )
    if not is_valid or "state" not in items:
        raise FormatError(f"{path or 'the optimizer'}: groups or state are missing")
    return path, groups  # type: ignore[return-value]  # checked above


def _may_be_elsewhere(difference: Difference) -> bool:
    """Tells whether a difference is only that the snapshot has more than this rank's target."""
    is_group = difference.kind == "group" and difference.expected == optimizers.NOT_IN_GROUP
    return difference.kind == "unexpected" or is_group


def _held_part(tree: Json, path: str, held: Collection[str], renamed: Callable[[str], str]) -> Json:
    """Returns a container's tree without the tensors that this rank's target does not have."""

    def change(node: Json, at: str) -> Json:
        is_tensor = isinstance(node, dict) and trees.TENSOR in node and len(node) == 1
        return trees.DROP if is_tensor and renamed(at) not in held else node

    return trees.changed(tree, path, change)


def _own_part(tree: Json, path: str, names: optimizers.Names) -> Json:
    """Returns an optimizer's tree with the parameters that this rank's optimizer has."""
    known = set(names.by_position)

    def change(node: Json, at: str) -> Json:
        inside = at.split("/")[1:]
        if inside in (["state"], ["shapes"]):
            items = [(key, n) for key, _, n in trees.children(node, at) or () if key in known]
            return trees.with_items(node, items)
        if len(inside) == 3 and inside[0] == "param_groups" and inside[2] == "params":
            return [name for name in node if name in known] if isinstance(node, list) else node
        return node

    return trees.changed(tree, path, change)


def _is_hyperparameter(path: str) -> bool:
    return path.split("/")[1:2] == ["param_groups"]


def _name_of(target: object) -> str:
    return f"a {type(target).__name__}"
