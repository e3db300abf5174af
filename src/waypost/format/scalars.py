"""Values of the standard library that are neither containers nor plain JSON.

Each has an exact text or number form. Decoders raise ``ValueError`` or ``TypeError`` on bad input;
the caller turns that into an error that names the leaf.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from waypost.format.jsontext import Json


def encode(value: Any) -> Json | None:
    """Returns the node of ``value``, or None when its exact type is not one of these."""
    found = _ENCODERS.get(type(value))
    if found is None:
        return None
    tag, encoder = found
    payload = encoder(value)
    return None if payload is None else {tag: payload}


def _zone_node(zone: tzinfo | None) -> Any:
    """Returns a node for a time zone; an empty list for none; None for a class not known."""
    if zone is None:
        return []
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        plain = timezone(offset)
        name = zone.tzname(None)
        return ["fixed", _delta(offset), None if name == plain.tzname(None) else name]
    if type(zone) is ZoneInfo and zone.key is not None:
        return ["zone", zone.key]
    return None


def _zone(node: Any) -> tzinfo | None:
    if not node:
        return None
    if node[0] == "zone":
        return ZoneInfo(node[1])
    _, offset, name = node
    delta = timedelta(*offset)
    if not delta and name is None:
        return timezone.utc  # noqa: UP017 - the identical object, whatever its alias
    return timezone(delta) if name is None else timezone(delta, name)


def _delta(value: timedelta) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _datetime(value: datetime) -> Any:
    zone = _zone_node(value.tzinfo)
    return None if zone is None else [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _time(value: time) -> Any:
    zone = _zone_node(value.tzinfo)
    return None if zone is None else [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _from_datetime(payload: Any) -> datetime:
    text, fold, zone = payload
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone(zone))


def _from_time(payload: Any) -> time:
    text, fold, zone = payload
    return time.fromisoformat(text).replace(fold=fold, tzinfo=_zone(zone))


def _complex(value: complex) -> Json:
    return struct.pack(">dd", value.real, value.imag).hex()


def _from_complex(payload: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(payload)))


_PATHS: Final[dict[str, type[PurePath]]] = {
    "path": Path,
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}


def _bytes(value: bytes | bytearray) -> Json:
    return base64.b64encode(value).decode("ascii")


def _from_bytes(payload: str) -> bytes:
    return base64.b64decode(payload, validate=True)


_ENCODERS: Final[dict[type, tuple[str, Callable[[Any], Json]]]] = {
    complex: ("$complex", _complex),
    bytes: ("$bytes", _bytes),
    bytearray: ("$bytearray", _bytes),
    range: ("$range", lambda value: [value.start, value.stop, value.step]),
    type(...): ("$ellipsis", lambda value: True),
    Decimal: ("$decimal", str),
    Fraction: ("$fraction", lambda value: [hex(value.numerator), hex(value.denominator)]),
    UUID: ("$uuid", lambda value: value.hex),
    date: ("$date", date.isoformat),
    datetime: ("$datetime", _datetime),
    time: ("$time", _time),
    timedelta: ("$timedelta", _delta),
    timezone: ("$timezone", _zone_node),
    ZoneInfo: ("$timezone", _zone_node),
    PosixPath: ("$path", lambda value: ["path", str(value)]),
    WindowsPath: ("$path", lambda value: ["path", str(value)]),
    PurePosixPath: ("$path", lambda value: ["posix", str(value)]),
    PureWindowsPath: ("$path", lambda value: ["windows", str(value)]),
}

DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$complex": _from_complex,
    "$bytes": _from_bytes,
    "$bytearray": lambda payload: bytearray(_from_bytes(payload)),
    "$range": lambda payload: range(*payload),
    "$ellipsis": lambda payload: ...,
    "$decimal": Decimal,
    "$fraction": lambda payload: Fraction(int(payload[0], 16), int(payload[1], 16)),
    "$uuid": lambda payload: UUID(hex=payload),
    "$date": date.fromisoformat,
    "$datetime": _from_datetime,
    "$time": _from_time,
    "$timedelta": lambda payload: timedelta(*payload),
    "$timezone": _zone,
    "$path": lambda payload: _PATHS[payload[0]](payload[1]),
}
