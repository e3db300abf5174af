"""The rules find what they are for and leave the rest alone: without this, they could pass idly."""

import textwrap
from collections.abc import Callable, Iterator

import pytest

from tests.tidy import rules

Rule = Callable[[str], Iterator[rules.Problem]]


def lines(count: int, text: str = "x = 1") -> str:
    return "\n".join([text] * count) + "\n"


def function(body_lines: int, docstring_lines: int = 0) -> str:
    docstring = ['    """First.', *["    More."] * (docstring_lines - 2), '    """']
    body = ["    x = 1"] * body_lines
    return "\n".join(["def f():", *(docstring if docstring_lines else []), *body]) + "\n"


def nested(depth: int) -> str:
    opened = ["    " * (level + 1) + "if x:" for level in range(depth)]
    return "\n".join(["def f():", *opened, "    " * (depth + 1) + "pass"]) + "\n"


ELIF_CHAIN = """
def f(x):
    if x == 1:
        pass
    elif x == 2:
        pass
    elif x == 3:
        pass
    elif x == 4:
        pass
    elif x == 5:
        pass
    else:
        pass
"""

ELSE_WITH_IFS = """
def f(x):
    if x:
        pass
    else:
        if x:
            pass
        else:
            if x:
                pass
            else:
                if x:
                    pass
                else:
                    if x:
                        pass
"""

BROKEN: list[tuple[Rule, str, int]] = [
    (rules.long_module, lines(501), 501),
    (rules.long_lines, lines(2) + "x" * 101, 3),
    (rules.long_functions, function(60), 1),
    (rules.long_functions, "class C:\n" + textwrap.indent(function(60), "    "), 2),
    (rules.deep_nesting, nested(5), 6),
    (rules.deep_nesting, "class C:\n" + textwrap.indent(nested(5), "    "), 7),
    (rules.deep_nesting, ELSE_WITH_IFS.lstrip(), 14),
    (rules.missing_module_docstring, "x = 1\n", 1),
    (rules.prints, "def f():\n    print('x')\n", 2),
    (rules.environment_reads, "import os\nx = os.environ['x']\n", 2),
    (rules.environment_reads, "import os\nx = os.getenv('x')\n", 2),
    (rules.environment_reads, "from os import environ\n", 1),
    (rules.imports_beyond_stdlib, "def f():\n    import numpy.linalg\n", 2),
    (rules.imports_beyond_stdlib, "from xxhash import xxh3_128\n", 1),
    (rules.imports_of_torch, "def f():\n    from torch.nn import Module\n", 2),
    (rules.task_words, "# TO" + "DO: later\n", 1),
    (rules.task_words, "x = 1  # FIX" + "ME\n", 1),
    (rules.bare_ignores, "x = 1  # type: " + "ignore\n", 1),
    (rules.machine_paths, "x = '/wo" + "rk/project'\n", 1),
    (rules.machine_paths, "see /ro" + "ot/x\n", 1),
]

SOUND: list[tuple[Rule, str]] = [
    (rules.long_module, lines(500)),
    (rules.long_lines, "x" * 100),
    (rules.long_functions, function(59)),
    (rules.long_functions, function(59, docstring_lines=20)),
    (rules.deep_nesting, nested(4)),
    (rules.deep_nesting, "class C:\n" + textwrap.indent(nested(4), "    ")),
    (rules.deep_nesting, ELIF_CHAIN),
    (rules.missing_module_docstring, ""),
    (rules.missing_module_docstring, '"""What it is for."""\nx = 1\n'),
    (rules.prints, "def f():\n    console.print('x')\n"),
    (rules.environment_reads, "import os\nx = os.fspath('x')\n"),
    (rules.imports_beyond_stdlib, "import os.path\nfrom waypost import errors\n"),
    (rules.imports_of_torch, "import torchdata\nfrom waypost.state import torch\n"),
    (rules.task_words, "TO" + "DOS, XXH3, mktemp XXXXXX\n"),
    (rules.bare_ignores, "x = 1  # type: ignore[arg-type]\n"),
    (rules.machine_paths, "see https://example.org/home/page and runs/night/x and docs/build/x\n"),
]


def name(rule: object) -> str | None:
    return getattr(rule, "__name__", "")


@pytest.mark.parametrize(("rule", "text", "line"), BROKEN, ids=name)
def test_rule_finds_its_problem_once(rule: Rule, text: str, line: int) -> None:
    assert [number for number, _message in rule(text)] == [line]


@pytest.mark.parametrize(("rule", "text"), SOUND, ids=name)
def test_rule_leaves_sound_text_alone(rule: Rule, text: str) -> None:
    assert list(rule(text)) == []
