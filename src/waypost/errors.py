"""Every error that Waypost raises, in one tree.

Classes are grouped by what a handler would do, and each also inherits the builtin exception that
people already catch. A message says what went wrong, where (leaf, rank, file), what was expected
and what was found, and what to do about it. ``code`` is stable and meant for programs.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import ClassVar


class WaypostError(Exception):
    """Root of all errors that Waypost raises on purpose."""

    code: ClassVar[str] = "waypost"


class NotFoundError(WaypostError, FileNotFoundError):
    """No snapshot, run or file is there under the name that was given."""

    code = "not-found"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "not found"


class LeafNotFoundError(WaypostError, KeyError):
    """The snapshot holds no leaf or entry of that name."""

    code = "leaf-not-found"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "leaf not found"


class AlreadyExistsError(WaypostError, FileExistsError):
    """A committed snapshot is already there and ``overwrite`` was not given."""

    code = "already-exists"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "already exists"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which a target and a snapshot disagree.

    ``kind`` is one of ``missing`` (the target has it, the snapshot does not), ``unexpected`` (the
    snapshot has it, the target does not), ``shape``, ``dtype``, ``type``, ``group``, ``tie``, or
    ``ranks`` (ranks differ from one another; ``expected`` and ``actual`` say who has what).
    """

    kind: str
    path: str
    expected: str = ""
    actual: str = ""

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"missing     {self.path}: the target wants {self.expected}"
        if self.kind == "unexpected":
            return f"unexpected  {self.path}: the snapshot holds {self.actual}"
        if self.kind == "ranks":
            both = ", ".join(filter(None, (self.expected, self.actual)))
            return f"ranks       {self.path}: {both}"
        return f"{self.kind:<11} {self.path}: target {self.expected}, snapshot {self.actual}"


class MismatchError(WaypostError, ValueError):
    """The target does not fit the snapshot; nothing was changed.

    ``differences`` lists all of them, not only the first.
    """

    code = "mismatch"
    _shown_max: ClassVar[int] = 50

    def __init__(self, message: str, differences: tuple[Difference, ...] = ()) -> None:
        lines = [message, *(f"  {difference}" for difference in differences[: self._shown_max])]
        if len(differences) > self._shown_max:
            lines.append(f"  … and {len(differences) - self._shown_max} more (see .differences)")
        super().__init__("\n".join(lines))
        self.differences = differences


class CorruptionError(WaypostError):
    """Stored bytes are not the bytes that were saved."""

    code = "corruption"

    def __init__(
        self, message: str, *, file: str = "", leaf: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf
        self.offset = offset


class FormatError(WaypostError):
    """A file is not what the specification allows, or needs a feature that is not known here."""

    code = "format"


class UnsupportedError(WaypostError, TypeError):
    """A leaf cannot be stored and restored exactly; ``path`` names it."""

    code = "unsupported"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CommitConflictError(WaypostError):
    """Another writer committed, or owns, the place that this attempt wanted."""

    code = "commit-conflict"


class AlreadyOwnedError(CommitConflictError):
    """A live process already writes to the run."""

    code = "already-owned"


class CommitUnknownError(WaypostError):
    """The answer to a commit was lost and could not be found out; nothing was deleted."""

    code = "commit-unknown"


class FencedError(CommitConflictError):
    """A newer incarnation of the run has taken over; this one must not write any more."""

    code = "fenced"


class StorageError(WaypostError, OSError):
    """The storage refused or failed an operation.

    ``retryable`` is true when the same call may succeed later without a human.
    """

    code = "storage"

    def __init__(
        self, message: str, *, number: int = errno.EIO, retryable: bool = False, path: str = ""
    ) -> None:
        super().__init__(number, message)
        self.path = path
        self.retryable = retryable

    def __str__(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else super().__str__()


class StorageFullError(StorageError):
    """The storage has no room; ``needed_bytes`` and ``free_bytes`` say how much is lacking."""

    code = "storage-full"

    def __init__(
        self,
        message: str,
        *,
        number: int = errno.ENOSPC,
        path: str = "",
        needed_bytes: int,
        free_bytes: int | None,
    ) -> None:
        super().__init__(message, number=number, retryable=True, path=path)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class PeerError(WaypostError):
    """Other ranks failed; ``errors`` maps each failed rank to what it said."""

    code = "peer"

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


class CoordinationTimeoutError(WaypostError, TimeoutError):
    """Ranks did not answer within the stated time; ``missing`` names them."""

    code = "coordination-timeout"

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class ClosedError(WaypostError, ValueError):
    """The object was closed before the call."""

    code = "closed"


class ResumeError(WaypostError):
    """A run holds snapshots, and none of them can be used; training did not start from zero.

    ``skipped`` lists each snapshot's URL with the reason why it cannot be used.
    """

    code = "resume"

    def __init__(self, message: str, skipped: tuple[tuple[str, str], ...] = ()) -> None:
        lines = [message, *(f"  {url}: {reason}" for url, reason in skipped)]
        super().__init__("\n".join(lines))
        self.skipped = skipped


class Preempted(WaypostError, SystemExit):
    """A signal asked the job to stop; its state was saved first.

    Left uncaught, the process ends with exit status 128 + ``signal``.
    """

    code: int  # type: ignore[assignment, misc]  # SystemExit.code is the exit status

    def __init__(self, message: str, *, signal: int, step: int, url: str) -> None:
        super().__init__(message)
        self.code = 128 + signal
        self.signal = signal
        self.step = step
        self.url = url

    def __str__(self) -> str:
        return str(self.args[0])
