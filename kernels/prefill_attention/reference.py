"""Prefill: per-query block selection and block-sparse attention over many positions (paper section 3).

Every query is treated as if the context ended at its own position, so prefill and decode agree. Work goes in chunks
of queries: a masked dense product over the union of the chunk's blocks is far faster on a CPU than a gather per
query, and its memory is O(chunk x context).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import Selection, select_blocks, select_everything
from nosa_sys.kernels.numerics import acc_dtype
from nosa_sys.kernels.stage1_scores.reference import stage1_scores_causal
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig

# Chunks end at multiples of this many positions: neighbours select nearly the same blocks, so the union stays small.
_QUERIES_PER_CHUNK = 64
# Stage-1 logits held at once.
_MAX_LOGITS = 2**22


@torch.no_grad()
def prefill_selection(
    q: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    first_position: int,
    cfg: SparseConfig,
    method: Method,
) -> Selection:
    """Select blocks for the queries at positions first_position .. first_position + tokens - 1.

    q [tokens, q_head, head_dim] roped; key_means [kv_head, window, head_dim] and beta_means [kv_head, window] of the
    context up to the last query at least (later windows are not looked at). Returns a Selection whose batch dimension
    is the token; see ``select_blocks``, also for errors: the row named is the position. Raises CapacityError when
    windows are lacking.
    """
    n_tokens, n_kv_heads = q.shape[0], key_means.shape[0]
    needed = cfg.n_windows(first_position + n_tokens)
    if min(key_means.shape[1], beta_means.shape[1]) < needed:
        raise CapacityError(
            f"{key_means.shape[1]} key means and {beta_means.shape[1]} beta means do not cover the "
            f"{first_position + n_tokens} tokens of context; give all {needed} windows"
        )
    last_blocks = cfg.n_blocks(first_position + n_tokens)
    width = last_blocks if method.dense else cfg.topk
    positions = torch.arange(first_position, first_position + n_tokens, device=q.device)
    n_dense = n_tokens if method.dense else min(n_tokens, max(0, cfg.topk_tokens - first_position))

    parts = [select_everything(positions[:n_dense] // cfg.block_size + 1, n_kv_heads, width, width)]
    step = max(1, _MAX_LOGITS // (q.shape[1] * max(1, key_means.shape[1])))
    for start in range(n_dense, n_tokens, step):
        chunk = positions[start : start + step]
        context = int(first_position + min(start + step, n_tokens))
        means = key_means[:, : cfg.n_windows(context)]
        scores = stage1_scores_causal(q[start : start + step], means, chunk, cfg.kernel_size, cfg.kernel_stride)
        n_windows = ((chunk + 1 - cfg.kernel_size) // cfg.kernel_stride + 1).clamp(min=0)
        betas = beta_means[:, : cfg.n_windows(context)].expand(len(chunk), -1, -1)
        n_blocks = cfg.n_blocks(context)
        parts.append(
            select_blocks(
                pool_windows(scores, n_windows, n_blocks, cfg),
                pool_windows(betas, n_windows, n_blocks, cfg),
                chunk // cfg.block_size + 1,
                cfg,
                method,
                first_row=first_position + start,
            )
        )
    return Selection(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    block_ids: Tensor | None,
    first_position: int,
    block_size: int,
) -> Tensor:
    """Attention of many queries of one sequence.

    q [tokens, q_head, head_dim] roped, at positions first_position + t; k, v [context, kv_head, head_dim] and
    beta [context, kv_head] or None; block_ids int32 [tokens, kv_head, k], -1 padded, or None for dense attention.
    Query t sees the tokens at or before its position that lie in its blocks. Returns [tokens, q_head, head_dim] in q's
    type; a query without blocks gives zeros. Differentiable in q, k, v and beta.
    """
    n_tokens, n_kv_heads = q.shape[0], k.shape[1]
    chunks = []
    start = 0
    while start < n_tokens:
        position = first_position + start
        stop = min(n_tokens, start + _QUERIES_PER_CHUNK - position % _QUERIES_PER_CHUNK)
        heads = [
            _attend_chunk(
                q[start:stop].unflatten(1, (n_kv_heads, -1))[:, head],
                k[:, head],
                v[:, head],
                None if beta is None else beta[:, head],
                None if block_ids is None else block_ids[start:stop, head],
                position,
                block_size,
            )
            for head in range(n_kv_heads)
        ]
        chunks.append(torch.cat(heads, dim=1))
        start = stop
    return torch.cat(chunks) if chunks else torch.empty_like(q)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, block_ids: Tensor | None, position: int, block_size: int
) -> Tensor:
    """One chunk of queries of one KV head.

    q [chunk, group, head_dim]; k, v [context, head_dim]; beta [context]; block_ids [chunk, k]. Returns like q.
    """
    dtype = acc_dtype(q, k)
    n_queries, group, head_dim = q.shape
    end = position + n_queries
    positions = torch.arange(position, end, device=q.device).unsqueeze(1)
    if block_ids is None:
        tokens = torch.arange(end, device=q.device)
        keys, values = k[:end], v[:end]
        bias = None if beta is None else beta[:end].to(dtype)
        blind = torch.zeros(n_queries, 1, dtype=torch.bool, device=q.device)
    else:
        n_blocks = -(-end // block_size)
        # Padding goes to one spare column that is cut off, as do blocks that lie after the query.
        column = torch.where((block_ids >= 0) & (block_ids * block_size <= positions), block_ids, n_blocks)
        member = torch.zeros(n_queries, n_blocks + 1, dtype=torch.bool, device=q.device)
        member = member.scatter_(1, column.long(), True)[:, :n_blocks]
        union = member.any(0).nonzero().squeeze(1)
        tokens = (union.unsqueeze(1) * block_size + torch.arange(block_size, device=q.device)).flatten()
        rows = tokens.clamp(max=end - 1)  # the rest of the last block is hidden by causality
        keys, values = k.index_select(0, rows), v.index_select(0, rows)
        # A row of -inf alone has no softmax: a query without blocks sees everything, and is zeroed at the end.
        blind = ~member.any(1, keepdim=True)
        bias = torch.zeros(n_queries, len(union), dtype=dtype, device=q.device)
        bias = bias.masked_fill_(~member[:, union] & ~blind, -math.inf).unsqueeze(2)
        own = torch.zeros(1, block_size, dtype=dtype, device=q.device) if beta is None else beta.index_select(0, rows)
        bias = (bias + own.to(dtype).view(-1, block_size)).flatten(1)

    scaled = (q.to(dtype) / math.sqrt(head_dim)).transpose(0, 1).flatten(0, 1)
    scores = (scaled @ keys.to(dtype).T).view(group, n_queries, -1)
    if bias is not None:
        scores = scores.add_(bias)
    # Tokens are ascending: only the last of them can lie after a query.
    first_hidden = int(torch.searchsorted(tokens, position, right=True))
    hidden = (tokens[first_hidden:] > positions) & ~blind
    scores[..., first_hidden:].masked_fill_(hidden, -math.inf)
    out = scores.softmax(-1).flatten(0, 1) @ values.to(dtype)
    return out.view(group, n_queries, head_dim).transpose(0, 1).masked_fill(blind.unsqueeze(-1), 0.0).to(q.dtype)
