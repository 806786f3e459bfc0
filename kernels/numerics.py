"""Numeric rules that every operation shares: which type sums are kept in, and sums of one fixed order."""

from __future__ import annotations

import torch
from torch import Tensor


def acc_dtype(*tensors: Tensor) -> torch.dtype:
    """Accumulation type: float64 when any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in one fixed order: x[..., n] -> [...].

    Only elementwise additions are used, so the result is the same bits whatever the other dimensions, the memory
    layout or the device are; a library reduction promises none of that.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([paired, x[..., 2 * half :]], dim=-1) if x.shape[-1] % 2 else paired
    return x.squeeze(-1)
