"""``waypost demo``: its arguments, its directory and the order of events."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from waypost.demo import ENTRIES
from waypost.demo.supervise import Strike, plan_disturbances, train_disturbed, train_undisturbed
from waypost.demo.trainer import Course, TrainerError
from waypost.demo.watch import read_log
from waypost.errors import WaypostError

if TYPE_CHECKING:
    from rich.console import Console

MARKER = ".waypost-demo"
PICTURE = "loss.png"
COURSES = ("undisturbed", "restarted", "moved")
NEEDS = {
    "torch": "torch",
    "torchdata": "torchdata",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "rich": "rich",
}
EXIT_SAME, EXIT_DIFFERENT, EXIT_USAGE, EXIT_FAILED = 0, 1, 2, 5


def main(argv: list[str]) -> int:
    """Trains twice, compares, prints and draws; returns the exit code."""
    try:
        options = _parse(argv)
    except SystemExit as stop:
        return EXIT_SAME if stop.code in (0, None) else EXIT_USAGE
    missing = [name for module, name in NEEDS.items() if not importlib.util.find_spec(module)]
    if missing:
        print(f"The demo also needs: {', '.join(missing)}", file=sys.stderr)
        return EXIT_FAILED
    problem = _prepare(options.dir)
    if problem:
        print(problem, file=sys.stderr)
        return EXIT_USAGE
    try:
        return _run(options)
    except (TrainerError, WaypostError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="waypost demo",
        description="Train undisturbed, train again with kills and restarts, compare bit for bit.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("waypost-demo"),
        help="empty, new, or of an earlier demo, which is replaced (default: ./waypost-demo)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the kills")
    parser.add_argument("--kills", type=int, help="SIGKILLs, besides one SIGTERM (default: 12)")
    parser.add_argument("--steps", type=int, help="training steps (default: 600)")
    parser.add_argument("--quick", action="store_true", help="3 kills in 300 steps")
    parser.add_argument("--keep", action="store_true", help="keep the snapshots of both runs")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(2, 4),
        help="train a sharded job on that many ranks, kill it rank by rank, move it to others",
    )
    parser.add_argument(
        "--forget",
        choices=ENTRIES,
        metavar="ENTRY",
        help="leave ENTRY out of the state, to see what goes wrong",
    )
    options = parser.parse_args(argv)
    if options.ranks is not None:
        _set_ranks_defaults(parser, options)
        return options
    if options.kills is None:
        options.kills = 3 if options.quick else 12
    if options.steps is None:
        options.steps = 300 if options.quick else 600
    if not 0 <= options.kills <= 100:
        parser.error("--kills must be 0 to 100")
    if options.steps < 20 * (options.kills + 2):
        parser.error(f"{options.kills} kills need at least {20 * (options.kills + 2)} steps")
    return options


def _set_ranks_defaults(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.forget is not None:
        parser.error("--forget is of the demo on one process")
    if options.kills is None:
        options.kills = 2 if options.quick else 4
    if options.steps is None:
        options.steps = 60 if options.quick else 120
    if not 0 <= options.kills <= 100 or options.steps < 10 * (options.kills + 1):
        parser.error(f"{options.kills} kills need at least {10 * (options.kills + 1)} steps")


def _prepare(directory: Path) -> str | None:
    """Makes the directory ready; returns what is wrong with it, if anything."""
    marker = directory / MARKER
    if directory.exists() and not directory.is_dir():
        return f"{directory} is not a directory"
    if directory.is_dir() and any(directory.iterdir()) and not marker.is_file():
        return f"{directory} is not empty and not of an earlier demo; choose another --dir"
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text("The next `waypost demo` may replace what the demo wrote here.\n")
    (directory / PICTURE).unlink(missing_ok=True)
    for name in COURSES:
        if (directory / name).exists():
            shutil.rmtree(directory / name)
        (directory / name).mkdir()
    return None


def _run(options: argparse.Namespace) -> int:
    # Not at the top, as below: wrong arguments are told at once, and without the optional packages.
    from rich.console import Console

    console = Console()
    started_s = time.monotonic()
    if options.ranks is not None:
        is_same = _run_ranks(console, options)
        console.print(f"Files: {options.dir}. Took {time.monotonic() - started_s:.0f} s.")
        return EXIT_SAME if is_same else EXIT_DIFFERENT
    undisturbed, restarted = (
        Course(
            directory=(options.dir / name).absolute(),
            steps=options.steps,
            seed=options.seed,
            save_every=5,
            forget=options.forget,
        )
        for name in COURSES[:2]
    )
    console.print(f"Training {options.steps} steps, undisturbed.")
    train_undisturbed(undisturbed)
    console.print(f"Training again, with {options.kills} times SIGKILL and once SIGTERM.")
    strikes = _train_restarted(console, restarted, options)
    console.print()
    is_same = _report(console, undisturbed, restarted, strikes, options.dir / PICTURE)
    if is_same and not options.keep:
        for course in (undisturbed, restarted):
            shutil.rmtree(course.run)
    console.print(f"Files: {options.dir}. Took {time.monotonic() - started_s:.0f} s.")
    return EXIT_SAME if is_same else EXIT_DIFFERENT


def _run_ranks(console: Console, options: argparse.Namespace) -> bool:
    from waypost.demo import ranks as job
    from waypost.demo.report import print_checks

    count, steps = options.ranks, options.steps
    counts = (count, 1, 2 if count == 4 else 4)
    undisturbed, restarted, moved = (
        job.RanksCourse(folder=(options.dir / name).absolute(), seed=options.seed)
        for name in COURSES
    )

    def tell(kill: job.Kill) -> None:
        console.print(f"  SIGKILL to rank {kill.rank} after step {kill.step}")

    console.print(f"Training {steps} steps on {count} ranks, undisturbed.")
    job.train_undisturbed(undisturbed, count, steps)
    console.print(f"Training again, with {options.kills} kills, each of another rank.")
    job.train_killed(restarted, count, steps, options.kills, tell)
    console.print(f"Training again, on {' → '.join(map(str, counts))} ranks.")
    job.train_moved(moved, counts, steps)
    checks = job.compare(undisturbed, restarted, count, steps)
    checks.append(job.compare_moved(undisturbed, moved, counts))
    print_checks(console, checks)
    is_same = all(check.problem is None for check in checks)
    if is_same:
        console.print(
            f"On {count} ranks both runs are the same, bit for bit; on other numbers of ranks "
            f"losses agree within the tolerance."
        )
        if not options.keep:
            for course in (undisturbed, restarted, moved):
                shutil.rmtree(course.run)
    return is_same


def _train_restarted(console: Console, course: Course, options: argparse.Namespace) -> list[Strike]:
    plan = plan_disturbances(seed=options.seed, kills=options.kills, steps=options.steps)

    def tell(strike: Strike) -> None:
        console.print(f"  {strike.signal.name} at step {strike.step}, {strike.moment}")

    return train_disturbed(course, plan, seed=options.seed, on_strike=tell)


def _report(
    console: Console,
    undisturbed: Course,
    restarted: Course,
    strikes: list[Strike],
    picture: Path,
) -> bool:
    from waypost.demo.compare import compare_courses
    from waypost.demo.report import draw_losses, print_checks, print_snapshots, print_strikes

    print_strikes(console, strikes)
    checks = compare_courses(undisturbed, restarted, strikes)
    print_checks(console, checks)
    print_snapshots(console, restarted.run)
    draw_losses(picture, read_log(undisturbed.log), read_log(restarted.log), strikes)
    differences = sum(check.problem is not None for check in checks)
    if differences:
        console.print(f"{differences} of {len(checks)} comparisons failed.")
    else:
        console.print("Both runs are the same, bit for bit.")
    return differences == 0
