"""Views, ties and slices: stored once, by extent, and tied again."""

from pathlib import Path

import pytest
import torch
from torch import nn

import waypost
from _kit import PLACES, assert_same_tensor, files_under, new_place, raw


def _bytes_on_disk(folder: str) -> int:
    return sum(path.stat().st_size for path in files_under(folder))


def _shares(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_a_small_view_of_a_large_storage_writes_its_own_extent(tmp_path: Path) -> None:
    """Ten elements of a 100 MB storage cost a few KiB on disk, and come back alone."""
    large = torch.zeros(25_000_000)
    view = large[1000:1010]
    view.copy_(torch.arange(10.0))
    url = new_place("disk", tmp_path)
    receipt = waypost.save(url, {"x": {"view": view}})
    assert _bytes_on_disk(url) < 64 * 1024
    assert receipt.nbytes == 40
    restored = waypost.open(url).state_dict("x")["view"]
    assert_same_tensor(restored, view)
    assert restored.untyped_storage().nbytes() < 4096


def test_a_strided_view_of_a_large_storage_writes_what_it_shows(tmp_path: Path) -> None:
    """Every 100,000th element of a large storage: 25 numbers, not 10 MB."""
    large = torch.arange(2_500_000, dtype=torch.float32)
    view = large[::100_000]
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {"view": view}})
    assert _bytes_on_disk(url) < 64 * 1024
    assert_same_tensor(waypost.open(url).state_dict("x")["view"], view)


def test_an_expanded_tensor_returns_at_full_shape(tmp_path: Path) -> None:
    """A broadcast tensor keeps its shape and values."""
    view = torch.arange(4.0).expand(500, 4)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": {"view": view}})
    assert_same_tensor(waypost.open(url).state_dict("x")["view"], view)


@pytest.mark.parametrize("place", PLACES)
def test_tied_tensors_are_stored_once_and_tied_again(place: str, tmp_path: Path) -> None:
    """The same tensor under two names costs its bytes once and shares memory when restored."""
    tensor = torch.randn(1000)
    url = new_place(place, tmp_path)
    receipt = waypost.save(url, {"x": {"a": tensor, "b": tensor, "deep": [tensor]}})
    assert receipt.nbytes == 4000
    restored = waypost.open(url).state_dict("x")
    assert_same_tensor(restored["a"], tensor)
    assert _shares(restored["a"], restored["b"])
    assert _shares(restored["a"], restored["deep"][0])
    restored["a"].fill_(7)
    assert torch.equal(restored["b"], restored["a"])


class Tied(nn.Module):
    """An embedding whose weight is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_module_is_saved_once_and_loaded_tied(tmp_path: Path) -> None:
    """Tied weights: one copy on disk, both names readable, the target stays tied."""
    source, target = Tied(), Tied()
    url = new_place("disk", tmp_path)
    receipt = waypost.save(url, {"model": source})
    assert receipt.nbytes == 50 * 8 * 4
    snapshot = waypost.open(url)
    assert_same_tensor(snapshot.read("model/head.weight"), source.head.weight.detach())
    assert_same_tensor(snapshot.read("model/embedding.weight"), source.head.weight.detach())
    waypost.load(url, {"model": target})
    assert target.head.weight is target.embedding.weight
    assert raw(target.head.weight) == raw(source.head.weight)


def test_a_tied_snapshot_loads_into_an_untied_module(tmp_path: Path) -> None:
    """An untied target gets the shared numbers under both names."""
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(50, 8))
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": source})
    waypost.load(url, {"model": target})
    assert not _shares(target.head.weight, target.embedding.weight)
    assert raw(target.head.weight) == raw(source.head.weight)
    assert raw(target.embedding.weight) == raw(source.head.weight)


def test_an_untied_snapshot_with_unequal_values_does_not_load_into_tied_tensors(
    tmp_path: Path,
) -> None:
    """One memory cannot hold two values: refused, and the target is untouched."""
    source, target = Tied(), Tied()
    source.head.weight = nn.Parameter(torch.zeros(50, 8))
    before = raw(target.head.weight)
    url = new_place("disk", tmp_path)
    waypost.save(url, {"model": source})
    with pytest.raises(waypost.MismatchError) as caught:
        waypost.load(url, {"model": target})
    assert {difference.kind for difference in caught.value.differences} == {"tie"}
    assert raw(target.head.weight) == before


@pytest.mark.parametrize("place", PLACES)
def test_slices_of_one_buffer_keep_their_values_and_cost_once(place: str, tmp_path: Path) -> None:
    """q, k and v as slices of one buffer write the buffer's bytes, not three buffers."""
    qkv = torch.randn(300, 64)
    made = {"q": qkv[:100], "k": qkv[100:200], "v": qkv[200:]}
    url = new_place(place, tmp_path)
    receipt = waypost.save(url, {"attention": made})
    assert receipt.nbytes == qkv.nbytes
    restored = waypost.open(url).state_dict("attention")
    for name, tensor in made.items():
        assert_same_tensor(restored[name], tensor, name)


@pytest.mark.parametrize("place", PLACES)
def test_overlapping_views_keep_their_values_and_overlap(place: str, tmp_path: Path) -> None:
    """Windows of one buffer return with equal values and still share what they shared."""
    base = torch.arange(100.0)
    made = {"all": base, "low": base[:60], "high": base[40:], "even": base[::2]}
    url = new_place(place, tmp_path)
    receipt = waypost.save(url, {"x": made})
    assert receipt.nbytes == base.nbytes
    restored = waypost.open(url).state_dict("x")
    for name, tensor in made.items():
        assert_same_tensor(restored[name], tensor, name)
    restored["low"][50] = -1.0
    assert restored["high"][10] == -1.0
    assert restored["all"][50] == -1.0


def test_views_of_one_storage_in_two_dtypes_return(tmp_path: Path) -> None:
    """A storage seen as float32 and as int32 returns both readings."""
    base = torch.randn(64)
    made = {"f": base, "i": base.view(torch.int32), "b": base.view(torch.uint8)[3:90]}
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": made})
    restored = waypost.open(url).state_dict("x")
    for name, tensor in made.items():
        assert_same_tensor(restored[name], tensor, name)


def test_load_fills_overlapping_targets(tmp_path: Path) -> None:
    """Loading onto the very views that were saved gives the saved values everywhere."""
    base = torch.arange(100.0)
    made = {"all": base, "low": base[:60], "high": base[40:]}
    wanted = base.clone()
    url = new_place("disk", tmp_path)
    waypost.save(url, {"x": made})
    base.zero_()
    waypost.load(url, {"x": made})
    assert torch.equal(base, wanted)


def test_loading_onto_tensors_mapped_from_the_snapshots_own_file_is_safe(tmp_path: Path) -> None:
    """Reading a file into memory that maps the same file neither tears nor changes either."""
    url = new_place("disk", tmp_path)
    saved = torch.randn(5000)
    waypost.save(url, {"model": {"w": saved}})
    (file,) = [path for path in files_under(url) if path.suffix == ".safetensors"]
    content = file.read_bytes()
    start = content.find(raw(saved))
    assert start > 0
    mapped = torch.from_file(str(file), shared=True, size=len(content), dtype=torch.uint8)
    target = mapped[start : start + saved.nbytes].view(torch.float32)
    waypost.load(url, {"model": {"w": target}})
    assert_same_tensor(target, saved)
    assert file.read_bytes() == content
    assert waypost.open(url).verify().ok
