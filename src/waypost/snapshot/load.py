"""Loading one snapshot into a live state: all of it is checked before the first byte moves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from waypost import collector, limits
from waypost.audit import opening
from waypost.audit.naming import is_snapshot, locate
from waypost.clock import SYSTEM_CLOCK
from waypost.comm import Agreement, Group, Subject, group_of, names_text
from waypost.errors import (
    Difference,
    NotFoundError,
    UnsupportedError,
)
from waypost.format import paths, trees
from waypost.format.documents import Manifest
from waypost.format.paths import Globs
from waypost.options import Options, Settings, divided
from waypost.options import resolve as resolve_options
from waypost.snapshot.contents import Contents, open_contents
from waypost.snapshot.reshard import Reshard, Resharded
from waypost.snapshot.sharing import Sharing
from waypost.snapshot.view import View
from waypost.state import describe, selection
from waypost.state.match import Plan, match
from waypost.state.restore import Restorer
from waypost.state.selection import Rename, Selection
from waypost.storage import Location, resolve
from waypost.storage.urls import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, on this rank.

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
    reshard: Reshard | None = None,
    options: Options | None = None,
) -> LoadReport:
    """Makes ``into`` hold what the snapshot at ``url`` holds. Collective.

    Everything is compared first; when anything differs, nothing is touched. Tensors are filled
    where they lie, containers are updated in place, and plain values are replaced in ``into``.
    Random streams are set last. It does not matter how many ranks saved, nor how they had spread
    their tensors; only what each rank has for itself needs as many ranks again, or ``reshard``.

    Args:
        url: A snapshot, or ``run@latest``, ``run@1200``.
        into: Entry names to targets. Entries of the snapshot that are not named here stay unread.
        strict: Leaves that only one side has are errors; otherwise they are reported.
        include: Globs of leaf paths to load, such as ``"model/layers.*"``; all if None.
        exclude: Globs of leaf paths to leave alone.
        rename: Maps prefixes of saved paths to those of the target, or a function of the path.
        cast: Convert elements to the target's dtype where it differs.
        verify: Compare the digest of every chunk that is read.
        process_group: The ranks that load together, as in :func:`waypost.save`.
        reshard: For entries that each rank has for itself, when another number of ranks loads: a
            function of the states of all ranks that saved, this rank, and the number of ranks, that
            returns the state for this rank.
        options: See :class:`~waypost.Options`.

    Raises:
        NotFoundError: No snapshot is there.
        MismatchError: The target does not fit; ``differences`` lists everything.
        CorruptionError: Stored bytes are not what was saved. A note says what was filled already.
        FormatError: The snapshot needs a newer Waypost, or is not one.
        UnsupportedError: It needs pickle, or a class that is not imported.
        PeerError: Other ranks failed; says which, and why.
        CoordinationTimeoutError: Other ranks did not take part in time; says which.
    """
    loading = Loading(
        selection=selection.select(
            strict=strict, include=include, exclude=exclude, rename=rename, cast=cast
        ),
        verify=verify,
        reshard=dict(reshard or {}),
        facts={
            "strict": str(strict),
            "include": str(include),
            "exclude": str(exclude),
            "cast": str(cast),
            "rename": "a function" if callable(rename) else str(rename),
            "verify": str(verify),
            "url": url.url if isinstance(url, Location) else os.fsdecode(os.fspath(url)),
        },
    )
    settings = resolve_options(options)
    group = group_of(process_group)
    for remaining in reversed(range(limits.RETRIES_MAX)):
        try:
            return load_at(
                lambda: locate(url), _near(url), into, loading, group=group, settings=settings
            ).report
        except NotFoundError:
            # Overwritten in between: what is there now is whole, and fills the target anew.
            is_alone = group.world_size == 1
            if not remaining or not is_alone or not is_snapshot(locate(url)):
                raise
    raise AssertionError("unreachable: the last round returns or raises")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How to load.

    Attributes:
        selection: Which leaves, under which names.
        verify: Compare digests.
        reshard: For entries that are per rank, as in :func:`load`.
        facts: What all ranks must say alike, by name.
    """

    selection: Selection = field(default_factory=selection.select)
    verify: bool = True
    reshard: Reshard = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, and from where."""

    location: Location
    manifest: Manifest
    report: LoadReport


def _near(url: Url) -> Location:
    """Returns a place in the storage that a snapshot's URL is in."""
    if isinstance(url, Location):
        return url
    run_url, at, word = os.fsdecode(os.fspath(url)).rpartition("@")
    return resolve(run_url if at and run_url and "/" not in word else url)


def load_at(
    find: Callable[[], Location],
    near: Location,
    into: MutableMapping[str, object],
    loading: Loading,
    *,
    group: Group,
    settings: Settings,
) -> Loaded:
    """Loads; see :func:`load`.

    Args:
        find: Returns the snapshot's place; called on rank 0.
        near: A place from which the other ranks get to it.
        into: The target.
        loading: How.
        group: The ranks.
        settings: All options, resolved.
    """
    return _Load(find, near, into, loading, group, settings).run()


class _Load:
    """One load, on one rank: a series of rounds in which all ranks take part."""

    def __init__(
        self,
        find: Callable[[], Location],
        near: Location,
        into: MutableMapping[str, object],
        loading: Loading,
        group: Group,
        settings: Settings,
    ) -> None:
        self._find = find
        self._near = near
        self._into = into
        self._loading = loading
        self._group = group
        self._settings = settings
        self._count = 0
        self._exchange_name = ""
        facts = {"entries": names_text(into), "reshard": names_text(loading.reshard)}
        subject = Subject(call="load", facts={**facts, **loading.facts})
        self._call = Agreement(group, subject, settings.timeout_s)

    def run(self) -> Loaded:
        """Loads; returns what was loaded."""
        started = SYSTEM_CLOCK.monotonic()
        location, manifest = self._locate()
        plan, sharing, resharded = self._plan(location, manifest)
        try:
            nbytes = self._read(sharing, resharded)
            self._call.share("place", lambda: None, _nothing)
            self._call.share("exchange", lambda: self._place(plan, sharing, resharded), _nothing)
        except BaseException as error:
            self._group.drop_exchange()
            error.add_note(
                "the load stopped while it was filling tensors in place: the target's tensors hold "
                "a mixture of old and new values now; load another snapshot into it before use"
            )
            raise
        self._call.share("depart", lambda: None, _nothing)
        self._call.close()
        report = LoadReport(
            url=location.url,
            step=manifest.step,
            loaded=(*plan.loaded, *resharded.names),
            missing=tuple(plan.missing),
            unexpected=tuple(plan.unexpected),
            cast=tuple(plan.cast),
            ignored=tuple(plan.ignored),
            nbytes=nbytes,
            seconds=SYSTEM_CLOCK.monotonic() - started,
        )
        return Loaded(location, manifest, report)

    def _locate(self) -> tuple[Location, Manifest]:
        """Returns the snapshot; rank 0 looks for it and reads its manifest, for all."""
        found: list[Location] = []

        def find(said: dict[int, None]) -> dict[str, Any]:
            location = self._find()
            found.append(location)
            return {
                "url": location.url,
                "path": location.path,
                "manifest": msgspec.json.encode(opening.read_manifest(location)),
            }

        said = self._call.share("describe", lambda: describe.check_state(self._into, "into"), find)
        location = found[0] if found else within(self._near, said["url"], said["path"])
        return location, msgspec.json.decode(said["manifest"], type=Manifest)

    def _plan(self, location: Location, manifest: Manifest) -> tuple[Plan, Sharing, Resharded]:
        """Returns what this rank will do, after all ranks have found that their target fits."""
        found: list[tuple[Plan, Sharing, Resharded]] = []

        def plan() -> dict[str, Any]:
            with collector.paused():
                contents = open_contents(location, manifest)
                found.append(self._match(contents))
            made, sharing, _ = found[0]
            return {
                "differences": [_encoded(difference) for difference in made.differences],
                "elsewhere": [_encoded(difference) for difference in made.elsewhere],
                "wanted": sharing.digest(),
                "shares": sharing.has_shared,
                "exchange": self._group.exchange_name,
            }

        agreed = self._call.share("plan", plan, _judge)
        made, sharing, resharded = found[0]
        self._exchange_name = agreed["exchange"] or self._call.name
        sharing.divide(
            is_shared=agreed["is_shared"],
            settings=divided(self._settings, self._group.local_size()),
        )
        return made, sharing, resharded

    def _match(self, contents: Contents) -> tuple[Plan, Sharing, Resharded]:
        world_size = contents.documents.world_size
        is_same = world_size == self._group.world_size
        view = View(contents, self._group.rank if is_same else None)
        chosen = self._loading.selection
        contents.check_entries(view.entries if chosen.renames else self._into)
        check_pickle(contents, self._settings, self._into)
        resharded = Resharded(
            contents, self._into, self._loading.reshard if not is_same else {}, self._settings
        )
        restorer = Restorer(view.entries, view.size, allow_pickle=self._settings.allow_pickle)
        refused = [] if is_same else _per_rank(view, self._into, chosen, resharded.names)
        skipped = {*resharded.names, *(difference.path for difference in refused)}
        plan = match(self._into, view.entries, restorer, chosen, self._group.ranks, skipped=skipped)
        plan.differences.extend(_world_difference(d, world_size, self._group) for d in refused)
        return plan, Sharing(view, restorer.targets, self._group, self._settings), resharded

    def _read(self, sharing: Sharing, resharded: Resharded) -> int:
        def read() -> None:
            with collector.paused():
                self._count = sharing.read(verify=self._loading.verify, advance=self._call.progress)
            resharded.read(self._group)

        self._call.share("read", read, _nothing)
        return self._count

    def _place(self, plan: Plan, sharing: Sharing, resharded: Resharded) -> None:
        sharing.exchange(self._exchange_name, self._call.progress)
        plan.place()
        resharded.place()


def within(near: Location, url: str, path: str) -> Location:
    """Returns a place that another rank has named, in the storage of ``near`` if it is there."""
    for candidate in (Location(near.storage, path), near / url.rpartition("/")[2]):
        if candidate.url == url:
            return candidate
    return resolve(url)


def _judge(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns, on rank 0, whether and how ranks share what they read; raises what does not fit."""
    differences = dict.fromkeys(tuple(d) for one in said.values() for d in one["differences"])
    elsewhere = [{tuple(d) for d in one["elsewhere"]} for one in said.values()]
    first = dict.fromkeys(tuple(d) for d in said[0]["elsewhere"])
    nowhere = [d for d in first if all(d in found for found in elsewhere)]
    found = [Difference(kind=k, path=p, expected=e, actual=a) for k, p, e, a in differences]
    found += [Difference(kind=k, path=p, expected=e, actual=a) for k, p, e, a in nowhere]
    Plan(differences=found).check()
    is_alike = len({one["wanted"] for one in said.values()}) == 1
    exchanges = {one["exchange"] for one in said.values()}
    return {
        "is_shared": is_alike and any(one["shares"] for one in said.values()),
        "exchange": exchanges.pop() if len(exchanges) == 1 else "",
    }


def _encoded(difference: Difference) -> tuple[str, str, str, str]:
    return difference.kind, difference.path, difference.expected, difference.actual


def _nothing(said: dict[int, None]) -> None:
    del said


def _per_rank(
    view: View,
    into: Iterable[str],
    chosen: Selection,
    resharded: Iterable[str],
) -> list[Difference]:
    """Returns what is wanted of the snapshot that each rank that saved it has for itself."""
    found: list[Difference] = []
    known = set(resharded)
    for name, entry in view.entries.items():
        path = paths.segment(name)
        if name not in into or name in known:
            continue
        if entry.scope == "per_rank":
            if any(chosen.takes(leaf.path) for leaf in trees.leaves(entry.tree, path)):
                found.append(Difference(kind="ranks", path=name))
            continue
        own = [leaf.path for leaf in trees.leaves(entry.tree, path) if leaf.tag == trees.PER_RANK]
        if any(map(chosen.takes, own)):
            found.append(Difference(kind="ranks", path=name, expected=", ".join(own[:3])))
    return found


def _world_difference(difference: Difference, world_size: int, group: Group) -> Difference:
    what = f" ({difference.expected})" if difference.expected else ""
    return Difference(
        kind="ranks",
        path=difference.path,
        expected=f"saved by {world_size} ranks, each for itself{what}",
        actual=f"loaded by {group.world_size}; load with as many ranks, leave it out, or pass "
        f"reshard={{{difference.path!r}: function}}",
    )


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
