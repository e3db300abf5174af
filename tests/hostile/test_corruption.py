"""Damage to any file: found by `verify` and by `load`, named, and never turned into numbers."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same, files_under

SAMPLES = 250
DAMAGED = (waypost.CorruptionError, waypost.FormatError)


def _state() -> dict[str, Any]:
    maker = torch.Generator().manual_seed(0)
    return {
        "model": {"a": torch.randn(9, generator=maker), "b": torch.arange(5, dtype=torch.int16)},
        "ema": {"a": torch.randn(9, generator=maker), "b": torch.arange(5, dtype=torch.int16)},
        "progress": {"step": 7, "name": "run", "rate": 0.125},
    }


def _targets() -> dict[str, Any]:
    return {
        "model": {"a": torch.zeros(9), "b": torch.zeros(5, dtype=torch.int16)},
        "ema": {"a": torch.zeros(9), "b": torch.zeros(5, dtype=torch.int16)},
        "progress": {"step": 0, "name": "", "rate": 0.0},
    }


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A small snapshot on disk."""
    url = tmp_path / "run" / "step-000000007"
    waypost.save(str(url), _state(), step=7, metrics={"loss": 0.5}, metadata={"note": "x"})
    return url


def _verdict(url: Path, *, deep: bool = True) -> tuple[bool, str]:
    """Whether `verify` accepts the snapshot, and what it says otherwise."""
    try:
        report = waypost.open(str(url)).verify(deep=deep)
    except (*DAMAGED, waypost.NotFoundError) as error:
        return False, str(error)
    return report.ok, " ".join(f"{problem.file} {problem.message}" for problem in report.problems)


def _load_outcome(url: Path) -> waypost.WaypostError | None:
    """The error of a load of everything; without one, the numbers must be the saved ones."""
    into = _targets()
    try:
        waypost.load(str(url), into)
    except waypost.WaypostError as error:
        return error
    assert_same(into, _state())
    return None


def _check_damage(url: Path, file: Path, what: str) -> None:
    ok, said = _verdict(url)
    assert not ok, f"verify did not find: {what}"
    assert file.name in said, f"verify does not name {file.name}: {said}"
    error = _load_outcome(url)
    assert isinstance(error, (*DAMAGED, waypost.NotFoundError)), f"{what}: {error!r}"
    assert file.name in str(error), f"{what}: load does not name {file.name}: {error}"


def _flips(snapshot: Path, offsets: Callable[[int], list[int]], seed: int) -> Iterator[int]:
    """Flips one byte after the other; yields after each flip has been checked and undone."""
    chooser = random.Random(seed)
    for file in files_under(snapshot):
        content = file.read_bytes()
        for offset in offsets(len(content)):
            damaged = bytearray(content)
            damaged[offset] ^= chooser.randrange(1, 256)
            file.write_bytes(damaged)
            _check_damage(snapshot, file, f"{file.name}, byte {offset} of {len(content)}")
            yield offset
        file.write_bytes(content)


@pytest.mark.slow
def test_i14_a_flipped_byte_is_found_in_a_sample(snapshot: Path, seed: int) -> None:
    """The first and last bytes of each file, and a seeded sample of the others."""
    chooser = random.Random(seed)

    def offsets(size: int) -> list[int]:
        ends = {*range(min(size, 12)), *range(max(0, size - 12), size)}
        return sorted(ends | set(chooser.choices(range(size), k=SAMPLES // 4)))

    assert sum(1 for _ in _flips(snapshot, offsets, seed)) > 100
    assert _verdict(snapshot) == (True, "")


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_i14_a_flipped_byte_is_found_at_every_offset(snapshot: Path, seed: int) -> None:
    """Every byte of every file."""
    total = sum(path.stat().st_size for path in files_under(snapshot))
    assert sum(1 for _ in _flips(snapshot, lambda size: list(range(size)), seed)) == total


@pytest.mark.slow
def test_a_flipped_bit_in_the_numbers_names_the_leaf(snapshot: Path) -> None:
    """CorruptionError has file, leaf and offset; other leaves can still be read."""
    content = _state()["model"]["a"].numpy().tobytes()
    (file,) = [
        path
        for path in files_under(snapshot)
        if path.name.startswith("model") and content in path.read_bytes()
    ]
    whole = file.read_bytes()
    at = whole.index(content) + 13
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(waypost.CorruptionError) as caught:
        waypost.open(str(snapshot)).read("model/a")
    assert caught.value.leaf == "model/a"
    assert file.name in str(caught.value.file)
    assert caught.value.offset is not None
    assert "model/a" in str(caught.value)
    problems = waypost.open(str(snapshot)).verify().problems
    assert {problem.leaf for problem in problems if problem.leaf} <= {"model/a", "model/b"}
    assert "model/a" in {problem.leaf for problem in problems}
    assert_same(waypost.open(str(snapshot)).state_dict("ema"), _state()["ema"])


def test_a_bad_load_touches_no_target_of_its_own_accord(snapshot: Path) -> None:
    """Whatever the order of the reads, the error says what is filled; nothing is half trusted."""
    file = next(path for path in files_under(snapshot) if path.name.startswith("model"))
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 255
    file.write_bytes(whole)
    into = _targets()
    with pytest.raises(DAMAGED):
        waypost.load(str(snapshot), into)
    for name in ("a", "b"):
        tensor = into["ema"][name]
        assert not tensor.any() or torch.equal(tensor, _state()["ema"][name])


@pytest.mark.parametrize("how", ["truncate_1", "truncate_half", "truncate_all", "extend", "zero"])
def test_a_changed_size_is_found_in_every_file(how: str, snapshot: Path) -> None:
    """Each file in turn: one byte less, half, empty, one byte more, or the last page zeroed."""
    changes: dict[str, Callable[[bytes], bytes]] = {
        "truncate_1": lambda content: content[:-1],
        "truncate_half": lambda content: content[: len(content) // 2],
        "truncate_all": lambda content: b"",
        "extend": lambda content: content + b"\0",
        "zero": lambda content: bytes(len(content)),
    }
    for file in files_under(snapshot):
        content = file.read_bytes()
        file.write_bytes(changes[how](content))
        _check_damage(snapshot, file, f"{how} {file.name}")
        file.write_bytes(content)
    assert _verdict(snapshot) == (True, "")


def test_a_removed_file_is_found(snapshot: Path) -> None:
    """Each file in turn is away: named by `verify` and by `load`."""
    for file in files_under(snapshot):
        content = file.read_bytes()
        file.unlink()
        ok, _ = _verdict(snapshot)
        assert not ok, file
        error = _load_outcome(snapshot)
        assert isinstance(error, (*DAMAGED, waypost.NotFoundError)), f"{file}: {error!r}"
        if file.name != "manifest.json":
            assert file.name in str(error)
        file.write_bytes(content)


def test_swapped_files_are_found(snapshot: Path, tmp_path: Path) -> None:
    """Two files of the same size and form change places, or come from another snapshot."""
    other = tmp_path / "run" / "step-000000008"
    state = _state()
    state["model"]["a"] += 1
    waypost.save(str(other), state, step=8)
    by_entry = {file.name.split(".")[0]: file for file in files_under(snapshot / "data")}
    model, ema = by_entry["model"], by_entry["ema"]
    assert model.stat().st_size == ema.stat().st_size
    contents = model.read_bytes(), ema.read_bytes()
    model.write_bytes(contents[1])
    ema.write_bytes(contents[0])
    assert not _verdict(snapshot)[0]
    assert isinstance(_load_outcome(snapshot), DAMAGED)
    ema.write_bytes(contents[1])
    twin = next(path for path in files_under(other / "data") if path.name.startswith("model"))
    model.write_bytes(twin.read_bytes())
    assert not _verdict(snapshot)[0]
    assert isinstance(_load_outcome(snapshot), DAMAGED)


def test_an_index_of_another_attempt_is_found(snapshot: Path, tmp_path: Path) -> None:
    """The rank index is bound to its manifest by a digest."""
    other = tmp_path / "run" / "step-000000008"
    state = _state()
    state["model"]["a"] += 1
    waypost.save(str(other), state, step=8)
    (index,) = [path for path in files_under(snapshot) if path.name.endswith("index.json")]
    (twin,) = [path for path in files_under(other) if path.name.endswith("index.json")]
    shutil.copyfile(twin, index)
    _check_damage(snapshot, index, "foreign index")


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"{", b"null", b"[]", b"\xff\xfe", b'"x"'])
def test_a_manifest_that_is_none_is_reported_without_a_traceback(
    content: bytes, snapshot: Path
) -> None:
    """Empty, NUL-filled, cut or foreign content: a FormatError or CorruptionError naming it."""
    (snapshot / "manifest.json").write_bytes(content)
    for action in (
        lambda: waypost.open(str(snapshot)),
        lambda: waypost.load(str(snapshot), _targets()),
    ):
        with pytest.raises(DAMAGED, match=r"manifest\.json"):
            action()
    (record,) = waypost.snapshots(str(snapshot.parent))
    assert record.problem
    assert waypost.latest(str(snapshot.parent)) is None


@pytest.mark.slow
def test_damage_in_a_large_file_is_found_by_a_sample(tmp_path: Path, seed: int) -> None:
    """Several chunks: a flip anywhere is found, and a read of another chunk is not disturbed."""
    url = tmp_path / "large"
    numbers = torch.arange(6_000_000, dtype=torch.float32)
    waypost.save(str(url), {"model": {"w": numbers}})
    (file,) = [path for path in files_under(url) if path.suffix == ".safetensors"]
    chooser = random.Random(seed)
    size = file.stat().st_size
    for _ in range(6):
        offset = chooser.randrange(4096, size)
        with file.open("r+b") as stream:
            stream.seek(offset)
            before = stream.read(1)
            stream.seek(offset)
            stream.write(bytes([before[0] ^ chooser.randrange(1, 256)]))
        assert not waypost.open(str(url)).verify().ok, offset
        with pytest.raises(waypost.CorruptionError):
            waypost.load(str(url), {"model": {"w": torch.zeros(6_000_000)}})
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(before)
    assert waypost.open(str(url)).verify().ok


def test_quick_verification_finds_sizes_and_missing_files(snapshot: Path) -> None:
    """`verify(deep=False)` reads no data and still notices what is short or absent."""
    file = next(path for path in files_under(snapshot) if path.name.startswith("model"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert not _verdict(snapshot, deep=False)[0]
    file.unlink()
    assert not _verdict(snapshot, deep=False)[0]
    file.write_bytes(content)
    assert waypost.open(str(snapshot)).verify(deep=False).ok


def test_load_without_verification_still_returns_whole_files(snapshot: Path) -> None:
    """`verify=False` skips digests; sound snapshots load the same."""
    into = _targets()
    waypost.load(str(snapshot), into, verify=False)
    assert_same(into, _state())
