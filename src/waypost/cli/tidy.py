"""``waypost prune``."""

from __future__ import annotations

import argparse

from waypost.cli import FAILED, OK, output
from waypost.manager.keeping import KeepEvery, Keeping, KeepLast
from waypost.manager.prune import PruneReport
from waypost.manager.prune import prune as prune_run


def prune(chosen: argparse.Namespace) -> int:
    """Removes snapshots that no policy keeps; without ``--yes`` only says so."""
    policies: list[Keeping] = []
    if chosen.keep_last is not None:
        policies.append(KeepLast(chosen.keep_last))
    if chosen.keep_every is not None:
        policies.append(KeepEvery(steps=chosen.keep_every))
    keep = None
    for policy in policies:
        keep = policy if keep is None else keep | policy
    report = prune_run(chosen.run, keep, debris=chosen.debris, dry_run=not chosen.yes)
    if chosen.json:
        output.print_json(_document(report))
        return FAILED if report.failed else OK
    verb = "would remove" if report.dry_run else "removed"
    for decision in report.kept:
        print(f"{'keep':<12} {decision.record.name}: {decision.reason}")
    for decision in report.removed:
        print(f"{verb:<12} {decision.record.name}: {decision.reason}")
    for decision in report.failed:
        print(f"{'failed':<12} {decision.record.name}: could not be removed")
    for url in report.debris:
        print(f"{verb:<12} {url}: left by a save that did not finish")
    if report.dry_run and (report.removed or report.debris):
        print("nothing was touched; add --yes to do it")
    return FAILED if report.failed else OK


def _document(report: PruneReport) -> dict[str, object]:
    return {
        "dry_run": report.dry_run,
        "kept": [{"name": d.record.name, "reason": d.reason} for d in report.kept],
        "removed": [{"name": d.record.name, "reason": d.reason} for d in report.removed],
        "failed": [{"name": d.record.name, "reason": d.reason} for d in report.failed],
        "debris": list(report.debris),
    }
