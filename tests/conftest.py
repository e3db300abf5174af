"""What all tests share: one printed seed, a clean environment, clear words for missing programs."""

import os
import random
import shutil
import sys

import pytest
from hypothesis import settings

SEED_VARIABLE = "TEST_SEED"

settings.register_profile("waypost", deadline=None, print_blob=True)
settings.load_profile("waypost")


def pytest_configure() -> None:
    # Set before the workers of `-n` start: they inherit it, so all of them use the same seed.
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))


def pytest_report_header() -> str:
    seed = os.environ[SEED_VARIABLE]
    return f"seed: {seed} (the same again: {SEED_VARIABLE}={seed})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("strace") is None:
        return
    if sys.platform != "linux":
        pytest.skip("system call faults need Linux")
    if shutil.which("strace") is None:
        pytest.fail("strace is not installed: run scripts/debian-packages.sh strace", pytrace=False)


@pytest.fixture(autouse=True)
def _default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own WAYPOST_* variables do not reach the tests."""
    for name in [name for name in os.environ if name.startswith("WAYPOST_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number for this test in this session; printed with the failure, if the test fails."""
    text = f"{os.environ[SEED_VARIABLE]}:{request.node.nodeid}"
    value = random.Random(text).randrange(2**63)
    print(f"seed of this test: {value} ({SEED_VARIABLE}={os.environ[SEED_VARIABLE]})")
    return value
