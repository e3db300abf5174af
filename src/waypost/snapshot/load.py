"""Loading one snapshot into a live state: all of it is checked before the first byte moves."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

from waypost import collector, limits
from waypost.audit.naming import is_snapshot, locate
from waypost.clock import SYSTEM_CLOCK
from waypost.comm import group_of
from waypost.errors import CorruptionError, NotFoundError, StorageError, UnsupportedError
from waypost.format import paths, trees
from waypost.format.paths import Globs
from waypost.options import Options, Settings
from waypost.options import resolve as resolve_options
from waypost.snapshot.contents import Contents, open_contents
from waypost.state import describe, selection
from waypost.state.match import match
from waypost.state.restore import Restorer
from waypost.state.selection import Rename
from waypost.storage.urls import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        url: The snapshot.
        step: Its step.
        loaded: Paths of the leaves that were loaded.
        missing: Paths that the target has and the snapshot does not.
        unexpected: Paths that the snapshot has and the target does not.
        cast: Paths whose elements were converted to the target's type.
        ignored: Entries of the snapshot that were not asked for.
        nbytes: Bytes read from data files.
        seconds: From the call to the return.
    """

    url: str
    step: int | None
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    ignored: tuple[str, ...]
    nbytes: int
    seconds: float


def load(
    url: Url,
    into: MutableMapping[str, object],
    *,
    strict: bool = True,
    include: Globs = None,
    exclude: Globs = None,
    rename: Rename = None,
    cast: bool = False,
    verify: bool = True,
    process_group: object = None,
    options: Options | None = None,
) -> LoadReport:
    """Makes ``into`` hold what the snapshot at ``url`` holds.

    Everything is compared first; when anything differs, nothing is touched. Tensors are filled
    where they lie, containers are updated in place, and plain values are replaced in ``into``.
    Random streams are set last.

    Args:
        url: A snapshot, or ``run@latest``, ``run@1200``.
        into: Entry names to targets. Entries of the snapshot that are not named here stay unread.
        strict: Leaves that only one side has are errors; otherwise they are reported.
        include: Globs of leaf paths to load, such as ``"model/layers.*"``; all if None.
        exclude: Globs of leaf paths to leave alone.
        rename: Maps prefixes of saved paths to those of the target, or a function of the path.
        cast: Convert elements to the target's dtype where it differs.
        verify: Compare the digest of every chunk that is read.
        process_group: The ranks that load together; None for one process.
        options: See :class:`~waypost.Options`.

    Raises:
        NotFoundError: No snapshot is there.
        MismatchError: The target does not fit; ``differences`` lists everything.
        CorruptionError: Stored bytes are not what was saved. A note says what was filled already.
        FormatError: The snapshot needs a newer Waypost, or is not one.
        UnsupportedError: It needs pickle, or a class that is not imported.
    """
    group_of(process_group)
    chosen = selection.select(
        strict=strict, include=include, exclude=exclude, rename=rename, cast=cast
    )
    describe.check_state(into, "into")
    settings = resolve_options(options)
    for remaining in reversed(range(limits.RETRIES_MAX)):
        location = locate(url)
        try:
            contents = open_contents(location)
            return load_contents(contents, into, chosen, verify=verify, settings=settings)
        except NotFoundError:
            # Overwritten in between: what is there now is whole, and fills the target anew.
            if not remaining or not is_snapshot(location):
                raise
    raise AssertionError("unreachable: the last round returns or raises")


def load_contents(
    contents: Contents,
    into: MutableMapping[str, object],
    chosen: selection.Selection,
    *,
    verify: bool,
    settings: Settings,
) -> LoadReport:
    """Loads from an opened snapshot; see :func:`load`."""
    started = SYSTEM_CLOCK.monotonic()
    manifest = contents.documents.manifest
    contents.check_entries(contents.documents.entries if chosen.renames else into)
    check_pickle(contents, settings, into)
    restorer = Restorer(
        contents.documents.entries, contents.sizes(), allow_pickle=settings.allow_pickle
    )
    with collector.paused():
        plan = match(into, contents.documents.entries, restorer, chosen)
        nbytes = _read(contents, restorer, settings, verify=verify)
    plan.place()
    return LoadReport(
        url=contents.location.url,
        step=manifest.step,
        loaded=tuple(plan.loaded),
        missing=tuple(plan.missing),
        unexpected=tuple(plan.unexpected),
        cast=tuple(plan.cast),
        ignored=tuple(plan.ignored),
        nbytes=nbytes,
        seconds=SYSTEM_CLOCK.monotonic() - started,
    )


def _read(contents: Contents, restorer: Restorer, settings: Settings, *, verify: bool) -> int:
    try:
        return contents.read_pieces(restorer.targets, settings, verify=verify)
    except (CorruptionError, StorageError) as error:
        error.add_note(
            "the load stopped while it was filling tensors in place: the target's tensors hold "
            "a mixture of old and new values now; load another snapshot into it before use"
        )
        raise


def check_pickle(contents: Contents, settings: Settings, entries: Iterable[str]) -> None:
    """Refuses entries with pickled objects unless the caller allowed them.

    Raises:
        UnsupportedError: An entry has some; names it. Nothing was unpickled.
    """
    if settings.allow_pickle or "pickle" not in contents.documents.manifest.required:
        return
    found = contents.documents.entries
    for name in entries:
        if name in found and trees.holds_pickle(found[name].tree):
            raise UnsupportedError(
                f"{contents.location.url}: the entry {name!r} holds pickled objects; pass "
                f"Options(allow_pickle=True) if you trust whoever wrote it. Nothing was loaded",
                path=paths.segment(name),
            )
