"""Figures about a tensor, for people who look for what went wrong."""

from __future__ import annotations

import torch


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Returns ``min``, ``max`` and ``mean`` of the finite elements, and the counts of the others.

    Args:
        tensor: Any shape and type; what has no order (complex, sub-byte) gives no figures.
    """
    try:
        dense = tensor.detach()
        dense = dense.dequantize() if dense.is_quantized else dense
        dense = dense.to_dense() if dense.layout != torch.strided else dense
        wide = dense.to(torch.float64).reshape(-1)
    except (RuntimeError, NotImplementedError, TypeError):
        return {}
    if tensor.is_complex() or not wide.numel():
        return {}
    finite = wide[torch.isfinite(wide)]
    found: dict[str, float] = {
        "nan": int(torch.isnan(wide).sum()),
        "inf": int(torch.isinf(wide).sum()),
    }
    if finite.numel():
        found |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
        }
    return found
