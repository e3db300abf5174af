"""Going on: which snapshot a run resumes from, and why others were passed over.

One rank looks at the run and all follow its plan: which snapshots to try, in which order. A
candidate whose bytes are damaged, on whichever rank, is passed over by all for the one before it.
One that does not fit the program is an error, since falling back would only hide a change of the
code; so is one that cannot be read just now, since it may be sound.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import MutableMapping, Sequence
from typing import SupportsIndex

import msgspec

from waypost.audit import catalog, naming
from waypost.audit.catalog import Record
from waypost.comm import Group
from waypost.comm.failures import is_damage
from waypost.errors import AlreadyExistsError, NotFoundError, ResumeError, WaypostError
from waypost.options import Settings
from waypost.snapshot.load import Loaded, Loading, load_at, within
from waypost.storage import Location

_log = logging.getLogger("waypost")

Resume = str | SupportsIndex


class ResumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on, as rank 0 sees the run; all ranks follow it.

    Attributes:
        candidates: URLs of snapshots to try, in order.
        falls_back: A damaged candidate is passed over; otherwise it is an error.
        must: A start without any is an error.
        skipped: What was passed over already: URL and reason.
    """

    candidates: list[str] = []
    falls_back: bool = False
    must: bool = False
    skipped: list[tuple[str, str]] = []


def plan(run: Location, records: Sequence[Record], wanted: Resume) -> ResumePlan:
    """Returns where to go on.

    Args:
        run: The run.
        records: Its snapshots.
        wanted: As ``resume`` of :class:`waypost.Checkpointer`.

    Raises:
        NotFoundError: A snapshot must be there and is not.
        AlreadyExistsError: A fresh start was asked for in a run that has snapshots.
        ValueError: ``wanted`` is nothing of the kind.
    """
    if wanted is False:
        if any(record.problem_code != "not-found" for record in records):
            raise AlreadyExistsError(
                f"{run.url}: resume=False, but the run holds {len(records)} snapshots; a fresh "
                f"start needs a folder of its own"
            )
        return ResumePlan()
    if wanted in ("auto", "must"):
        return _newest_usable(records, must=wanted == "must")
    if not isinstance(wanted, str):
        location = naming.step_in(run, _step(wanted))
    elif wanted == "latest":
        location = naming.latest_in(run)
    else:
        location = naming.locate(wanted)
    return ResumePlan(candidates=[location.url])


def follow(
    run: Location,
    chosen: ResumePlan,
    state: MutableMapping[str, object],
    loading: Loading,
    *,
    group: Group,
    settings: Settings,
) -> Loaded | None:
    """Loads the first usable candidate into ``state``; returns None for a fresh start. Collective.

    Raises:
        NotFoundError: There must be a snapshot, and there is none.
        ResumeError: Snapshots are there and none can be used.
        MismatchError: The snapshot does not fit the state; nothing was changed.
    """
    skipped = list(chosen.skipped)
    for url in chosen.candidates:
        find = functools.partial(within, run, url, "")
        try:
            return load_at(find, run, state, loading, group=group, settings=settings)
        except WaypostError as error:
            if not chosen.falls_back or not is_damage(error):
                raise
            _log.warning("skipped %s: %s", url, error)
            skipped.append((url, str(error)))
    if skipped:
        raise ResumeError(
            f"{run.url}: the run has snapshots, and none of them can be used; training was not "
            f"started from zero. Mend or remove them, or use another folder",
            tuple(skipped),
        )
    if chosen.must:
        raise NotFoundError(f"{run.url}: resume='must', but the run has no snapshot")
    return None


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


def _newest_usable(records: Sequence[Record], *, must: bool) -> ResumePlan:
    usable, damaged = catalog.candidates(records)
    for record in records:
        if record.problem is not None and (not usable or record.step > usable[0].step):
            _log.warning("skipped %s: %s", record.url, record.problem)
    given_up = [record.url for record in records if record.is_superseded]
    return ResumePlan(
        candidates=[record.url for record in usable],
        falls_back=True,
        must=must,
        skipped=[
            *((record.url, record.problem or "") for record in damaged),
            *((url, "given up by a roll-back") for url in given_up),
        ],
    )
