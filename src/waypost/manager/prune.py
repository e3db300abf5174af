"""Removing snapshots and debris: the manifest first, made durable, then the data.

Only what Waypost made is removed: manifests, attempts' folders, its scratch files, and folders that
are empty then. A snapshot that somebody removed meanwhile is no error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from waypost.audit import catalog, runrecord
from waypost.audit.catalog import Record
from waypost.audit.runrecord import RunRecord
from waypost.core import commit
from waypost.errors import WaypostError
from waypost.format import documents, names
from waypost.manager import owner
from waypost.manager.keeping import Decision, Keeping, decide
from waypost.storage import Location, resolve
from waypost.storage.urls import Url

_log = logging.getLogger("waypost")

_SCRATCH = re.compile(r"\.(manifest\.json|LATEST|run\.json)\.[0-9]+-[0-9]+\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was, or with ``dry_run`` would be, removed and kept.

    Attributes:
        removed: Snapshots, newest first, with reasons.
        kept: Snapshots, newest first, with reasons.
        failed: Snapshots that should be removed and could not be; the log says why.
        debris: URLs of what failed saves left.
        dry_run: Nothing was touched.
    """

    removed: tuple[Decision, ...]
    kept: tuple[Decision, ...]
    failed: tuple[Decision, ...]
    debris: tuple[str, ...]
    dry_run: bool


def prune(
    run_url: Url, keep: Keeping | None = None, *, debris: bool = True, dry_run: bool = True
) -> PruneReport:
    """Removes the snapshots of a run that ``keep`` does not name, and what failed saves left.

    Args:
        run_url: The run.
        keep: A policy; None keeps all snapshots.
        debris: Also remove files that no manifest names.
        dry_run: Touch nothing, only say what would happen. This is the default.

    Raises:
        AlreadyOwnedError: A live process writes to the run.
    """
    run = resolve(run_url)
    if dry_run:
        return _prune(run, keep, debris=debris, dry_run=True)
    with owner.held(run):
        return _prune(run, keep, debris=debris, dry_run=False)


def _prune(run: Location, keep: Keeping | None, *, debris: bool, dry_run: bool) -> PruneReport:
    records = own_records(catalog.scan(run), runrecord.find(run))
    decisions = decide(records, keep, {})
    removed = tuple(decision for decision in decisions if not decision.keep)
    failed = () if dry_run else remove_decided(run, removed)
    return PruneReport(
        removed=tuple(decision for decision in removed if decision not in failed),
        failed=failed,
        kept=tuple(decision for decision in decisions if decision.keep),
        debris=sweep(run, dry_run=dry_run) if debris else (),
        dry_run=dry_run,
    )


def own_records(records: Sequence[Record], run: RunRecord | None) -> list[Record]:
    """Returns the records that retention may count: all but those that another run wrote.

    Snapshots that were saved into the run's folder by hand count as its own.
    """
    if run is None:
        return list(records)
    return [record for record in records if record.run in (None, run.run)]


def remove_decided(run: Location, removed: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Removes snapshots, one log line for each; returns those that could not be removed.

    A failure is a warning and stops nothing.
    """
    failed: list[Decision] = []
    for decision in removed:
        snapshot = run / decision.record.name
        try:
            remove_snapshot(snapshot)
        except WaypostError as error:
            _log.warning("%s could not be removed and will be tried again: %s", snapshot.url, error)
            failed.append(decision)
        else:
            _log.info("removed %s (%s)", snapshot.url, decision.reason)
    return tuple(failed)


def remove_snapshot(snapshot: Location) -> bool:
    """Removes a snapshot; returns False when its manifest was gone already.

    Raises:
        StorageError: Something could not be removed. If the manifest is gone, the rest is debris.
    """
    storage = snapshot.storage
    was_there = storage.remove((snapshot / documents.MANIFEST).path)
    if was_there:
        storage.settle(snapshot.path)
    _sweep_snapshot(snapshot, dry_run=False)
    return was_there


def sweep(run: Location, *, dry_run: bool = False) -> tuple[str, ...]:
    """Removes what failed saves left in a run; returns the URLs of what it was.

    Nobody else may be saving to the run.
    """
    found: list[str] = _sweep_scratch(run, dry_run=dry_run)
    for record in catalog.scan(run):
        if record.problem is not None and record.problem_code != "not-found":
            continue  # a damaged manifest may still be mended by hand: its data stays
        try:
            found += _sweep_snapshot(run / record.name, dry_run=dry_run)
        except WaypostError as error:
            _log.warning("%s: debris could not be removed: %s", record.url, error)
    return tuple(found)


def _sweep_snapshot(snapshot: Location, *, dry_run: bool) -> list[str]:
    found = _sweep_scratch(snapshot, dry_run=dry_run)
    found += commit.sweep_attempts(snapshot, dry_run=dry_run)
    return found + _sweep_empty(snapshot, dry_run=dry_run)


def _sweep_empty(snapshot: Location, *, dry_run: bool) -> list[str]:
    """Removes what is left of a snapshot's folders, if nothing is in them."""
    storage = snapshot.storage
    data = snapshot / names.DATA
    rest = [name.name for name in storage.list(snapshot.path)]
    step = names.parse_step(snapshot.name)
    is_ours = step is not None and snapshot.name == names.step_name(step)
    if not is_ours or rest not in ([], [names.DATA]) or storage.list(data.path):
        return []
    if not dry_run:
        storage.remove_folder(data.path)
        storage.remove_folder(snapshot.path)
    return [snapshot.url]


def _sweep_scratch(folder: Location, *, dry_run: bool) -> list[str]:
    found: list[str] = []
    for name in folder.storage.list(folder.path):
        if not name.is_folder and _SCRATCH.fullmatch(name.name):
            found.append((folder / name.name).url)
            if not dry_run:
                folder.storage.remove((folder / name.name).path)
    return found
