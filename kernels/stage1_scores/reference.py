"""Stage 1: how much each query would attend to each compressed key, summed over the query heads of a group.

Paper section 3: softmax over the visible windows per query head, then the sum over the g = Hq / Hkv heads that share
a KV head. Runs without gradient: the eviction head learns through the attention bias only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.kernels.numerics import acc_dtype


@torch.no_grad()
def stage1_scores(q: Tensor, key_means: Tensor, n_windows: Tensor) -> Tensor:
    """Scores of one query position per sequence (decode).

    q [batch, q_head, head_dim] roped; key_means [batch, kv_head, window, head_dim]; n_windows [batch], the windows
    that exist. Returns [batch, kv_head, window] in float32 (float64 for float64); windows at or past n_windows score
    zero, whatever their memory holds.
    """
    dtype = acc_dtype(q, key_means)
    batch, n_kv_heads, n_columns, head_dim = key_means.shape
    grouped = q.to(dtype).view(batch, n_kv_heads, -1, head_dim) / math.sqrt(head_dim)
    logits = grouped @ key_means.to(dtype).transpose(-1, -2)
    missing = torch.arange(n_columns, device=q.device) >= n_windows.view(batch, 1, 1, 1)
    # The second fill also clears sequences without any window, whose softmax is 0/0.
    shares = logits.masked_fill_(missing, -math.inf).softmax(-1).masked_fill_(missing, 0.0)
    return shares.sum(2)


@torch.no_grad()
def stage1_scores_causal(q: Tensor, key_means: Tensor, positions: Tensor, kernel: int, stride: int) -> Tensor:
    """Scores of many query positions of one sequence (prefill).

    q [tokens, q_head, head_dim] roped; key_means [kv_head, window, head_dim]; positions [tokens]. A window is visible
    when its last token is at or before the query: stride * i + kernel - 1 <= position. Returns
    [tokens, kv_head, window], zeros for windows that are not visible.
    """
    dtype = acc_dtype(q, key_means)
    n_kv_heads, n_columns, head_dim = key_means.shape
    n_tokens = q.shape[0]
    grouped = q.to(dtype).view(n_tokens, n_kv_heads, -1, head_dim).transpose(0, 1) / math.sqrt(head_dim)
    logits = grouped.flatten(1, 2) @ key_means.to(dtype).transpose(-1, -2)
    last_token = torch.arange(n_columns, device=q.device) * stride + (kernel - 1)
    missing = (last_token > positions.unsqueeze(1)).view(1, n_tokens, 1, n_columns)
    logits = logits.view(n_kv_heads, n_tokens, -1, n_columns).masked_fill_(missing, -math.inf)
    return logits.softmax(-1).masked_fill_(missing, 0.0).sum(2).transpose(0, 1)
