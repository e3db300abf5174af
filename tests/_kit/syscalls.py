"""The system calls of a forked child, by strace: traced, or with one of them made to fail."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _kit.children import Outcome, outcome_of, run_as_child

WRITES = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2"}) | frozenset(
    {"ftruncate", "fallocate", "copy_file_range", "sendfile"}
)
SYNCS = frozenset({"fsync", "fdatasync"})
PUBLISHES = frozenset({"link", "linkat", "rename", "renameat", "renameat2"})
CREATES = frozenset({"open", "openat", "creat", "mkdir", "mkdirat"})
REMOVES = frozenset({"unlink", "unlinkat", "rmdir"})
TRACED = sorted(WRITES | SYNCS | PUBLISHES | CREATES | REMOVES)

_COMPLETE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (-?\d+|\?)(.*)$")
_PATHS = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One system call: when it began and ended (as line numbers), and on what."""

    name: str
    begun: int
    ended: int
    arguments: str
    result: int

    @property
    def paths(self) -> list[str]:
        """Absolute paths given by name, in order; a write has none, only bytes in quotes."""
        if self.name in WRITES:
            return []
        return [
            os.path.normpath(os.path.join(folder, name))
            for folder, name in _PATHS.findall(self.arguments)
        ]

    @property
    def on(self) -> str:
        """The path behind the descriptor that is the first argument."""
        found = _DESCRIPTOR.match(self.arguments)
        return found.group(1) if found else ""


def parse(lines: list[str]) -> Iterator[Call]:
    """The calls that ended without an error, in the order in which they ended."""
    open_calls: dict[tuple[str, str], tuple[int, str]] = {}
    for number, line in enumerate(lines):
        if found := _UNFINISHED.match(line):
            pid, name, arguments = found.groups()
            open_calls[pid, name] = (number, arguments)
            continue
        if found := _RESUMED.match(line):
            pid, name, arguments, result, _ = found.groups()
            begun, first = open_calls.pop((pid, name))
            arguments = first + arguments
        elif found := _COMPLETE.match(line):
            _, name, arguments, result, _ = found.groups()
            begun = number
        else:
            continue
        if result != "?" and int(result) >= 0:
            yield Call(
                name=name, begun=begun, ended=number, arguments=arguments, result=int(result)
            )


def _attach(pid: int, log: Path, inject: str) -> subprocess.Popen[str]:
    command = ["strace", "-f", "-y", "-s", "4096", "-p", str(pid), "-o", str(log)]
    command += ["-e", "trace=" + ",".join(TRACED), "-e", "signal=none"]
    if inject:
        command += ["-e", f"inject={inject}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    assert "attached" in said, said + tracer.stderr.read()
    return tracer


def traced(
    action: Callable[[], Any], folder: Path, *, inject: str = ""
) -> tuple[Outcome, list[Call]]:
    """Runs `action` in a forked child under strace; `inject` as in `strace -e inject=`."""
    assert shutil.which("strace"), "strace is not installed"
    gate_reader, gate_writer = os.pipe()
    report_reader, report_writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(gate_writer)
        os.close(report_reader)
        os.read(gate_reader, 1)
        run_as_child(action, report_writer)
    os.close(gate_reader)
    os.close(report_writer)
    log = folder / f"trace-{pid}"
    tracer = _attach(pid, log, inject)
    os.write(gate_writer, b"x")
    os.close(gate_writer)
    outcome = outcome_of(pid, report_reader)
    with tracer:
        tracer.communicate()
    lines = log.read_text(errors="replace").splitlines()
    log.unlink()
    return outcome, list(parse(lines))
