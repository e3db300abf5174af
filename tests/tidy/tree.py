"""The files of the project: those that git tracks or would track, or all of them without git."""

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "waypost"

# Without git there is no ignore file to ask: leave out what tools create. Names that begin with a
# dot are left out as well, but for those in KEPT_DOT_NAMES.
IGNORED_NAMES = {"__pycache__", "build", "dist", "htmlcov", "runs"}
KEPT_DOT_NAMES = {".ci", ".editorconfig", ".gitignore", ".github"}


@functools.cache
def project_files() -> tuple[Path, ...]:
    """All files of the project, sorted."""
    names = _listed_by_git()
    paths = _walk(ROOT) if names is None else [ROOT / name for name in names]
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


@functools.cache
def text_files() -> tuple[tuple[Path, str], ...]:
    """Every file of the project that is text, with its text. Binary files are left out."""
    found = []
    for path in project_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        try:
            found.append((path, content.decode()))
        except UnicodeDecodeError:
            continue
    return tuple(found)


def python_files() -> list[tuple[Path, str]]:
    """Every Python file of the project, with its text."""
    return [(path, text) for path, text in text_files() if path.suffix == ".py"]


def source_files() -> list[tuple[Path, str]]:
    """Every module of the library, with its text."""
    return [(path, text) for path, text in python_files() if path.is_relative_to(SOURCE)]


def room(path: Path) -> str:
    """The top-level module or package of the library that `path` belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    """The name of `path` from the project's root."""
    return path.relative_to(ROOT).as_posix()


def _listed_by_git() -> list[str] | None:
    """What git tracks or would track; None where the root is not the root of a git work tree."""
    if not (ROOT / ".git").exists():  # a copy inside some other repository is not that repository
        return None
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in done.stdout.decode().split("\0") if name]


def _walk(directory: Path) -> list[Path]:
    found = []
    for path in directory.iterdir():
        hidden = path.name.startswith(".") and path.name not in KEPT_DOT_NAMES
        if hidden or path.name in IGNORED_NAMES or path.suffix == ".egg-info" or path.is_symlink():
            continue
        found.extend(_walk(path) if path.is_dir() else [path])
    return found
