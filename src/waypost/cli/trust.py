"""``waypost verify`` and ``waypost resume-info``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from waypost.audit import catalog
from waypost.audit import verify as audit
from waypost.audit.naming import is_snapshot, locate
from waypost.audit.verify import Fraction, VerifyReport
from waypost.cli import CHECK_FAILED, OK, look, output
from waypost.errors import NotFoundError
from waypost.sizes import size_text
from waypost.storage import Location


def verify(chosen: argparse.Namespace) -> int:
    """Verifies a snapshot, or all of a run."""
    location = locate(chosen.target)
    reports = [_verify_one(one, size, chosen) for one, size in _targets(location)]
    if chosen.json:
        output.print_json([{**asdict(report), "ok": report.ok} for report in reports])
    else:
        for report in reports:
            _print_report(report, quick=chosen.quick)
    return OK if all(report.ok for report in reports) else CHECK_FAILED


def resume_info(chosen: argparse.Namespace) -> int:
    """Says which snapshot ``resume="auto"`` would take, and why others are passed over."""
    run = locate(chosen.run)
    records = catalog.scan(run)
    if not run.storage.list(run.path):
        raise NotFoundError(f"{run.url}: no such run; training would start at step 0 there")
    usable, damaged = catalog.candidates(records)
    skipped = [(record, record.problem or "") for record in records if not record.is_committed]
    skipped += [(record, "given up by a roll-back") for record in records if record.is_superseded]
    taken = None
    for record in usable:
        report = audit.verify(run / record.name, deep=chosen.deep)
        if report.ok:
            taken = record
            break
        skipped.append((record, report.problems[0].message))
    is_fresh = taken is None and not usable and not damaged
    if chosen.json:
        output.print_json(
            {
                "resume": look.record_document(taken) if taken else None,
                "fresh_start": is_fresh,
                "skipped": [
                    {"url": record.url, "step": record.step, "reason": reason}
                    for record, reason in skipped
                ],
            }
        )
    else:
        _print_resume(run, taken.url if taken else None, is_fresh=is_fresh)
        for record, reason in skipped:
            print(f"skipped      {record.url}: {reason}")
    return OK if taken is not None or is_fresh else CHECK_FAILED


def _targets(location: Location) -> list[tuple[Location, int]]:
    if is_snapshot(location):
        return [(location, 0)]
    records = [
        record for record in catalog.scan(location) if record.problem_code != NotFoundError.code
    ]
    if not records:
        raise NotFoundError(f"{location.url}: no snapshot and no run with snapshots")
    return [(location / record.name, record.nbytes) for record in records]


def _verify_one(location: Location, size: int, chosen: argparse.Namespace) -> VerifyReport:
    fraction = Fraction(*chosen.fraction) if chosen.fraction else None
    with output.progress(f"verifying {location.name}", size) as advance:
        return audit.verify(location, deep=not chosen.quick, fraction=fraction, advance=advance)


def _print_report(report: VerifyReport, *, quick: bool) -> None:
    if report.ok:
        what = "documents, headers and sizes"
        if not quick:
            plural = "" if report.chunks == 1 else "s"
            what = f"{size_text(report.nbytes)} in {report.chunks} chunk{plural}"
        print(f"ok       {report.url}: {what}")
    for problem in report.problems:
        print(f"{problem.kind:<8} {report.url}: {problem.message}")
    for file in report.debris:
        print(f"debris   {report.url}: {file} belongs to no snapshot")


def _print_resume(run: Location, taken: str | None, *, is_fresh: bool) -> None:
    if taken is not None:
        print(f"resume from  {taken}")
    elif is_fresh:
        print(f"{run.url}: no snapshots; training would start at step 0")
    else:
        print(f"{run.url}: there are snapshots and none can be used; resuming would be refused")
