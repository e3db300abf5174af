"""Modules: their tensors under clean names, whatever they are wrapped in.

Only wrappers that are really there are taken out of a name, never a part of it that happens to be
spelled alike, so ``decoder.module.weight`` of a model that has such a child keeps its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from waypost.errors import UnsupportedError

_WRAPPER_CHILDREN: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PARALLEL: Final = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def clean_names(module: torch.nn.Module, names: list[str]) -> dict[str, str]:
    """Returns the clean name of each of the module's own ``names``.

    Raises:
        UnsupportedError: Two names become one.
    """
    wrapped = _wrapper_prefixes(module)
    cleaned = {name: _clean(name, wrapped) for name in names}
    if wrapped and len(set(cleaned.values())) != len(cleaned):
        taken: dict[str, str] = {}
        for name, clean in cleaned.items():
            if clean in taken:
                raise UnsupportedError(
                    f"{clean}: both {taken[clean]} and {name} have this name without wrappers",
                    path=clean,
                )
            taken[clean] = name
    return cleaned


def state_of(module: torch.nn.Module) -> tuple[OrderedDict[str, Any], dict[str, list[str]]]:
    """Returns the module's state under clean names, and the versions of its parts that are not 1.

    Versions map a version number, as text, to the clean prefixes of the modules that have it.
    """
    raw: Mapping[str, Any] = module.state_dict()
    cleaned = clean_names(module, list(raw))
    versions: dict[str, list[str]] = {}
    wrapped = _wrapper_prefixes(module)
    for prefix, metadata in (getattr(raw, "_metadata", None) or {}).items():
        version = metadata.get("version", 1)
        if type(version) is int and version != 1:
            clean = _clean(f"{prefix}.", wrapped).rstrip(".") if prefix else prefix
            versions.setdefault(str(version), []).append(clean)
    return OrderedDict((cleaned[name], value) for name, value in raw.items()), versions


def attach_versions(state: OrderedDict[str, Any], versions: Mapping[str, list[str]]) -> None:
    """Gives ``state`` the ``_metadata`` that torch reads versions of modules from."""
    metadata: OrderedDict[str, dict[str, int]] = OrderedDict({"": {"version": 1}})
    for name in state:
        pieces = name.split(".")[:-1]
        for depth in range(1, len(pieces) + 1):
            metadata.setdefault(".".join(pieces[:depth]), {"version": 1})
    for version, prefixes in versions.items():
        for prefix in prefixes:
            metadata[prefix] = {"version": int(version)}
    state._metadata = metadata  # type: ignore[attr-defined]  # torch's own convention


def needs_hooks(module: torch.nn.Module, state: Mapping[str, object]) -> bool:
    """Tells whether loading into the module must go through its own ``load_state_dict``.

    True where user code takes part in saving or loading, so that filling the tensors of ``state``,
    the module's own ``state_dict()``, would bypass it or fill copies.
    """
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict and not isinstance(
        module, _PARALLEL
    ):
        return True
    if any(
        _overrides_load(child)
        or any(map(_is_foreign, child._load_state_dict_pre_hooks.values()))
        or any(map(_is_foreign, child._load_state_dict_post_hooks.values()))
        for child in module.modules()
    ):
        return True
    own = {
        tensor.untyped_storage()._cdata
        for tensor in (*module.parameters(), *module.buffers())
        if _is_plain(tensor)
    }
    return any(
        isinstance(value, torch.Tensor)
        and not is_extra_state(name)
        and _is_plain(value)
        and value.untyped_storage()._cdata not in own
        for name, value in state.items()
    )


def is_extra_state(name: str) -> bool:
    """Tells whether a name in a module's state stands for what ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_plain(tensor: torch.Tensor) -> bool:
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_ordinary and tensor.layout == torch.strided and not tensor.is_meta


def synchronised(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields clean name and tensor of what DistributedDataParallel keeps equal on all ranks.

    Parameters that it was told to ignore are left out; so are buffers that it does not broadcast.
    """
    wrapped = _wrapper_prefixes(module)
    for prefix, child in module.named_modules():
        if not isinstance(child, torch.nn.parallel.DistributedDataParallel):
            continue
        ignored = set(getattr(child, "parameters_to_ignore", ()))
        tensors = dict(child.module.named_parameters(remove_duplicate=False))
        if child.broadcast_buffers:
            tensors |= dict(child.module.named_buffers(remove_duplicate=False))
        below = f"{prefix}.module." if prefix else "module."
        for name, tensor in tensors.items():
            if name not in ignored:
                yield _clean(below + name, wrapped), tensor


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """Returns the clean name of each parameter, by the parameter's identity."""
    found = dict(module.named_parameters(remove_duplicate=False))
    cleaned = clean_names(module, list(found))
    names: dict[int, str] = {}
    for name, parameter in found.items():
        names.setdefault(id(parameter), cleaned[name])
    return names


def _is_foreign(hook: Any) -> bool:
    """Tells whether a hook on loading is user code.

    Those of torch's own sharding only bring parameters into their sharded form, in which
    ``state_dict()`` has given them.
    """
    function = getattr(hook, "hook", hook)
    return not str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _overrides_load(module: torch.nn.Module) -> bool:
    method = type(module)._load_from_state_dict
    return not getattr(method, "__module__", "").startswith("torch.nn.")


def _wrapper_prefixes(module: torch.nn.Module) -> frozenset[str]:
    found: set[str] = set()
    for name, child in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if isinstance(child, _PARALLEL):
            found.add(f"{prefix}module.")
        for wrapped in _WRAPPER_CHILDREN:
            if wrapped in child._modules:
                found.add(f"{prefix}{wrapped}.")
    return frozenset(found)


def _clean(name: str, wrapped: frozenset[str]) -> str:
    if not wrapped:
        return name
    kept: list[str] = []
    prefix = ""
    for piece in name.split("."):
        prefix += f"{piece}."
        if prefix not in wrapped:
            kept.append(piece)
    return ".".join(kept)
