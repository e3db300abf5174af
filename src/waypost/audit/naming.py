"""Names of snapshots: a path or URL, or a run and a word, such as ``runs/a@latest``."""

from __future__ import annotations

import os

from waypost.audit import catalog
from waypost.errors import NotFoundError
from waypost.format import documents, names
from waypost.storage import Location, resolve
from waypost.storage.urls import Url


def locate(url: Url) -> Location:
    """Returns where the snapshot that ``url`` names is.

    A folder with ``@`` in its name that holds a snapshot wins over the reading as run and word.

    Raises:
        NotFoundError: The run has no such snapshot.
        ValueError: The word after ``@`` is not known.
    """
    location = resolve(url)
    if isinstance(url, Location):
        return location
    run_url, at, word = os.fsdecode(os.fspath(url)).rpartition("@")
    if not at or "/" in word or not run_url or is_snapshot(location):
        return location
    if word == "latest":
        return latest_in(resolve(run_url))
    if word.isascii() and word.isdigit():
        return step_in(resolve(run_url), int(word))
    if location.storage.list(location.path):
        return location
    raise ValueError(f"{os.fspath(url)!r}: after '@' goes 'latest' or a step")


def latest_in(run: Location) -> Location:
    """Returns the newest committed snapshot of a run.

    Raises:
        NotFoundError: It has none.
    """
    records = catalog.scan(run)
    newest = catalog.latest_of(records)
    if newest is None:
        broken = "".join(f"\n  {record.name}: {record.problem}" for record in records)
        raise NotFoundError(f"{run.url}: the run has no committed snapshot{broken}")
    return run / newest.name


def step_in(run: Location, step: int) -> Location:
    """Returns the snapshot of ``step`` in a run.

    Raises:
        NotFoundError: There is none.
    """
    found = [
        run / name.name
        for name in run.storage.list(run.path)
        if name.is_folder and names.parse_step(name.name) == step and is_snapshot(run / name.name)
    ]
    if not found:
        raise NotFoundError(f"{run.url}: the run has no snapshot of step {step}")
    return next((one for one in found if one.name == names.step_name(step)), found[0])


def is_snapshot(location: Location) -> bool:
    """Tells whether a manifest is there, whatever it says."""
    return location.storage.size((location / documents.MANIFEST).path) is not None
