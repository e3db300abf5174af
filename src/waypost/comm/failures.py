"""Errors on their way between ranks, as JSON."""

from __future__ import annotations

import builtins
import errno
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from waypost import errors, limits
from waypost.errors import (
    CoordinationTimeoutError,
    CorruptionError,
    Difference,
    MismatchError,
    PeerError,
    ResumeError,
    StorageError,
    StorageFullError,
    WaypostError,
)

_TEXT_CHARACTERS_MAX: Final = 20_000


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells the others of an error.

    Attributes:
        kind: The class's name.
        text: Its message.
        differences: Of a mismatch: kind, path, expected, actual.
        ranks: Ranks that did not answer, or that failed, with what they said.
        needed_bytes: Of a full storage.
        free_bytes: Of a full storage.
        skipped: Of a run that cannot be resumed.
    """

    kind: str
    text: str
    differences: list[tuple[str, str, str, str]] = []
    ranks: dict[int, str] = {}
    needed_bytes: int = 0
    free_bytes: int | None = None
    skipped: list[tuple[str, str]] = []

    @property
    def is_own(self) -> bool:
        """Whether the rank itself failed, and not because of another one."""
        return self.kind not in (PeerError.__name__, CoordinationTimeoutError.__name__)

    @property
    def may_be_consequence(self) -> bool:
        """Whether the storage failed, as it does under one whose files others clear up."""
        found = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        return isinstance(found, type) and issubclass(found, OSError)

    @property
    def line(self) -> str:
        """Class and message."""
        return f"{self.kind}: {self.text}" if self.kind else self.text


def describe(error: BaseException) -> Failure:
    """Returns what other ranks are told of ``error``."""
    differences: list[tuple[str, str, str, str]] = []
    ranks: dict[int, str] = {}
    if isinstance(error, MismatchError):
        differences = [
            (item.kind, item.path, item.expected, item.actual)
            for item in error.differences[: limits.DIFFERENCES_MAX]
        ]
    elif isinstance(error, PeerError):
        ranks = error.errors
    elif isinstance(error, CoordinationTimeoutError):
        ranks = dict.fromkeys(error.missing, "")
    text = str(error)
    if isinstance(error, (MismatchError, ResumeError)):
        text = text.partition("\n")[0]
    return Failure(
        kind=type(error).__name__,
        text=text[:_TEXT_CHARACTERS_MAX] or type(error).__name__,
        differences=differences,
        ranks=ranks,
        needed_bytes=getattr(error, "needed_bytes", 0),
        free_bytes=getattr(error, "free_bytes", None),
        skipped=list(error.skipped) if isinstance(error, ResumeError) else [],
    )


def restore(failure: Failure) -> WaypostError:
    """Returns the error of something that all ranks share, such as the place of a snapshot.

    It has the class that it had where it was found, if that is one of Waypost's.
    """
    found: Any = getattr(errors, failure.kind, None)
    text = failure.text
    if found is MismatchError:
        differences = tuple(
            Difference(kind=kind, path=path, expected=expected, actual=actual)
            for kind, path, expected, actual in failure.differences
        )
        return MismatchError(text, differences)
    if found is PeerError:
        return PeerError(text, failure.ranks)
    if found is CoordinationTimeoutError:
        return CoordinationTimeoutError(text, tuple(failure.ranks))
    if found is StorageFullError:
        return StorageFullError(
            text, needed_bytes=failure.needed_bytes, free_bytes=failure.free_bytes
        )
    if found is ResumeError:
        return ResumeError(text, tuple(failure.skipped))
    if found is StorageError:
        return StorageError(text, number=errno.EIO)
    is_plain = isinstance(found, type) and issubclass(found, WaypostError)
    if is_plain and found not in (WaypostError, errors.Preempted):
        made: WaypostError = found(text)
        return made
    return PeerError(f"rank 0 failed: {failure.line}", {0: failure.line})


def peers(failed: Mapping[int, Failure], what: str) -> PeerError:
    """Returns the error for ranks whose own part failed."""
    said = {rank: failure.line for rank, failure in sorted(failed.items())}
    lines = [f"  rank {rank}: {text}" for rank, text in list(said.items())[:20]]
    if len(said) > len(lines):
        lines.append(f"  … and {len(said) - len(lines)} more ranks")
    ranks = ranks_text(tuple(said))
    return PeerError("\n".join([f"{what}: {ranks} failed", *lines]), said)


def note_failed(error: BaseException, failed: Mapping[int, Failure]) -> None:
    """Notes on a rank's own error which ranks failed in the same round, as all ranks know it."""
    error.__dict__["_failed"] = {rank: failure.line for rank, failure in failed.items()}


def is_damage(error: BaseException) -> bool:
    """Tells, alike on all ranks, whether stored bytes are to blame for a failed load."""
    failed: dict[int, str] | None = error.__dict__.get("_failed")
    if failed is None and isinstance(error, PeerError):
        failed = error.errors
    if failed is None:
        return isinstance(error, (CorruptionError, errors.NotFoundError))
    kinds = [f"{CorruptionError.__name__}:"]
    absent = f"{errors.NotFoundError.__name__}:"
    if failed.get(0, "").startswith(absent):
        kinds.append(absent)  # where only another rank finds nothing, its view may lag behind
    return bool(failed) and all(text.startswith(tuple(kinds)) for text in failed.values())


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Returns ``rank 3`` or ``ranks 1, 3, 5``."""
    shown = ", ".join(map(str, ranks[:20]))
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
