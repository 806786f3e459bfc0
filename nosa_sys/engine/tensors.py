"""Growing a tensor in place of a fixed head-room."""

from __future__ import annotations

import torch
from torch import Tensor


def grown(tensor: Tensor, shape: tuple[int, ...], poison: float | None) -> Tensor:
    """A copy of ``tensor`` enlarged to ``shape`` (each size >= the old one); new entries hold ``poison`` if given."""
    fresh = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if poison is not None:
        fresh.fill_(poison)
    fresh[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return fresh


def doubled(current: int, needed: int, floor: int = 1) -> int:
    """The next capacity: at least ``needed``, at least twice ``current`` when it has to grow at all."""
    return current if needed <= current else max(needed, 2 * current, floor)
