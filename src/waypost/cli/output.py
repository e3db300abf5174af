"""What commands print: tables for people, JSON for scripts, progress on long work.

Colour and progress need a terminal and the package ``rich``; without either, output is plain text.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from waypost.options import color_wanted

_INTEGER_BITS_MAX = 4096
"""Longer integers are printed in base 16: python refuses to print them in base 10."""


def number_text(value: float) -> str:
    """Returns a metric for people."""
    return f"{value:.6g}" if isinstance(value, float) else str(plain(value))


def print_json(document: object) -> None:
    """Prints a document; numbers that JSON lacks become strings."""
    json.dump(plain(document), sys.stdout, indent=1)
    print()


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] = ()
) -> None:
    """Prints a table.

    Args:
        headings: One for each column; one that begins with ``>`` is aligned to the right.
        rows: The cells.
        styles: For each row, a colour on a terminal.
    """
    if color_wanted(sys.stdout.isatty()) and _rich_table(headings, rows, styles):
        return
    rows = [[clean(cell) for cell in row] for row in rows]
    names = [heading.lstrip(">") for heading in headings]
    widths = [max(len(row[column]) for row in [names, *rows]) for column in range(len(headings))]
    for row in [names, *rows]:
        cells = [
            cell.rjust(width) if heading.startswith(">") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ]
        print("  ".join(cells).rstrip())


@contextlib.contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Shows a bar on the terminal while the block runs; gives what advances it, in bytes."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
    except ImportError:
        yield None
        return
    bar = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count: bar.update(task, advance=count)


def _rich_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]
) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    rows = [[clean(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(
            heading.lstrip(">"),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
        )
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else ""
        table.add_row(*map(escape, row), style=style)
    Console().print(table)
    return True


def clean(text: str) -> str:
    """Returns text without control characters, which a terminal would obey."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def plain(value: Any) -> Any:
    """Returns a value as JSON can hold it; what JSON lacks becomes text."""
    if type(value) is int and value.bit_length() > _INTEGER_BITS_MAX:
        return hex(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
