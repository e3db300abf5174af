"""The command line with odd names, numbers and terminals: whole output, right codes, no escapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost

pytestmark = pytest.mark.slow

ESCAPES = {"\x1b[31m": "colour", "\x1b[2J": "clear", "\x1b]0;title\x07": "title", "a\nb": "line"}


def _run(*arguments: str, code: int = 0, **environment: str) -> bytes:
    """Runs `waypost ARGUMENTS`; the exit code must be `code`; returns the bytes it printed."""
    found = subprocess.run(
        [sys.executable, "-m", "waypost", *arguments],
        capture_output=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        timeout=60,
        check=False,
    )
    assert found.returncode == code, (found.returncode, found.stdout[:500], found.stderr[:500])
    assert b"Traceback" not in found.stderr
    assert not _controls(found.stderr)
    return found.stdout


def _controls(printed: bytes) -> set[int]:
    return {byte for byte in printed if byte < 32 and byte != 10} | ({127} & set(printed))


def _document(printed: bytes) -> Any:
    """The JSON document, which must be UTF-8 and hold only what JSON has."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(printed.decode("utf-8"), parse_constant=refuse)


def _snapshot(tmp_path: Path, **arguments: Any) -> str:
    url = str(tmp_path / "snap")
    waypost.save(url, {"x": {"w": torch.ones(2), "v": 1}}, **arguments)
    return url


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_of_any_length_is_shown(sign: int, tmp_path: Path) -> None:
    """Python prints no integer of more than 4300 digits by itself."""
    url = _snapshot(tmp_path, metadata={"n": sign * 10**5000, "after": "here"}, step=5)
    text = _run("show", url).decode()
    assert "x/w" in text
    assert "here" in text
    document = _document(_run("show", url, "--json"))
    assert document["metadata"]["after"] == "here"
    assert [leaf["path"] for leaf in document["leaves"]]


def test_a_metric_of_any_length_is_listed(tmp_path: Path) -> None:
    """In a table and in JSON."""
    run = tmp_path / "run"
    url = str(run / "step-000000001")
    waypost.save(url, {"v": 1}, step=1, metrics={"big": 10**400, "bigger": 10**5000})
    assert b"big" in _run("ls", str(run))
    (row,) = _document(_run("ls", str(run), "--json"))
    assert set(row["metrics"]) == {"big", "bigger"}


GLOBS = ["[z-a]", "[!]", "[[", "[", "[]", "*[", "[a", "\\", "(", "**[!"]


@pytest.mark.parametrize("glob", ["[z-a]"])
def test_a_pattern_that_is_none_is_a_usage_error(glob: str, tmp_path: Path) -> None:
    """In words."""
    _run("show", _snapshot(tmp_path), glob, code=2)


@pytest.mark.parametrize("glob", GLOBS)
def test_a_pattern_is_used_or_refused(glob: str, tmp_path: Path) -> None:
    """By everything that takes one: no error of the regular expressions below."""
    url = _snapshot(tmp_path)
    snapshot = waypost.open(url)
    refused = []
    for action in (
        lambda: list(snapshot.leaves(glob)),
        lambda: waypost.load(url, {"x": {"w": torch.ones(2), "v": 1}}, include=glob),
        lambda: waypost.load(url, {"x": {"w": torch.ones(2), "v": 1}}, exclude=glob),
    ):
        try:
            action()
        except ValueError as error:
            refused.append(error)
    for error in refused:
        assert isinstance(error, waypost.WaypostError) or repr(glob) in str(error), repr(error)


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
@pytest.mark.parametrize("command", ["ls", "resume-info", "verify"])
def test_a_path_that_is_no_text_gives_json_all_the_same(command: str, tmp_path: Path) -> None:
    """UTF-8, whatever bytes the name has."""
    run = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff\xfen")
    waypost.save(f"{run}/step-000000001", {"v": torch.ones(2)}, step=1)
    _document(_run(command, run, "--json"))
    _run(command, run)


def test_text_that_is_none_gives_json_all_the_same(tmp_path: Path) -> None:
    """A lone surrogate in the metadata."""
    url = _snapshot(tmp_path, metadata={"s": "\udcff", "after": "here"})
    assert _document(_run("show", url, "--json"))["metadata"]["after"] == "here"
    assert b"x/w" in _run("show", url)


@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_terminal_of_ascii_gets_the_whole_output(command: str, tmp_path: Path) -> None:
    """Signs that it lacks are spelled out."""
    run = tmp_path / "run"
    url = str(run / "step-000000001")
    metadata = {"name": "\u6d4b\u8bd5 \u00e9", "after": "here"}
    metrics = {"\u03b1": 1.5}
    waypost.save(url, {"v": torch.ones(2, 3)}, step=1, metadata=metadata, metrics=metrics)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    printed = _run(command, str(run) if command == "ls" else url, **plain)
    assert printed.isascii()
    assert (b"1.5" if command == "ls" else b"float32") in printed
    _document(_run(command, str(run) if command == "ls" else url, "--json", **plain))


@pytest.mark.parametrize("command", ["ls", "show", "verify", "resume-info"])
@pytest.mark.parametrize("json_flag", [[], ["--json"]], ids=["text", "json"])
def test_a_closed_output_is_no_traceback(
    command: str, json_flag: list[str], tmp_path: Path
) -> None:
    """Started without a standard output at all."""
    run = tmp_path / "run"
    url = str(run / "step-000000001")
    waypost.save(url, {"v": torch.ones(2)}, step=1)
    arguments = [command, url if command == "show" else str(run), *json_flag]
    found = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "waypost", *arguments],
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in found.stderr, found.stderr
    assert b"Exception ignored" not in found.stderr, found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_output_is_an_error_in_words(tmp_path: Path) -> None:
    """Not 0, since the output is not there."""
    url = _snapshot(tmp_path)
    with Path("/dev/full").open("wb") as full:
        found = subprocess.run(
            [sys.executable, "-m", "waypost", "show", url],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert b"Traceback" not in found.stderr, found.stderr
    assert found.returncode != 0


@pytest.mark.parametrize("text", ESCAPES, ids=ESCAPES.values())
def test_a_snapshot_does_not_control_the_terminal(text: str, tmp_path: Path) -> None:
    """Names of metrics and leaves, metadata and reasons are shown, not obeyed."""
    run = tmp_path / "run"
    url = str(run / "step-000000001")
    state = {"v": {text: torch.ones(1), "t": text}, text: torch.ones(1)}
    metadata = {"m": text, text: 1, "deep": [{text: [text]}]}
    waypost.save(url, state, step=1, metrics={text: 1.5}, metadata=metadata)
    listed = _run("ls", str(run))
    assert not _controls(listed)
    assert len(listed.splitlines()) == 2
    for command in ("show", "verify"):
        assert not _controls(_run(command, url)), command
    (row,) = _document(_run("ls", str(run), "--json"))
    assert list(row["metrics"]) == [text]
    document = _document(_run("show", url, "--json"))
    assert document["metadata"]["m"] == text


def test_statistics_do_not_control_the_terminal(tmp_path: Path) -> None:
    """Their table is another one."""
    url = str(tmp_path / "snap")
    waypost.save(url, {"v": {text: torch.ones(1) for text in ESCAPES}})
    assert not _controls(_run("show", url, "--stats"))


@pytest.mark.parametrize("text", ESCAPES, ids=ESCAPES.values())
def test_a_run_does_not_control_the_terminal(text: str, tmp_path: Path) -> None:
    """The reason of a save, which the program chooses."""
    run = str(tmp_path / "run")
    with waypost.Checkpointer(run, {"v": {"k": 1}}, save_on=()) as checkpointer:
        checkpointer.step_done()
        checkpointer.save(reason=text)
    for command in ("ls", "resume-info"):
        assert not _controls(_run(command, run)), command


def test_colours_are_not_a_way_in(tmp_path: Path) -> None:
    """With colours on, only those of the table are there."""
    run = tmp_path / "run"
    waypost.save(
        str(run / "step-000000001"), {"v": 1}, step=1, metrics={"\x1b[2J[bold]x[/bold]": 1.5}
    )
    printed = _run("ls", str(run), NO_COLOR="", FORCE_COLOR="1")
    assert b"\x1b[2J" not in printed
