"""Views that overlap in any way, of any item size, come back with their numbers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import waypost
from _kit import assert_same_tensor, new_place

SAMPLES = 40


def _base() -> torch.Tensor:
    return torch.arange(64.0)


def _check(views: dict[str, torch.Tensor]) -> None:
    """Saves the views; both ways of reading give their numbers."""
    url = new_place("memory", Path())
    waypost.save(url, {"e": views})
    read = waypost.open(url).state_dict("e")
    fresh = {
        name: torch.zeros_like(view, memory_format=torch.contiguous_format)
        for name, view in views.items()
    }
    waypost.load(url, {"e": fresh})
    for name, view in views.items():
        assert_same_tensor(read[name], view, name)
        assert_same_tensor(fresh[name], view, name)
        assert_same_tensor(waypost.open(url).read(f"e/{name}"), view, name)


PAIRS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "16 and 32 bits": lambda base: (base.view(torch.int16)[7:14], base[4:12]),
    "8 and 32 bits": lambda base: (base.view(torch.uint8)[5:30], base[2:6]),
    "8 and 16 bits": lambda base: (
        base.view(torch.uint8)[3:9],
        base.view(torch.int16)[2:7],
    ),
    "32 and 64 bits": lambda base: (base[3:9], base.view(torch.float64)[2:4]),
    "8 and 128 bits": lambda base: (
        base.view(torch.uint8)[17:70],
        base.view(torch.complex128)[2:4],
    ),
    "complex and its parts": lambda base: (
        base.view(torch.complex64)[1:5],
        base.view(torch.int16)[7:14],
    ),
    "the last item": lambda base: (base.view(torch.int16)[-3:], base[-2:]),
    "the first item": lambda base: (base.view(torch.int16)[1:4], base[:2]),
    "one inside the other": lambda base: (base.view(torch.uint8)[9:10], base[0:8]),
    "strides": lambda base: (base.view(torch.int16)[7:31:3], base[4:16:2]),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_views_of_different_item_sizes(pair: Any, order: str) -> None:
    """Wherever the common memory begins."""
    views = dict(zip("ab", pair(_base()), strict=True))
    _check({name: views[name] for name in order})


def test_three_item_sizes_in_a_chain() -> None:
    """Each overlaps the next only."""
    base = _base()
    _check(
        {
            "a": base.view(torch.uint8)[3:11],
            "b": base.view(torch.int16)[5:9],
            "c": base.view(torch.float64)[2:4],
        }
    )


def _any_view(base: torch.Tensor, chance: random.Random) -> torch.Tensor:
    offset = chance.randint(0, 40)
    kind = chance.randrange(6)
    if kind == 0:
        return base[offset : offset + chance.randint(0, 8)]
    if kind == 1:
        return base[offset :: chance.randint(1, 4)]
    if kind == 2:
        return base.view(8, 8).t()[:, chance.randint(0, 7) :]
    if kind == 3:
        return base.view(torch.int16)[offset : offset + 7]
    if kind == 4:
        dtype = chance.choice([torch.uint8, torch.float64, torch.complex128])
        narrowed = base.view(dtype)
        start = chance.randrange(narrowed.numel())
        return narrowed[start : start + chance.randint(1, 9)]
    return base.as_strided((3, 3), (chance.randint(0, 3), chance.randint(0, 3)), offset)


def test_views_at_random(seed: int) -> None:
    """Two to five views of one memory, cut in any way."""
    chance = random.Random(seed)
    for sample in range(SAMPLES):
        base = _base()
        views = {f"v{number}": _any_view(base, chance) for number in range(chance.randint(2, 5))}
        try:
            _check(views)
        except Exception as error:
            cuts = {
                name: (view.dtype, tuple(view.shape), view.stride(), view.storage_offset())
                for name, view in views.items()
            }
            error.add_note(f"sample {sample}: {cuts}")
            raise
