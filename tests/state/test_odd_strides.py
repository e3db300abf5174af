"""Targets of one element, which torch calls contiguous whatever their stride is."""

import pytest
import torch

import waypost


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stride_that_says_nothing_is_no_obstacle(shape, dtype):
    strides = (6, 2)[-len(shape) :] if shape[-1] == 1 else (7, 1)
    source = torch.arange(30.0).to(dtype).as_strided(shape, strides, 4)
    target = torch.zeros(30, dtype=dtype).as_strided(shape, strides, 2)
    waypost.save("memory://odd-strides/snap", {"x": source}, overwrite=True)
    waypost.load("memory://odd-strides/snap", {"x": target})
    assert torch.equal(source, target)
