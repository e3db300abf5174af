"""What the demo prints and draws."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is drawn, no window is opened

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

import waypost
from waypost.demo.compare import Check
from waypost.demo.supervise import Strike
from waypost.demo.watch import Incarnation

IN_SAVE_COLOUR = "#d62728"
OTHER_COLOUR = "#7f7f7f"
TERM_COLOUR = "#ff7f0e"


def print_strikes(console: Console, strikes: list[Strike]) -> None:
    """Prints one line for each death of the trainer.

    ``newest`` is the step of the newest complete snapshot on disk at death, ``resumed`` the one
    that the next start went on from.
    """
    table = Table(title="Deaths and restarts (all by the same command)")
    for heading in ("#", "signal", "after s", "at step", "when", "newest", "resumed"):
        table.add_column(heading, justify="left" if heading in {"signal", "when"} else "right")
    for number, strike in enumerate(strikes, 1):
        table.add_row(
            str(number),
            strike.signal.name,
            f"{strike.age_s:.2f}",
            "" if strike.is_in_start else str(strike.step),
            strike.moment,
            str(strike.newest_step),
            str(strike.resumed_from),
        )
    console.print(table)


def print_checks(console: Console, checks: list[Check]) -> None:
    """Prints one line for each comparison, and below the first difference that each found."""
    table = Table("what", "how much", "result", title="Undisturbed and restarted, bit for bit")
    for check in checks:
        result = f"[green]{check.verdict}[/]" if check.problem is None else "[red]DIFFERENT[/]"
        table.add_row(check.title, check.extent, result)
    console.print(table)
    for check in checks:
        if check.problem is not None:
            console.print(f"[red]DIFFERENT[/] {check.title}: {_plain(check.problem)}")


def print_snapshots(console: Console, run: Path) -> None:
    """Prints what ``waypost ls`` knows of a run."""
    table = Table(title=f"waypost ls {run.parent.name}/{run.name}")
    for heading in ("snapshot", "step", "UTC", "bytes", "loss", "reason", ""):
        table.add_column(heading, no_wrap=heading == "snapshot")
    for record in waypost.snapshots(str(run)):
        loss = record.metrics.get("loss")
        table.add_row(
            record.name,
            str(record.step),
            f"{record.created:%H:%M:%S}" if record.created else "",
            f"{record.nbytes:,}",
            "" if loss is None else f"{loss:.4f}",
            _plain(record.reason or ""),
            _plain(record.problem or ("latest" if record.is_latest else "")),
        )
    console.print(table)


def draw_losses(
    path: Path, left: list[Incarnation], right: list[Incarnation], strikes: list[Strike]
) -> None:
    """Writes a picture of both loss curves with every death marked."""
    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=110)
    _draw_run(axes, left, colour="#9ecae1", width=4.0, label="undisturbed")
    _draw_run(axes, right, colour="#08306b", width=1.0, label="killed and restarted")
    seen: set[str] = set()
    for strike in strikes:
        label, colour = _mark(strike)
        axes.axvline(
            strike.step,
            color=colour,
            linewidth=0.9,
            linestyle="--",
            label=None if label in seen else label,
        )
        seen.add(label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(f"One training run, undisturbed and restarted {len(strikes)} times")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_run(axes: Axes, run: list[Incarnation], *, colour: str, width: float, label: str) -> None:
    # One line per incarnation, so that steps done twice lie on top of each other.
    for index, incarnation in enumerate(run):
        axes.plot(
            [step.number for step in incarnation.steps],
            [float.fromhex(step.loss) for step in incarnation.steps],
            color=colour,
            linewidth=width,
            label=label if index == 0 else None,
        )


def _mark(strike: Strike) -> tuple[str, str]:
    if strike.exit_code > 0:
        return "SIGTERM", TERM_COLOUR
    if strike.is_in_save:
        return "SIGKILL inside a save", IN_SAVE_COLOUR
    return "SIGKILL elsewhere", OTHER_COLOUR


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
