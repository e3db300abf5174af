"""Optimizers: their state by parameter name, never by position.

Names come from the modules of the same state, else from the optimizer's own groups, else from
positions, which are then checked by the parameters' shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from waypost.errors import Difference, UnsupportedError
from waypost.state.modules import parameter_names

NOT_IN_GROUP: Final = "not in the group"
"""How a difference says that a parameter is on one side only."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an optimizer's parameters.

    Attributes:
        by_position: One name for each parameter, in the order of groups and parameters.
        source: ``"model"``, ``"optimizer"`` or ``"position"``: where they come from.
    """

    by_position: tuple[str, ...]
    source: str


def is_optimizer(value: object) -> bool:
    """Tells whether ``value`` is one of torch's optimizers, by its groups and its state."""
    return isinstance(value, torch.optim.Optimizer)


def names_of(optimizer: torch.optim.Optimizer, state: Mapping[str, object]) -> Names:
    """Returns the names of the optimizer's parameters.

    Args:
        optimizer: Any.
        state: The whole state, whose modules name the parameters. When an optimizer holds
            parameters of several modules, names begin with the module's entry name.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {
        entry: parameter_names(value)
        for entry, value in state.items()
        if isinstance(value, torch.nn.Module)
    }
    for names in known.values():
        if parameters and all(id(parameter) in names for parameter in parameters):
            return Names(tuple(names[id(parameter)] for parameter in parameters), "model")
    merged: dict[int, str] = {}
    for entry, names in known.items():
        for identity, name in names.items():
            merged.setdefault(identity, f"{entry}:{name}")
    if parameters and all(id(parameter) in merged for parameter in parameters):
        return Names(tuple(merged[id(parameter)] for parameter in parameters), "model")
    own = [name for group in optimizer.param_groups for name in group.get("param_names", ()) or ()]
    if parameters and len(own) == len(parameters) == len(set(own)):
        return Names(tuple(own), "optimizer")
    return Names(tuple(f"#{position}" for position in range(len(parameters))), "position")


def state_of(optimizer: torch.optim.Optimizer, names: Names, path: str) -> dict[str, Any] | None:
    """Returns the optimizer's state by name, or None when it is not made of groups and state.

    Raises:
        UnsupportedError: The state belongs to a parameter that no group holds.
    """
    packed = optimizer.state_dict()
    if not isinstance(packed, dict) or not {"state", "param_groups"} <= set(packed):
        return None
    by_name: dict[Any, Any] = {}
    for position, value in packed["state"].items():
        if isinstance(position, torch.Tensor):
            raise UnsupportedError(
                f"{path}: holds state for a parameter that is in none of its groups", path=path
            )
        known = type(position) is int and position < len(names.by_position)
        by_name[names.by_position[position] if known else position] = value
    groups = [
        {**group, "params": [names.by_position[position] for position in group["params"]]}
        for group in packed["param_groups"]
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {
        name: list(parameter.shape)
        for name, parameter in zip(names.by_position, parameters, strict=True)
    }
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {
        "state": by_name,
        "param_groups": groups,
        "shapes": shapes,
        "names": names.source,
        "class": type(optimizer).__name__,
        **({"extra": extra} if extra else {}),
    }


def differences(
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved: Mapping[str, Any],
    entry: str,
    *,
    strict: bool,
) -> list[Difference]:
    """Returns all ways in which the saved groups do not fit the optimizer's.

    Args:
        optimizer: The target.
        names: Its parameters' names.
        saved: ``param_groups``, ``shapes``, ``names`` and ``class``, as :func:`state_of` made
            them.
        entry: The entry's name, for paths.
        strict: Refuse the state of an optimizer of another class, even one with the same
            hyper-parameters.
    """
    found: list[Difference] = []
    if saved.get("class") != type(optimizer).__name__ and (
        strict or not _takes_hyperparameters(optimizer, saved["param_groups"])
    ):
        found.append(
            Difference(
                kind="group",
                path=f"{entry}/class",
                expected=f"the state of {type(optimizer).__name__}",
                actual=f"the state of {saved.get('class')}",
            )
        )
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        found.append(
            Difference(
                kind="group",
                path=f"{entry}/param_groups",
                expected=f"{len(optimizer.param_groups)} groups",
                actual=f"{len(groups)} groups",
            )
        )
    if (names.source == "position") != (saved.get("names") == "position"):
        found.append(
            Difference(
                kind="group",
                path=f"{entry}/param_groups",
                expected=f"parameters named by {names.source}",
                actual=f"parameters named by {saved.get('names')}",
            )
        )
        return found
    start = 0
    for number, group in enumerate(optimizer.param_groups):
        stop = start + len(group["params"])
        if number < len(groups):
            wanted = names.by_position[start:stop]
            path = f"{entry}/param_groups/{number}"
            found.extend(_group_differences(wanted, groups[number]["params"], path))
        start = stop
    found.extend(_shape_differences(optimizer, names, saved.get("shapes") or {}, entry))
    return found


def _takes_hyperparameters(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> bool:
    """Tells whether the saved groups have the names that the optimizer's groups have."""
    return all(
        set(live) == set(group) for live, group in zip(optimizer.param_groups, groups, strict=False)
    )


def unshared_state(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the identities of the state's tensors that share memory with nothing else."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [
        value
        for values in optimizer.state.values()
        if isinstance(values, dict)
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    ]
    counts = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    return {id(tensor) for tensor in tensors if counts[tensor.untyped_storage()._cdata] == 1}


def _group_differences(wanted: tuple[str, ...], saved: list[str], path: str) -> list[Difference]:
    missing = [
        Difference(kind="group", path=path, expected=f"parameter {name}", actual=NOT_IN_GROUP)
        for name in sorted(set(wanted) - set(saved))
    ]
    unexpected = [
        Difference(kind="group", path=path, expected=NOT_IN_GROUP, actual=f"parameter {name}")
        for name in sorted(set(saved) - set(wanted))
    ]
    return missing + unexpected


def _shape_differences(
    optimizer: torch.optim.Optimizer, names: Names, shapes: Mapping[str, list[int]], entry: str
) -> list[Difference]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        Difference(
            kind="shape",
            path=f"{entry}/state/{name}",
            expected=f"a parameter of shape {tuple(parameter.shape)}",
            actual=f"state for shape {tuple(shapes[name])}",
        )
        for name, parameter in zip(names.by_position, parameters, strict=True)
        if name in shapes and list(parameter.shape) != shapes[name]
    ]


def place(optimizer: torch.optim.Optimizer, names: Names, saved: Mapping[str, Any]) -> None:
    """Gives the optimizer the saved state, each tensor with the dtype that it was saved with.

    Args:
        optimizer: The target; its groups were checked by :func:`differences`.
        names: Its parameters' names.
        saved: What :func:`state_of` made, with all values restored.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = dict(zip(names.by_position, parameters, strict=True))
    position = {name: number for number, name in enumerate(names.by_position)}
    if _loads_itself(optimizer):
        packed = {
            "state": {position.get(name, name): value for name, value in saved["state"].items()},
            "param_groups": [
                {**group, "params": [position[name] for name in names.by_position[start:stop]]}
                for group, (start, stop) in zip(
                    saved["param_groups"], _group_ranges(optimizer), strict=True
                )
            ],
            **saved.get("extra", {}),
        }
        optimizer.load_state_dict(packed)
        _restore_dtypes(optimizer, by_name, saved["state"])
        return
    state: defaultdict[Any, Any] = defaultdict(dict)
    last = len(position)
    for name in sorted(saved["state"], key=lambda name: position.get(name, last)):
        value = saved["state"][name]
        parameter = by_name.get(name)
        state[name if parameter is None else parameter] = (
            value if parameter is None else _on_device(value, parameter)
        )
    groups = []
    for live, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kept = {"params": live["params"]}
        if "param_names" in live:
            kept["param_names"] = live["param_names"]
        groups.append({**live, **group, **kept})
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    method = type(optimizer).load_state_dict
    return (
        getattr(method, "__module__", "") != "torch._compile"
        and getattr(method, "__qualname__", "") != "Optimizer.load_state_dict"
    ) or bool(optimizer._optimizer_load_state_dict_pre_hooks)


def _group_ranges(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    start = 0
    for group in optimizer.param_groups:
        ranges.append((start, start + len(group["params"])))
        start += len(group["params"])
    return ranges


def _on_device(value: Any, parameter: torch.Tensor) -> Any:
    """Returns the state of one parameter, on its device; the CPU keeps 0-d counters."""
    if isinstance(value, torch.Tensor):
        is_counter = value.dim() == 0 and value.device.type == "cpu"
        return value if is_counter else value.to(parameter.device)
    if isinstance(value, dict):
        return {key: _on_device(item, parameter) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, parameter) for item in value)
    return value


def _restore_dtypes(
    optimizer: torch.optim.Optimizer, by_name: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> None:
    for name, values in saved.items():
        parameter = by_name.get(name)
        live = None if parameter is None else optimizer.state.get(parameter)
        if not isinstance(live, dict) or not isinstance(values, dict):
            continue
        for key, value in values.items():
            current = live.get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(current, torch.Tensor)
                and current.dtype != value.dtype
                and current.shape == value.shape
            ):
                live[key] = value.to(current.device)
