"""Pooling of window scores to block scores: each block takes the best of the windows that overlap it (section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.sparse_config import SparseConfig


@torch.no_grad()
def pool_windows(x: Tensor, n_windows: Tensor | int, n_blocks: int, cfg: SparseConfig) -> Tensor:
    """Best window of each block.

    x [..., window]; n_windows: how many windows exist, an int or a tensor of x's leading dimensions (missing trailing
    ones are broadcast, so [batch] serves [batch, kv_head, window]). Block j takes the maximum over the existing
    windows r*j - 1 .. r*j + r - 1 with r = block_size / kernel_stride; a block without any gets -inf. Windows that do
    not exist may hold anything; a NaN in an existing one reaches its blocks. Returns [..., n_blocks].
    """
    ratio = cfg.windows_per_block
    limit = torch.as_tensor(n_windows, device=x.device)
    limit = limit.reshape(limit.shape + (1,) * (x.dim() - limit.dim()))
    columns = min(x.shape[-1], ratio * n_blocks)
    absent = torch.arange(columns, device=x.device) >= limit
    existing = x[..., :columns].masked_fill(absent, -math.inf)
    # One column in front stands for window -1, the others fill the last block up.
    padded = functional.pad(existing, (1, ratio * n_blocks - columns), value=-math.inf)
    return padded.unfold(-1, ratio + 1, ratio).amax(-1)
