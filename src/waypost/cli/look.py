"""``waypost ls`` and ``waypost show``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from waypost import clock
from waypost.audit import catalog, opening
from waypost.audit.catalog import Record
from waypost.audit.leaves import LeafInfo, leaf_infos
from waypost.audit.naming import locate
from waypost.cli import NOT_FOUND, OK, output
from waypost.errors import FormatError, NotFoundError, UnsupportedError
from waypost.format import values
from waypost.format.documents import Manifest
from waypost.sizes import size_text
from waypost.storage import resolve


def ls(chosen: argparse.Namespace) -> int:
    """Lists the snapshots of a run, by step."""
    run = resolve(chosen.run)
    records = catalog.scan(run)
    if not records and not run.storage.list(run.path):
        raise NotFoundError(f"{run.url}: no such run, or it is empty")
    if chosen.json:
        output.print_json([record_document(record) for record in records])
        return OK
    if not records:
        print(f"{run.url}: no snapshots")
        return NOT_FOUND
    rows = [_row(record) for record in records]
    styles = ["green" if r.is_latest else "" if r.is_committed else "red" for r in records]
    output.print_table(
        [">step", "created (UTC)", ">size", "flags", "metrics", "saved because"],
        rows,
        styles=styles,
    )
    return OK


def show(chosen: argparse.Namespace) -> int:
    """Shows what is in a snapshot: facts, entries and leaves."""
    location = locate(chosen.snapshot)
    documents = opening.open_documents(location)
    leaves = leaf_infos(
        documents.entries_of(0 if documents.world_size == 1 else None),
        chosen.glob or None,
        documents.structure.cuts,
    )
    stats = _stats(location.url, chosen.snapshot, leaves) if chosen.stats else {}
    facts = _facts(documents.manifest, location.url)
    if chosen.json:
        found = [{**asdict(leaf), **stats.get(leaf.path, {})} for leaf in leaves]
        output.print_json({**facts, "leaves": found})
        return OK
    for name, value in facts.items():
        if value not in (None, {}, ""):
            print(f"{name:<12} {output.clean(_fact_text(name, output.plain(value)))}")
    print()
    _print_leaves(leaves, stats)
    return OK


def record_document(record: Record) -> dict[str, object]:
    """Returns a record as it is printed for scripts."""
    document = asdict(record)
    created = document.pop("created")
    return {**document, "created": clock.timestamp(created) if created else None}


def _row(record: Record) -> list[str]:
    created = record.created.strftime("%Y-%m-%d %H:%M:%S") if record.created else "-"
    metrics = " ".join(f"{k}={output.number_text(v)}" for k, v in record.metrics.items())
    size = size_text(record.nbytes) if record.is_committed else "-"
    flags = "latest" if record.is_latest else "superseded" if record.is_superseded else ""
    if record.problem_code is not None:
        flags = "incomplete" if record.problem_code == "not-found" else "damaged"
    return [str(record.step), created, size, flags, metrics, record.reason or "-"]


def _facts(manifest: Manifest, url: str) -> dict[str, object]:
    return {
        "snapshot": url,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "bytes": manifest.bytes,
        "reason": manifest.reason,
        "run": manifest.run,
        "incarnation": manifest.incarnation,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "parent_step": manifest.parent.step if manifest.parent else None,
        "metrics": values.decode_plain(manifest.metrics, "metrics"),
        "metadata": _metadata(manifest),
        "environment": manifest.environment,
    }


def _metadata(manifest: Manifest) -> object:
    """Returns the metadata, as it is stored where it needs a class that is not here."""
    try:
        found: object = values.decode_plain(manifest.metadata, "metadata")
    except (FormatError, UnsupportedError):
        return manifest.metadata
    return found


def _fact_text(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return f"{value} ({size_text(value)})"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def _print_leaves(leaves: list[LeafInfo], stats: dict[str, dict[str, float]]) -> None:
    headings = ["leaf", "type", "shape", ">bytes", "scope"]
    names = sorted({name for found in stats.values() for name in found})
    rows: list[list[str]] = []
    for leaf in leaves:
        shape = "×".join(map(str, leaf.shape)) if leaf.shape else "-"
        row = [leaf.path, leaf.dtype, shape, str(leaf.nbytes) if leaf.nbytes else "-", leaf.scope]
        found = stats.get(leaf.path, {})
        rows.append(
            row + [output.number_text(found[name]) if name in found else "-" for name in names]
        )
    output.print_table([*headings, *(f">{name}" for name in names)], rows)


def _stats(url: str, name: str, leaves: list[LeafInfo]) -> dict[str, dict[str, float]]:
    """Reads tensors, with torch, and returns figures for each."""
    from waypost.snapshot.reader import open_snapshot
    from waypost.state.statistics import statistics

    snapshot = open_snapshot(name)
    total_bytes = sum(leaf.nbytes for leaf in leaves)
    found: dict[str, dict[str, float]] = {}
    with output.progress(f"reading {url}", total_bytes) as advance:
        for leaf in leaves:
            if leaf.kind == "tensor":
                tensor: Any = snapshot.read(leaf.path)
                found[leaf.path] = statistics(tensor)
            if advance is not None:
                advance(leaf.nbytes)
    return found
