"""Importing the library and starting its command line stay light: no torch, no numpy."""

import json
import os
import subprocess
import sys

import pytest

from tests.tidy import tree

HEAVY = {"fsspec", "matplotlib", "numpy", "sklearn", "torch", "torchdata"}

IMPORT = "import waypost"

USE_OF_NAMES = """
import waypost
waypost.__all__, waypost.__version__, dir(waypost)
"""

HELP = """
import runpy, sys
sys.argv = ["waypost", "--help"]
try:
    runpy.run_module("waypost", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert stop.code in (None, 0), stop.code
else:
    raise AssertionError("--help did not exit")
"""

REPORT = """
import json, sys
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [IMPORT, USE_OF_NAMES, HELP], ids=["import", "names", "help"])
def test_starts_without_heavy_packages(program: str) -> None:
    assert modules_after(program) & HEAVY == set()


@pytest.mark.slow
def test_heavy_packages_are_seen() -> None:
    assert modules_after("import numpy") & HEAVY == {"numpy"}


def test_a_misspelt_name_is_an_attribute_error() -> None:
    import waypost

    with pytest.raises(AttributeError, match="no_such_name"):
        waypost.no_such_name  # noqa: B018  (the access is what is tested)


def modules_after(program: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after it ran `program`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program + REPORT],
        cwd=tree.ROOT,
        env=os.environ | {"PYTHONPATH": str(tree.ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
