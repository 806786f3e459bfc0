"""Append of compressed keys in decode, the definition: from a ring of the last keys, as lengths complete windows."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.kernels.compressed_keys.reference import completes_window, window_mean_of_tail


@torch.no_grad()
def append_windows(
    ring: Tensor,
    token_betas: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    lengths: Tensor,
    stride: int,
    *,
    lanes: Tensor | None = None,
) -> None:
    """Write the window that ends at token length - 1, in place, for the rows whose length completes one.

    ring [lane, kernel, kv_head, head_dim] with token t at t % kernel; token_betas [lane, kv_head, ...] by token;
    key_means [lane, kv_head, window, head_dim]; beta_means [lane, kv_head, window]; lengths [row], tokens;
    lanes [row] (None: the row itself), -1 is padding. Stores nothing past the windows that there is room for.
    """
    kernel = ring.shape[1]
    rows = torch.arange(lengths.numel(), device=lengths.device) if lanes is None else lanes
    window = (lengths - kernel) // stride
    done = completes_window(lengths, kernel, stride) & (rows >= 0) & (window < beta_means.shape[2])
    rows, window, ends = rows[done].long(), window[done].long(), lengths[done].long()
    tail = ends[:, None] - kernel + torch.arange(kernel, device=lengths.device)
    key_means[rows, :, window] = window_mean_of_tail(ring[rows[:, None], tail % kernel]).to(key_means.dtype)
    by_token = token_betas.flatten(2)
    beta_means[rows, :, window] = window_mean_of_tail(by_token[rows[:, None], :, tail]).to(beta_means.dtype)
