"""The source keeps the shape that CONTRIBUTING.md describes; a failure lists every problem."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.tidy import rules, tree

Rule = Callable[[str], Iterator[rules.Problem]]
Files = Iterable[tuple[Path, str]]

# Layer 0 of the library: the standard library only.
FOUNDATION = {"_version", "buffers", "clock", "errors", "events", "limits", "options"}
# Further rooms that a machine without torch can use.
WITHOUT_TORCH = FOUNDATION | {"audit", "cli", "format", "storage"}
# Rooms that talk to a person.
SPEAKS = {"__main__", "cli", "demo"}
# Rooms that read the environment: options for the library; the others for the terminal's sake.
READS_ENVIRONMENT = {"options", "cli", "demo"}


def check(rule: Rule, files: Files) -> None:
    found = [
        f"{tree.relative(path)}:{line}: {message}"
        for path, text in files
        for line, message in rule(text)
    ]
    assert not found, "\n" + "\n".join(found)


def modules_in(rooms: set[str]) -> Files:
    return [(path, text) for path, text in tree.source_files() if tree.room(path) in rooms]


def modules_outside(rooms: set[str]) -> Files:
    return [(path, text) for path, text in tree.source_files() if tree.room(path) not in rooms]


def test_the_tree_is_found() -> None:
    names = {tree.relative(path) for path in tree.project_files()}
    assert {"pyproject.toml", ".ci/run", "src/waypost/__init__.py", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/"))]


@pytest.mark.parametrize(
    "rule",
    [
        rules.long_module,
        rules.long_functions,
        rules.deep_nesting,
        rules.missing_module_docstring,
    ],
    ids=lambda rule: rule.__name__,
)
def test_modules_of_the_library(rule: Rule) -> None:
    check(rule, tree.source_files())


@pytest.mark.parametrize(
    "rule", [rules.long_lines, rules.bare_ignores], ids=lambda rule: rule.__name__
)
def test_python_files(rule: Rule) -> None:
    check(rule, tree.python_files())


@pytest.mark.parametrize(
    "rule", [rules.task_words, rules.machine_paths], ids=lambda rule: rule.__name__
)
def test_text_files(rule: Rule) -> None:
    check(rule, tree.text_files())


def test_only_the_command_line_and_the_demonstration_print() -> None:
    check(rules.prints, modules_outside(SPEAKS))


def test_only_options_reads_the_environment() -> None:
    check(rules.environment_reads, modules_outside(READS_ENVIRONMENT))


def test_the_lowest_layer_imports_the_standard_library_only() -> None:
    check(rules.imports_beyond_stdlib, modules_in(FOUNDATION))


def test_format_storage_audit_and_command_line_never_import_torch() -> None:
    check(rules.imports_of_torch, modules_in(WITHOUT_TORCH))
