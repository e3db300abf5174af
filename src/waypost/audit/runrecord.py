"""``run.json``: the run's id, its starts, and the roll-backs that gave snapshots up."""

from __future__ import annotations

from typing import Any

import msgspec

from waypost import limits
from waypost.errors import FormatError, WaypostError
from waypost.format import jsontext, names
from waypost.storage import Location


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that started the run last."""

    host: str = ""
    pid: int = 0
    started: str = ""


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """A start that resumed from ``step`` although the run held later ones.

    Snapshots of earlier starts beyond that step are superseded from then on.
    """

    incarnation: int
    step: int


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run as a whole; ``incarnation`` counts its starts."""

    run: str
    incarnation: int
    owner: Owner = Owner()
    rollbacks: list[Rollback] = []

    def supersedes(self, incarnation: int, step: int) -> bool:
        """Tells whether a snapshot of an earlier start was given up by a roll-back."""
        return any(
            0 < incarnation < rollback.incarnation and step > rollback.step
            for rollback in self.rollbacks
        )


def read(run: Location) -> RunRecord:
    """Returns the record of a run.

    Raises:
        NotFoundError: There is none.
        FormatError: It is damaged.
        StorageError: It cannot be read.
    """
    name = (run / names.RUN).url
    data = run.storage.read((run / names.RUN).path, limits.POINTER_BYTES_MAX)
    document: Any = jsontext.parse(data, name, bytes_max=limits.POINTER_BYTES_MAX)
    try:
        return msgspec.convert(document, RunRecord)
    except msgspec.ValidationError as error:
        raise FormatError(f"{name}: not a record of a run: {error}") from error


def find(run: Location) -> RunRecord | None:
    """Returns the record of a run, or None when it is missing, damaged or unreadable."""
    try:
        return read(run)
    except WaypostError:
        return None


def encode(record: RunRecord) -> bytes:
    """Returns the bytes of ``run.json``."""
    return jsontext.dump_pretty(msgspec.to_builtins(record)) + b"\n"
