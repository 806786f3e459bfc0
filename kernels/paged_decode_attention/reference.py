"""Dense decode attention over a paged KV cache: what full attention costs when all of it stays on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.kernels.numerics import acc_dtype


@torch.no_grad()
def paged_decode_attention(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to every token of each sequence.

    q [batch, q_head, head_dim] roped; pages [page, kv_head, 2, block, head_dim]; table int32 or int64 [batch, entry],
    the page of each block, -1 where there is none: that block is left out, in every head; lengths [batch], context
    tokens. Tokens at or past the length, and pages that are not named, may hold anything. Returns out
    [batch, q_head, head_dim] in q's type and lse [batch, q_head] in float32 (float64 for float64); an empty sequence
    gives zeros and -inf.
    """
    dtype = acc_dtype(q, pages)
    batch, n_q_heads, head_dim = q.shape
    n_kv_heads, block_size = pages.shape[1], pages.shape[3]
    outs, logs = [], []
    for sequence in range(batch):
        kv = pages.index_select(0, table[sequence].clamp(min=0).long()).to(dtype)
        keys, values = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [kv_head, token, head_dim] each
        tokens = torch.arange(keys.shape[1], device=q.device)
        valid = (tokens < lengths[sequence]) & (table[sequence] >= 0).repeat_interleave(block_size)
        keys = keys.masked_fill(~valid.unsqueeze(1), 0.0)
        values = values.masked_fill(~valid.unsqueeze(1), 0.0)
        grouped = q[sequence].to(dtype).view(n_kv_heads, -1, head_dim) / math.sqrt(head_dim)
        scores = (grouped @ keys.transpose(1, 2)).masked_fill(~valid, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
        outs.append((weights @ values).reshape(n_q_heads, head_dim))
        logs.append(lse.reshape(n_q_heads))
    return torch.stack(outs).to(q.dtype), torch.stack(logs)
