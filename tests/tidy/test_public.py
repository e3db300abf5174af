"""Every public name is there, is explained and says its types."""

import inspect
import re
import types
from collections.abc import Callable, Iterator

import waypost

Member = tuple[str, Callable[..., object]]

ANY = re.compile(r"\bAny\b")
BOUND = {"self", "cls"}


def public_objects() -> Iterator[tuple[str, object]]:
    """The public names that resolve; one test of its own is about those that do not."""
    for name in waypost.__all__:
        if hasattr(waypost, name):
            yield name, getattr(waypost, name)


def public_callables() -> Iterator[Member]:
    """Public functions, and the methods and properties that public classes of Waypost define."""
    for name, value in public_objects():
        if isinstance(value, types.FunctionType):
            yield name, value
        elif isinstance(value, type):
            yield from methods(name, value)


def methods(owner: str, cls: type) -> Iterator[Member]:
    for name in dir(cls):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if isinstance(value, types.FunctionType) and value.__module__.startswith("waypost"):
            yield f"{owner}.{name}", value


def is_explained(value: object) -> bool:
    """Whether `value` has a docstring of its own, not one inherited or made by `dataclass`."""
    text = value.__doc__ or ""
    if isinstance(value, type):
        text = vars(value).get("__doc__") or ""
        if text.startswith(f"{value.__name__}("):
            return False
    return bool(text.strip())


def test_all_has_no_duplicates_and_is_what_dir_shows() -> None:
    assert len(waypost.__all__) == len(set(waypost.__all__))
    assert set(waypost.__all__) <= set(dir(waypost))


def test_every_public_name_resolves() -> None:
    missing = [name for name in waypost.__all__ if not hasattr(waypost, name)]
    assert not missing, missing


def test_every_public_class_and_function_is_explained() -> None:
    silent = [
        name
        for name, value in public_objects()
        if isinstance(value, type | types.FunctionType | types.ModuleType)
        and not is_explained(value)
    ]
    assert not silent, silent


def test_every_public_method_is_explained() -> None:
    silent = []
    for name, value in public_callables():
        if "." not in name:
            continue
        owner, method = name.split(".")
        if not inspect.getdoc(getattr(getattr(waypost, owner), method)) and not value.__doc__:
            silent.append(name)
    assert not silent, silent


def test_no_public_signature_leaves_a_type_out_or_says_any() -> None:
    loose = []
    for name, value in public_callables():
        signature = inspect.signature(value)
        told = [signature.return_annotation]
        told += [p.annotation for key, p in signature.parameters.items() if key not in BOUND]
        if any(note is inspect.Signature.empty or ANY.search(str(note)) for note in told):
            loose.append(f"{name}{signature}")
    assert not loose, "\n" + "\n".join(loose)
