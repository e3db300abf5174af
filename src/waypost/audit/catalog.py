"""The snapshots of a run, known from their manifests alone.

What counts is a manifest that fits its digest. Everything else in the run's folder is foreign, or
left by a save that failed; it is reported where it looks like a snapshot, and never touched here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from waypost import clock, limits
from waypost.audit import opening, runrecord
from waypost.errors import FormatError, NotFoundError, StorageError, WaypostError
from waypost.format import jsontext, names, values
from waypost.format.documents import Manifest
from waypost.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one snapshot of a run without opening its data.

    Attributes:
        name: The folder's name.
        url: The snapshot's URL.
        step: Its step.
        created: When it was committed, UTC; None when that is not known.
        nbytes: Payload bytes.
        metrics: Names to numbers.
        reason: Why it was saved.
        incarnation: Which start of the run wrote it.
        attempt: Id of the attempt that was committed.
        run: Id of the run that wrote it.
        parent_step: Step of the snapshot that it goes on from.
        problem: Why it cannot be used, or None for a committed snapshot.
        problem_code: The ``code`` of the error behind ``problem``.
        problem_number: The system's error number behind ``problem``, if there is one.
        is_superseded: Whether a later start went back to an earlier step and so gave it up.
        is_latest: Whether it is the newest committed one.
    """

    name: str
    url: str
    step: int
    created: datetime | None = None
    nbytes: int = 0
    metrics: dict[str, int | float]
    reason: str | None = None
    incarnation: int = 0
    attempt: str | None = None
    run: str | None = None
    parent_step: int | None = None
    problem: str | None = None
    problem_code: str | None = None
    problem_number: int | None = None
    is_superseded: bool = False
    is_latest: bool = False

    @property
    def is_committed(self) -> bool:
        """Whether the manifest is there and whole."""
        return self.problem is None


def scan(run: Location) -> list[Record]:
    """Returns the records of all snapshots in a run, by step; the newest committed one is marked.

    A run that does not exist has none.
    """
    found = [
        _record(run / name.name, name.name, step)
        for name in run.storage.list(run.path)
        if name.is_folder and (step := names.parse_step(name.name)) is not None
    ]
    record_of_run = runrecord.find(run)
    if record_of_run is not None and record_of_run.rollbacks:
        found = [
            replace(
                record,
                is_superseded=record_of_run.supersedes(record.incarnation, record.step),
            )
            for record in found
        ]
    newest = latest_of(found)
    return [
        replace(record, is_latest=record is newest)
        for record in sorted(found, key=lambda record: (record.step, record.name))
    ]


def latest_of(records: Iterable[Record]) -> Record | None:
    """Returns the newest committed record, or None."""
    return next(iter(committed(records)), None)


def committed(records: Iterable[Record]) -> list[Record]:
    """Returns the committed records, newest first; those that a roll-back gave up come last."""
    return sorted(
        (record for record in records if record.is_committed),
        key=lambda record: (not record.is_superseded, record.step, record.name),
        reverse=True,
    )


def candidates(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Returns the records to try, newest first, and the damaged ones that are passed over.

    What a roll-back gave up is not tried.

    Raises:
        FormatError: A newer Waypost, or somebody's hand, wrote a snapshot that is not understood;
            going on from an older one would fork the run unseen.
        StorageError: A newer snapshot cannot be read at the moment.
    """
    usable = [record for record in committed(records) if not record.is_superseded]
    passed = [record for record in records if record.problem is not None]
    highest = usable[0].step if usable else -1
    for record in passed:
        if record.step > highest and record.problem_code == FormatError.code:
            raise FormatError(record.problem)
        if record.step > highest and record.problem_code == StorageError.code:
            raise StorageError(
                f"{record.problem}. If the snapshot is lost for good, remove {record.url}, and "
                f"training goes on from the one before it",
                number=record.problem_number or errno.EIO,
                path=record.url,
            )
    return usable, [record for record in passed if record.problem_code != NotFoundError.code]


def record_of(run: Location, name: str) -> Record | None:
    """Returns the record of one snapshot of a run by its folder's name, or None."""
    step = names.parse_step(name)
    if step is None or not run.storage.list((run / name).path):
        return None
    return _record(run / name, name, step)


def pointer(run: Location) -> str | None:
    """Returns the name that ``LATEST`` gives, or None when it gives none that makes sense."""
    try:
        data = run.storage.read((run / names.LATEST).path, limits.POINTER_BYTES_MAX)
        document = jsontext.parse(data, names.LATEST, bytes_max=limits.POINTER_BYTES_MAX)
    except WaypostError:
        return None
    name = document.get("snapshot") if isinstance(document, dict) else None
    return name if isinstance(name, str) and names.parse_step(name) is not None else None


def _record(location: Location, name: str, step: int) -> Record:
    number = None
    try:
        manifest = opening.read_manifest(location)
        if manifest.step != step:
            raise FormatError(
                f"the folder's name says step {step}, its manifest says step {manifest.step}"
            )
        return _from_manifest(manifest, location, name, step)
    except NotFoundError as error:
        problem, code = "incomplete: no manifest; a save failed, or is still going on", error.code
    except WaypostError as error:
        problem, code, number = str(error), error.code, getattr(error, "errno", None)
    return Record(
        name=name,
        url=location.url,
        step=step,
        metrics={},
        problem=problem,
        problem_code=code,
        problem_number=number,
    )


def _from_manifest(manifest: Manifest, location: Location, name: str, step: int) -> Record:
    metrics: Any = values.decode_plain(manifest.metrics, "metrics")
    return Record(
        name=name,
        url=location.url,
        step=step,
        created=clock.parse_timestamp(manifest.created),
        nbytes=manifest.bytes,
        metrics=metrics if isinstance(metrics, dict) else {},
        reason=manifest.reason,
        incarnation=manifest.incarnation,
        attempt=manifest.attempt,
        run=manifest.run,
        parent_step=manifest.parent.step if manifest.parent else None,
    )
