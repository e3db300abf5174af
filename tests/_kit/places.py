"""Where a test keeps its snapshots: a directory or the memory storage."""

import hashlib
import uuid
from pathlib import Path

PLACES = ("disk", "memory")


def new_place(kind: str, tmp_path: Path, name: str = "snap") -> str:
    """A URL nothing has been written to yet, on the storage of that kind."""
    if kind == "disk":
        return str(tmp_path / f"{uuid.uuid4().hex[:8]}" / name)
    return f"memory://{uuid.uuid4().hex}/{name}"


def files_under(folder: Path | str) -> list[Path]:
    """Every regular file below the folder, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def tree_of(folder: Path | str) -> dict[str, str]:
    """Relative path to content digest ("dir" for folders): two equal trees are equal dicts."""
    root = Path(folder)
    tree = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            tree[name] = f"link {path.readlink()}"
        elif path.is_dir():
            tree[name] = "dir"
        else:
            tree[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return tree
