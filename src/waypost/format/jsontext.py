"""JSON documents, written one way and parsed strictly.

Parsing refuses what a careful reader must not accept: duplicate keys, NaN literals, sizes beyond
the limits, nesting beyond what the interpreter allows, trailing bytes, text that is not UTF-8.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeAlias

from waypost.errors import FormatError

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def dump(document: Json) -> bytes:
    """Returns ``document`` as compact UTF-8 text; floats keep every bit."""
    text = json.dumps(
        document, ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
    )
    return text.encode("utf-8", "surrogatepass")


def dump_pretty(document: Json) -> bytes:
    """Returns ``document`` as indented UTF-8 text, for documents that people read."""
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def parse(data: bytes, name: str, *, bytes_max: int) -> Json:
    """Returns the document in ``data``; ``name`` is used in messages.

    Raises:
        FormatError: Not UTF-8 or not JSON, duplicate keys, or beyond a limit.
    """
    if len(data) > bytes_max:
        raise FormatError(f"{name}: {len(data)} bytes, the limit is {bytes_max}")
    if not data:
        raise FormatError(f"{name}: the file is empty")
    try:
        return json.loads(  # type: ignore[no-any-return]  # the hooks admit nothing else
            data.decode("utf-8", "surrogatepass"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise FormatError(f"{name}: nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"{name}: not a valid JSON document: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
