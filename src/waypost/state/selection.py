"""Which leaves of a snapshot a load takes, and what they are called in the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from waypost.format import paths
from waypost.format.paths import Globs

Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The caller's choices for one load.

    Attributes:
        takes: Tells whether a leaf path is to be loaded.
        renamed: Returns the target's path for a saved path.
        renames: Whether any path may change.
        strict: Missing and unexpected leaves are errors.
        cast: Elements are converted to the target's type.
        is_partial: Whether any leaf may be left out.
    """

    takes: Callable[[str], bool]
    renamed: Callable[[str], str]
    renames: bool
    strict: bool
    cast: bool
    is_partial: bool


def select(
    *,
    strict: bool = True,
    include: Globs = None,
    exclude: Globs = None,
    rename: Rename = None,
    cast: bool = False,
) -> Selection:
    """Returns the selection that the arguments of a load describe.

    Raises:
        TypeError: ``rename`` is neither a mapping of strings nor callable.
    """
    included = paths.matcher("**" if include is None else include)
    excluded = paths.matcher(exclude)

    def takes(path: str) -> bool:
        return included(path) and not excluded(path)

    return Selection(
        takes=takes,
        renamed=_renamer(rename),
        renames=rename is not None,
        strict=strict,
        cast=bool(cast),
        is_partial=include is not None or exclude is not None,
    )


def _checked(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(path: str) -> str:
        found: object = rename(path)
        if not isinstance(found, str) or not found:
            raise ValueError(f"rename gave {found!r:.80} for {path!r}; expected a path")
        return found

    return renamed


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda path: path
    if callable(rename):
        return _checked(rename)
    if not isinstance(rename, Mapping) or not all(
        isinstance(old, str) and isinstance(new, str) for old, new in rename.items()
    ):
        raise TypeError("rename must map saved path prefixes to new ones, or be callable")
    prefixes = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def renamed(path: str) -> str:
        for old, new in prefixes:
            if path.startswith(old):
                return new + path[len(old) :]
        return path

    return renamed
