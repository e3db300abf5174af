"""The words of the command line."""

from __future__ import annotations

import argparse

from waypost import options

_EPILOG = """exit codes: 0 fine; 1 a check failed; 2 wrong usage; 3 not found;
4 damaged or not understood; 5 any other error"""


def build() -> argparse.ArgumentParser:
    """Returns the parser; each command sets ``command`` to the module and name of its function."""
    parser = argparse.ArgumentParser(
        prog="waypost",
        description="Look at, verify and prune snapshots of training jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=options.software())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _ls(commands)
    _show(commands)
    _verify(commands)
    _resume_info(commands)
    _prune(commands)
    # The demonstration has a parser of its own: it is more than a look, and needs torch.
    commands.add_parser("demo", help="train, kill, resume and compare bit for bit")
    return parser


def _ls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("ls", help="list the snapshots of a run")
    command.add_argument("run", metavar="RUN")
    _json(command)
    command.set_defaults(command="look.ls")


def _show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("show", help="show what is in a snapshot")
    command.add_argument("snapshot", metavar="SNAPSHOT", help="a folder, RUN@latest or RUN@STEP")
    command.add_argument("glob", metavar="GLOB", nargs="*", help="leaves, such as 'model/**'")
    command.add_argument("--stats", action="store_true", help="read tensors; needs torch")
    _json(command)
    command.set_defaults(command="look.show")


def _verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("verify", help="compare every byte with its digest")
    command.add_argument("target", metavar="SNAPSHOT|RUN")
    depth = command.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="documents, headers and sizes only")
    depth.add_argument("--fraction", type=_fraction, metavar="n/t", help="part n of t of the data")
    _json(command)
    command.set_defaults(command="trust.verify")


def _resume_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "resume-info", help="say what resume='auto' would take, and why others are skipped"
    )
    command.add_argument("run", metavar="RUN")
    command.add_argument("--deep", action="store_true", help="read and compare all data")
    _json(command)
    command.set_defaults(command="trust.resume_info")


def _prune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "prune", help="remove old snapshots and what failed saves left (dry run without --yes)"
    )
    command.add_argument("run", metavar="RUN")
    command.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    command.add_argument("--keep-every", type=int, metavar="STEPS", help="keep these multiples")
    command.add_argument("--debris", action="store_true", help="also what failed saves left")
    command.add_argument("--yes", action="store_true", help="do it")
    _json(command)
    command.set_defaults(command="tidy.prune")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _fraction(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdigit() or not parts.isdigit():
        raise argparse.ArgumentTypeError(f"expected n/t, such as 1/10, not {text!r}")
    if not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"expected 1/t to t/t, not {text!r}")
    return int(part), int(parts)
