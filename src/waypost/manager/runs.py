"""What a run holds, as functions: all snapshots, or the newest."""

from __future__ import annotations

from waypost.audit import catalog
from waypost.audit.catalog import Record
from waypost.storage import resolve
from waypost.storage.urls import Url


def snapshots(run_url: Url) -> list[Record]:
    """Returns a record for each snapshot in a run, by step, usable or not; opens no data."""
    return catalog.scan(resolve(run_url))


def latest(run_url: Url) -> str | None:
    """Returns the URL of the newest committed snapshot of a run, or None when it has none."""
    newest = catalog.latest_of(catalog.scan(resolve(run_url)))
    return None if newest is None else newest.url
