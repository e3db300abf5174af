"""The rules about shape: pure functions from the text of a module to what is wrong with it.

Each yields `(line number, message)`. Line numbers count from 1.
"""

import ast
import re
import sys
from collections.abc import Iterator

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
COLUMNS_MAX = 100
NESTING_MAX = 4

Problem = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)

# Written so that they do not match themselves.
TASK_WORDS = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b")
BARE_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[)")
MACHINE_PATH = re.compile(r"(?<![\w.$~*})-])/(?:work|root|home|Users|build)/(?=\w)")


def long_module(text: str) -> Iterator[Problem]:
    """A module has at most MODULE_LINES_MAX lines."""
    lines = len(text.splitlines())
    if lines > MODULE_LINES_MAX:
        yield lines, f"module has {lines} lines, at most {MODULE_LINES_MAX}"


def long_lines(text: str) -> Iterator[Problem]:
    """A line has at most COLUMNS_MAX columns."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS_MAX:
            yield number, f"line has {len(line)} columns, at most {COLUMNS_MAX}"


def long_functions(text: str) -> Iterator[Problem]:
    """A function has at most FUNCTION_LINES_MAX lines, from `def` on, without its docstring."""
    for function in _functions(ast.parse(text)):
        lines = _last_line(function) - function.lineno + 1 - _docstring_lines(function)
        if lines > FUNCTION_LINES_MAX:
            message = f"{function.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
            yield function.lineno, message


def deep_nesting(text: str) -> Iterator[Problem]:
    """At most NESTING_MAX blocks are open inside a function or at the top of a module."""
    yield from _too_deep(ast.parse(text), 0)


def missing_module_docstring(text: str) -> Iterator[Problem]:
    """A module opens with a docstring; a file without code needs none."""
    module = ast.parse(text)
    if module.body and ast.get_docstring(module) is None:
        yield 1, "module has no docstring"


def prints(text: str) -> Iterator[Problem]:
    """Nothing calls `print`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "call of print"


def environment_reads(text: str) -> Iterator[Problem]:
    """Nothing touches the process environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id in {"os", "posix"}:
                yield node.lineno, f"use of os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", "posix"}:
            for alias in node.names:
                if alias.name in names:
                    yield node.lineno, f"import of os.{alias.name}"


def imports(text: str) -> Iterator[Problem]:
    """Every module imported anywhere in the text, by absolute name; not a problem by itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from waypost import errors` imports waypost.errors.
            if node.module == "waypost":
                yield from ((node.lineno, f"waypost.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def imports_beyond_stdlib(text: str) -> Iterator[Problem]:
    """Nothing but the standard library and the library itself is imported, not even lazily."""
    for number, name in imports(text):
        if name.split(".")[0] not in sys.stdlib_module_names | {"waypost"}:
            yield number, f"import of {name}"


def imports_of_torch(text: str) -> Iterator[Problem]:
    """Torch is not imported, not even lazily."""
    for number, name in imports(text):
        if name.split(".")[0] == "torch":
            yield number, f"import of {name}"


def task_words(text: str) -> Iterator[Problem]:
    """Work to do is written in the tracker, not in the source."""
    yield from _matches(TASK_WORDS, text)


def bare_ignores(text: str) -> Iterator[Problem]:
    """An ignored type error says which one."""
    yield from _matches(BARE_IGNORE, text)


def machine_paths(text: str) -> Iterator[Problem]:
    """No file knows the directories of the machine it was written on."""
    yield from _matches(MACHINE_PATH, text)


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[Problem]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := pattern.search(line):
            yield number, f"contains {found.group()!r}"


def _functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def _docstring_lines(function: Function) -> int:
    if ast.get_docstring(function) is None:
        return 0
    return _last_line(function.body[0]) - function.body[0].lineno + 1


def _too_deep(node: ast.AST, depth: int) -> Iterator[Problem]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, BLOCKS) or _continues(node, child):
            yield from _too_deep(child, depth)
        elif isinstance(child, ast.ClassDef | Function) and isinstance(
            node, ast.Module | ast.ClassDef
        ):
            yield from _too_deep(child, 0)  # a function counts from its own body
        elif depth + 1 > NESTING_MAX:
            yield child.lineno, f"{depth + 1} blocks deep, at most {NESTING_MAX}"
        else:
            yield from _too_deep(child, depth + 1)


def _continues(node: ast.AST, child: ast.AST) -> bool:
    """Whether `child` is the `elif` of `node`: written at the same depth."""
    return (
        isinstance(node, ast.If)
        and isinstance(child, ast.If)
        and child in node.orelse
        and child.col_offset == node.col_offset
    )


def _last_line(node: ast.stmt) -> int:
    if node.end_lineno is None:
        raise ValueError(f"statement on line {node.lineno} has no end: parsed from text?")
    return node.end_lineno
