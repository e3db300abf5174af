"""Leaf paths: an entry's name and keys joined by ``/``, with every key told apart.

A string key stands for itself, with ``%``, ``/`` and control characters percent-encoded. A key of
another type is ``~`` and its JSON value, so that ``0``, ``"0"``, ``True`` and ``None`` differ. A
part of a composite leaf (the indices of a sparse tensor, say) is ``~:`` and the part's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from waypost import limits
from waypost.errors import FormatError

Globs: TypeAlias = str | Iterable[str] | None

_PLAIN = re.compile(r"[^~%/\x00-\x1f\x7f\ud800-\udfff][^%/\x00-\x1f\x7f\ud800-\udfff]*")
_SPECIAL = re.compile(r"[%/\x00-\x1f\x7f\ud800-\udfff]")
_RESERVED = "__metadata__"
_CROSSING_STARS_MAX = 4
"""Each may try every place of a path, for every place of the one before it."""


def segment(key: str) -> str:
    """Returns the path segment of a string key."""
    if _PLAIN.fullmatch(key) and key != _RESERVED:
        return key
    if key == "":
        return "%"
    if key == _RESERVED:
        return "%5F" + key[1:]
    text = _SPECIAL.sub(_percent, key)
    return "%7E" + text[1:] if text[0] == "~" else text


def key_segment(json_text: str) -> str:
    """Returns the path segment of a key that is not a string, from its JSON value."""
    return "~" + _SPECIAL.sub(_percent, json_text)


def part_path(path: str, part: str) -> str:
    """Returns the path of a part of the composite leaf at ``path``."""
    return f"{path}/~:{part}"


def leaf_of(path: str) -> str:
    """Returns the path of the leaf that the part at ``path`` belongs to."""
    return path.partition("/~:")[0]


def join(parent: str, piece: str) -> str:
    """Returns the path of ``piece``, a segment, below ``parent``.

    Raises:
        FormatError: The path is longer than the limit.
    """
    path = f"{parent}/{piece}"
    if len(path) > limits.PATH_CHARACTERS_MAX:
        raise FormatError(
            f"leaf path of {len(path)} characters, the limit is "
            f"{limits.PATH_CHARACTERS_MAX}: {path[:120]!r}…"
        )
    return path


def entry_of(path: str) -> str:
    """Returns the first segment of ``path``, the entry's."""
    return path.partition("/")[0]


def key_of(path: str) -> str:
    """Returns what a data file calls the leaf at ``path``: all but the entry's name.

    A leaf that is itself an entry keeps the entry's name.
    """
    entry, slash, rest = path.partition("/")
    return rest if slash else entry


def path_of(entry: str, key: str) -> str:
    """Returns the leaf path of what a data file of ``entry``, a segment, calls ``key``."""
    return entry if key == entry else f"{entry}/{key}"


def matcher(globs: Globs) -> Callable[[str], bool]:
    """Returns a function that tells whether a leaf path matches any of ``globs``.

    ``*`` and ``?`` stay within one segment, ``**`` crosses segments, ``[...]`` is a set. A glob
    without any of these also matches everything below what it names, so ``"model"`` means the whole
    entry. A sign that stands for itself is written in brackets: ``[*]``, ``[?]``, ``[[]``. No globs
    at all match nothing.
    """
    if globs is None:
        return lambda path: False
    patterns = [globs] if isinstance(globs, str) else list(globs)
    compiled = [_compile(pattern) for pattern in patterns]
    return lambda path: any(regex.fullmatch(path) for regex in compiled)


def _compile(glob: str) -> re.Pattern[str]:
    pattern = re.sub(r"\*{3,}", "**", re.sub(r"(\*\*/)+", "**/", glob))
    if pattern.count("**") > _CROSSING_STARS_MAX:
        raise ValueError(f"more than {_CROSSING_STARS_MAX} '**' in a pattern: {glob[:80]!r}")
    segments = [".*" if segment == "**" else _translate(segment) for segment in pattern.split("/")]
    text = "/".join(segments).replace("/.*/", "/(?:.*/)?")
    text = "(?:.*/)?" + text[3:] if text.startswith(".*/") else text
    below = "" if any(sign in glob for sign in "*?[") else "(?:/.*)?"
    try:
        return re.compile(f"(?s:{text}{below})")
    except re.error as error:
        raise ValueError(f"not a pattern of leaf paths: {glob!r}: {error}") from error


def _translate(segment: str) -> str:
    """Returns the expression for one segment of a glob.

    Between two stars the first place that fits is the right one, since no star leaves the segment;
    the expression is atomic there, so that it never tries all combinations.
    """
    if "**" in segment:
        return ".*".join(_translate(part) for part in segment.split("**"))
    first, *rest = (_translate_plain(part) for part in _split_stars(segment))
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(f"(?>[^/]*?{part})" for part in middle) + "[^/]*" + last


def _split_stars(segment: str) -> list[str]:
    """Splits at stars that do not stand in a set."""
    parts = [""]
    position = 0
    while position < len(segment):
        end = segment.find("]", position + 2) if segment[position] == "[" else -1
        if end > 0:
            parts[-1] += segment[position : end + 1]
            position = end + 1
        elif segment[position] == "*":
            parts.append("")
            position += 1
        else:
            parts[-1] += segment[position]
            position += 1
    return parts


def _translate_plain(part: str) -> str:
    """Returns the expression for a piece of a glob without stars."""
    pieces: list[str] = []
    position = 0
    while position < len(part):
        end = part.find("]", position + 2) if part[position] == "[" else -1
        if end > 0:
            inside = part[position + 1 : end].replace("\\", "\\\\")
            inside = re.sub(r"([\[&~|])", r"\\\1", inside)
            inside = "^" + inside[1:] if inside.startswith("!") else inside
            pieces.append(f"(?!/)[{inside}]")
            position = end + 1
        else:
            pieces.append("[^/]" if part[position] == "?" else re.escape(part[position]))
            position += 1
    return "".join(pieces)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode("utf-8", "surrogatepass"))
