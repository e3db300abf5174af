"""Going on: which snapshot a run resumes from, and why others were passed over.

The order of candidates is a pure function of the records. A candidate whose bytes are damaged is
passed over for the one before it. One that does not fit the program is an error, since falling back
would only hide a change of the code; so is one that cannot be read just now, since it may be sound.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from waypost.audit import catalog, naming
from waypost.audit.catalog import Record
from waypost.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    ResumeError,
)
from waypost.options import Settings
from waypost.snapshot.contents import Contents, open_contents
from waypost.snapshot.load import LoadReport, load_contents
from waypost.state import selection
from waypost.storage import Location

_log = logging.getLogger("waypost")

Resume = str | SupportsIndex


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on.

    Attributes:
        location: The snapshot, or None on a fresh start.
        contents: Its contents.
        report: What was loaded.
    """

    location: Location | None = None
    contents: Contents | None = None
    report: LoadReport | None = None


def resume(
    run: Location,
    records: Sequence[Record],
    state: MutableMapping[str, object],
    wanted: Resume,
    settings: Settings,
) -> Resumed:
    """Loads the snapshot to go on from into ``state``, or says that there is none.

    Raises:
        NotFoundError: It must be there and is not.
        ResumeError: Snapshots are there and none can be used.
        AlreadyExistsError: A fresh start was asked for in a run that has snapshots.
        MismatchError: The snapshot does not fit the state; nothing was changed.
    """
    if wanted is False:
        if any(record.problem_code != "not-found" for record in records):
            raise AlreadyExistsError(
                f"{run.url}: resume=False, but the run holds {len(records)} snapshots; a fresh "
                f"start needs a folder of its own"
            )
        return Resumed()
    if wanted in ("auto", "must"):
        return _newest_usable(run, records, state, settings, must=wanted == "must")
    if not isinstance(wanted, str):
        location = naming.step_in(run, _step(wanted))
    elif wanted == "latest":
        location = naming.latest_in(run)
    else:
        location = naming.locate(wanted)
    return _load(location, state, settings)


def _step(wanted: SupportsIndex) -> int:
    """Returns the step that ``resume`` gives as any kind of integer."""
    try:
        if isinstance(wanted, bool):
            raise TypeError
        return operator.index(wanted)
    except TypeError:
        raise ValueError(
            f"resume must be 'auto', 'must', 'latest', False, a step or a URL, not {wanted!r:.80}"
        ) from None


def _newest_usable(
    run: Location,
    records: Sequence[Record],
    state: MutableMapping[str, object],
    settings: Settings,
    *,
    must: bool,
) -> Resumed:
    usable, damaged = catalog.candidates(records)
    skipped = [(record.url, record.problem or "") for record in damaged]
    for record in records:
        if record.problem is not None and (not usable or record.step > usable[0].step):
            _log.warning("skipped %s: %s", record.url, record.problem)
    for record in usable:
        try:
            return _load(run / record.name, state, settings)
        except (CorruptionError, NotFoundError) as error:
            _log.warning("skipped %s: %s", record.url, error)
            skipped.append((record.url, str(error)))
    given_up = [record.url for record in records if record.is_superseded]
    skipped += [(url, "given up by a roll-back") for url in given_up]
    if skipped:
        raise ResumeError(
            f"{run.url}: the run has snapshots, and none of them can be used; training was not "
            f"started from zero. Mend or remove them, or use another folder",
            tuple(skipped),
        )
    if must:
        raise NotFoundError(f"{run.url}: resume='must', but the run has no snapshot")
    return Resumed()


def _load(location: Location, state: MutableMapping[str, object], settings: Settings) -> Resumed:
    contents = open_contents(location)
    report = load_contents(contents, state, selection.select(), verify=True, settings=settings)
    return Resumed(location, contents, report)
