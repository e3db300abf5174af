"""Blocks of code in documents, and how each kind is run."""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waypost import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "/scratch"
"""How documents write the folder in which their commands run."""

NOT_RUN = "no-run"
AS_FILE = "file="
"""A block of Python with this remark is a program: it is written to that file, and not run."""

SECONDS_MAX = 90
MODULE_PREFIX = "example_"
_FENCE = re.compile(r"^```(\S*) *(.*)$")
_SHOWN = re.compile(r"# -> (.*)$")
_ELISION = "..."

_VARYING = [
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"), "<time>"),
    (re.compile(r"(xxh3-128|blake3):[0-9a-f]+"), r"\1:<digest>"),
    (re.compile(r"\ba[0-9a-f]{16}\b"), "<attempt>"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "<id>"),
    (re.compile(r"\bhost=\S+"), "host=<host>"),
    (re.compile(r"\b(torch|python|numpy)=[\w.+]+"), r"\1=<version>"),
    (re.compile(r"\bgit_commit=\w+"), "git_commit=<commit>"),
    (re.compile(r"\bloss=[-+.e0-9]+"), "loss=<number>"),
    (re.compile(r"\bprocess \d+ on [\w.-]+"), "process <pid> on <host>"),
    (re.compile(r"\b\d+\.\d\d s\b"), "<duration>"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands behind that, its first line, its text."""

    language: str
    remark: str
    line: int
    text: str


def documents() -> list[Path]:
    """The documents whose examples are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened, lines = (fence[1], fence[2].strip(), number + 1), []
        elif fence and opened is not None:
            found.append(Block(*opened, "\n".join(lines) + "\n"))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{path}: a block is not closed"
    return found


def normal(text: str) -> list[str]:
    """The lines of an output without what differs from run to run; columns one space apart."""
    text = text.replace(os.path.realpath(Path.cwd()), FOLDER).replace(str(Path.cwd()), FOLDER)
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    lines = [re.sub(r"(?<=\S) {2,}", " ", line.rstrip()) for line in text.strip().splitlines()]
    return [line for line in lines if line]


def fits(expected: str, actual: str) -> bool:
    """Whether an output is the documented one; a line `...` stands for any lines."""
    return _fits(normal(expected), normal(actual))


def _fits(expected: list[str], actual: list[str]) -> bool:
    if not expected:
        return not actual
    if expected[0].strip() == _ELISION:
        return any(_fits(expected[1:], actual[skip:]) for skip in range(len(actual) + 1))
    if not actual or not _same_line(expected[0], actual[0]):
        return False
    return _fits(expected[1:], actual[1:])


def _same_line(expected: str, actual: str) -> bool:
    if not expected.endswith(_ELISION):
        return expected == actual
    return actual.startswith(expected.removesuffix(_ELISION))


def write_program(block: Block) -> None:
    """Writes a block that is a program where the commands that follow find it."""
    Path(block.remark.removeprefix(AS_FILE)).write_text(block.text, "utf-8")


def run_python(block: Block, path: Path, namespace: dict[str, Any]) -> None:
    """Executes a block; an expression with `# -> text` behind or below it must have that `repr`."""
    where = f"{path.name}:{block.line}"
    tree = ast.parse("\n" * (block.line - 1) + block.text, str(path))
    lines = block.text.splitlines()
    for statement in tree.body:
        end = (statement.end_lineno or 0) - block.line
        last, below = [*lines, ""][end : end + 2]
        shown = _SHOWN.search(last) or _SHOWN.match(below)
        if shown and isinstance(statement, ast.Expr):
            code = compile(ast.Expression(statement.value), str(path), "eval")
            actual = repr(eval(code, namespace))
            assert fits(shown[1], actual), f"{where}: {last.strip()!r} gives {actual}"
        else:
            exec(compile(ast.Module([statement], []), str(path), "exec"), namespace)


def namespace_of(path: Path) -> dict[str, Any]:
    """A namespace that is a module's, so that classes defined in a block can be found again."""
    module = types.ModuleType(f"{MODULE_PREFIX}{path.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module
    return vars(module)


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that the document shows."""
    command: str | None = None
    output: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, "\n".join(output)
            command, output = line[2:].partition("  #")[0].strip(), []
        else:
            output.append(line)
    if command is not None:
        yield command, "\n".join(output)


def is_run(block: Block) -> bool:
    """Whether a console block holds only commands of Waypost, and jobs."""
    commands = [command for command, _ in commands_of(block)]
    return (
        block.language == "console"
        and block.remark != NOT_RUN
        and bool(commands)
        and all(one.startswith(("waypost ", "torchrun ")) or one == "echo $?" for one in commands)
    )


def run_console(block: Block, path: Path) -> None:
    """Runs each command; its output must be the one shown, its code 0 unless `echo $?` follows."""
    commands = list(commands_of(block))
    code = 0
    for number, (command, expected) in enumerate(commands):
        where = f"{path.name}:{block.line}: $ {command}"
        if command == "echo $?":
            assert expected.strip() == str(code), f"{where}: the exit code is {code}"
            continue
        program, *arguments = shlex.split(command)
        code, actual = (_run if program == "waypost" else _torchrun)(arguments)
        assert fits(expected, actual), f"{where}\nexpected:\n{expected}\nactual:\n{actual}"
        is_told = number + 1 < len(commands) and commands[number + 1][0] == "echo $?"
        assert code == 0 or is_told, f"{where}: exit code {code}, and the document does not say so"


def _run(arguments: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, output.getvalue()


def _torchrun(arguments: list[str]) -> tuple[int, str]:
    """Runs a job of several processes; what it writes to standard error is shown if it fails."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    if job.returncode:
        print(job.stderr)
    return job.returncode, job.stdout


def check_tree(block: Block, path: Path) -> None:
    """Compares a tree, two spaces for each level and remarks behind two spaces, with the disk."""
    shown: list[str] = []
    above: list[str] = []
    for line in block.text.splitlines():
        depth = (len(line) - len(line.lstrip(" "))) // 2
        name = re.split(r" {2,}", line.strip())[0]
        above[depth:] = [name.rstrip("/")]
        shown.append("/".join(above) + ("/" if name.endswith("/") else ""))
    root = Path(shown[0].rstrip("/"))
    real = [f"{root}/"]
    for found in root.rglob("*"):
        real.append(f"{found}/" if found.is_dir() else str(found))
    wanted, actual = (sorted(set(normal("\n".join(each)))) for each in (shown, real))
    assert wanted == actual, f"{path.name}:{block.line}"
