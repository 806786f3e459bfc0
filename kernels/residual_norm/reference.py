"""Residual addition and RMSNorm of the sum, which a decoder layer does twice."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMSNorm times ``weight``.

    x and y [row, hidden] of one type, y None where there is nothing to add; weight [hidden], of that type too.
    Returns (the sum rounded to x's type, or x itself where y is None; the norm of that rounded sum, in x's type).
    Statistics are float32 (float64 for float64).
    """
    total = x if y is None else x + y
    return total, functional.rms_norm(total, (total.shape[-1],), weight, eps)
