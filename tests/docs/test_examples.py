"""Documents tell the truth: their examples run, their links lead somewhere, their tests exist."""

import doctest
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from _kit import documents as blocks
from _kit.documents import ROOT
from waypost.format import classes
from waypost.storage import urls

pytestmark = pytest.mark.docs

ALL = [*blocks.documents(), *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY"))]
SOURCE = ROOT / "src" / "waypost"
WITH_DOCTESTS = sorted(
    path
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text("utf-8") and "demo" not in path.parts
)

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_TEST = re.compile(r"\btest_[a-z0-9_]+\b(?!\.py)")
_CODE_LINES_MAX = 16


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each document has a folder, a memory storage, registries and a logger of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urls, "_memory", {})
    for registry in ("_by_class", "_by_name", "_known"):
        monkeypatch.setattr(classes, registry, dict(getattr(classes, registry)))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    logger = logging.getLogger("waypost")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for name in [name for name in sys.modules if name.startswith(blocks.MODULE_PREFIX)]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", blocks.documents(), ids=name_of)
def test_every_example_runs_and_shows_what_it_says(path: Path) -> None:
    namespace = blocks.namespace_of(path)
    for block in blocks.blocks_of(path):
        if block.language == "python" and block.remark.startswith(blocks.AS_FILE):
            blocks.write_program(block)
        elif block.language == "python" and block.remark != blocks.NOT_RUN:
            blocks.run_python(block, path, namespace)
        elif block.language == "tree":
            blocks.check_tree(block, path)
        elif blocks.is_run(block):
            blocks.run_console(block, path)


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=name_of)
def test_every_doctest_of_the_source_runs(path: Path) -> None:
    pieces = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(pieces).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    broken = []
    for target in _LINK.findall(_without_code(path.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            broken.append(target)
    assert not broken, broken


@pytest.mark.parametrize("path", blocks.documents(), ids=name_of)
def test_every_test_that_is_named_exists(path: Path) -> None:
    text = "\n".join(each.read_text("utf-8") for each in (ROOT / "tests").rglob("test_*.py"))
    missing = [
        name
        for name in _TEST.findall(path.read_text("utf-8"))
        if f"def {name}(" not in text and not list((ROOT / "tests").rglob(f"{name}.py"))
    ]
    assert not missing, missing


def test_the_first_screen_is_short_and_each_promise_has_its_test() -> None:
    path = ROOT / "README.md"
    first = next(block for block in blocks.blocks_of(path) if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= _CODE_LINES_MAX
    promises = re.findall(r"^\d\. (?:.*\n)(?: {3}.*\n)*", path.read_text("utf-8"), re.MULTILINE)
    assert len(promises) == 6
    assert all(re.search(r"\]\(tests/\w+/test_\w+\.py\)", promise) for promise in promises)


def _without_code(text: str) -> str:
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def _anchors(path: Path) -> set[str]:
    if path.suffix != ".md":
        return set()
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in headings
    }
