"""The command line: looking at runs and snapshots from a shell.

It needs neither torch nor the code that wrote them. Exit codes: 0 fine; 1 a check failed; 2 wrong
usage; 3 not found; 4 damaged or not understood; 5 any other error.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

OK, CHECK_FAILED, USAGE, NOT_FOUND, DAMAGED, FAILED = range(6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    from waypost.cli import parser

    _prepare_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["demo"]:
        return _demo(words[1:])
    chosen = parser.build().parse_args(words)
    return _run(chosen)


def _prepare_output() -> None:
    """Makes output work that was closed by the caller, or cannot hold every character."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(chosen: argparse.Namespace) -> int:
    from waypost.errors import CorruptionError, FormatError, NotFoundError, WaypostError

    module, name = chosen.command.split(".")
    command = getattr(importlib.import_module(f"waypost.cli.{module}"), name)
    try:
        code: int = command(chosen)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe, such as `head`, has seen enough
        return OK
    except KeyboardInterrupt:
        return 130
    except NotFoundError as error:
        return _complain(error, NOT_FOUND)
    except (CorruptionError, FormatError) as error:
        return _complain(error, DAMAGED)
    except ValueError as error:
        return _complain(error, FAILED if isinstance(error, WaypostError) else USAGE)
    except (WaypostError, OSError) as error:
        return _complain(error, FAILED)
    return code


def _demo(words: list[str]) -> int:
    try:
        from waypost.demo import run
    except ImportError as error:
        return _complain(f"the demonstration needs 'waypost[demo]': {error}", FAILED)
    return run(words)


def _complain(what: object, code: int) -> int:
    print(f"waypost: {what}", file=sys.stderr)
    return code
