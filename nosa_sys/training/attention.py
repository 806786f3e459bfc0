"""Attention of a training step: selection without gradient, then biased block-sparse attention with exact gradients.

The sets are discrete: nothing flows through them (paper section 3). Everything that learns, the eviction head included,
learns through the softmax over the selected tokens. Each way of computing it is one entry of ``ATTENTIONS``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.launch import interpreting, use_triton
from nosa_sys.kernels.prefill_attention import queue_selection
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.recipe import ATTENTION_NAMES

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int], Tensor]

_ALIGNED_CHANNELS = 8  # torch's fused attention wants head sizes in multiples of 8
_BETA_PARTS = 3  # bfloat16 keeps 8 bits: three of them hold a float32
_TILE = 128  # tokens a side of FlexAttention's mask tiles


class Selected(NamedTuple):
    """Blocks of every query of one sequence: block_ids int32 [tokens, kv_head, k] ascending, -1 padded. ``errors``
    int32 [last queries, kv_head] is for ``raise_selection_errors``; None where nothing is left to check."""

    block_ids: Tensor
    errors: Tensor | None


@torch.no_grad()
def select(q: Tensor, k: Tensor, beta: Tensor, cfg: SparseConfig, method: Method) -> Selected | None:
    """Selection of one sequence, as the engine's prefill selects; None for a dense method. Does not wait for a GPU.

    q [tokens, q_head, head_dim] and k [tokens, kv_head, head_dim] roped, beta [tokens, kv_head]. Raises NumericsError
    for NaN scores on a CPU; on a GPU they are reported in ``errors``.
    """
    if method.dense:
        return None
    with torch.autocast(q.device.type, enabled=False):
        key_means = window_means(k, cfg.kernel_size, cfg.kernel_stride).transpose(0, 1).contiguous()
        beta_means = window_means(beta, cfg.kernel_size, cfg.kernel_stride).T.contiguous()
        selection, errors = queue_selection(q, key_means, beta_means, 0, cfg, method)
        return Selected(selection.block_ids, errors)


def membership(block_ids: Tensor, n_blocks: int) -> Tensor:
    """block_ids [tokens, kv_head, k] -> bool [kv_head, tokens, block]: whether a query selected a block."""
    ids = block_ids.transpose(0, 1).long()
    member = torch.zeros(*ids.shape[:2], n_blocks + 1, dtype=torch.bool, device=ids.device)
    return member.scatter_(2, torch.where(ids < 0, n_blocks, ids), True)[..., :n_blocks]


def attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, block_ids: Tensor | None, block_size: int
) -> Tensor:
    """Causal attention of a whole sequence by the named entry of ``ATTENTIONS``.

    q [tokens, q_head, head_dim] and k roped, v [tokens, kv_head, head_dim]; beta [tokens, kv_head] fp32 or None, added
    after the scaling; block_ids int32 [tokens, kv_head, k] or None for all blocks. Returns [tokens, q_head, head_dim]
    in q's type, differentiable in q, k, v and beta. Raises ConfigError for an unknown name.
    """
    if name not in ATTENTIONS:
        raise ConfigError(f"attention={name!r} must be one of {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name](q, k, v, beta, block_ids, block_size)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KV heads as batch and their query heads as heads: q [kv_head, group, tokens, D], k and v [kv_head, 1, ...]."""
    queries = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    return queries, k.transpose(0, 1).unsqueeze(1), v.transpose(0, 1).unsqueeze(1)


def _ungrouped(out: Tensor) -> Tensor:
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def beta_channels(beta: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """beta [...] as 8 more key channels [..., 8] of a query that has ones there: their sum is beta * sqrt(head_dim).

    In bfloat16 the value is split in three parts, so that nothing of a float32 is lost; the whole gradient goes
    through the first.
    """
    value = beta * math.sqrt(head_dim)
    parts = [value.to(dtype)]
    rest = value.detach() - parts[0].detach().to(value.dtype)
    while dtype == torch.bfloat16 and len(parts) < _BETA_PARTS:
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(value.dtype)
    return F.pad(torch.stack(parts, -1), (0, _ALIGNED_CHANNELS - len(parts)))


def _with_beta(queries: Tensor, keys: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Grouped queries and keys, with beta as more key channels where there is one."""
    if beta is None:
        return queries, keys
    channels = beta_channels(beta, keys.shape[-1], queries.dtype)
    keys = torch.cat([keys, channels.transpose(0, 1).unsqueeze(1)], dim=-1)
    return F.pad(queries, (0, _ALIGNED_CHANNELS), value=1.0), keys


def _sdpa(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, block_ids: Tensor | None, block_size: int) -> Tensor:
    """beta as one more key channel (query channel 1, key channel beta * sqrt(D)) over torch's SDPA, with a boolean
    mask of the selected blocks: any ordinary attention kernel then has the exact gradients. The mask takes
    kv_heads * tokens^2 bytes, and three times that on CUDA in bfloat16."""
    n_tokens, head_dim = q.shape[0], q.shape[2]
    queries, keys, values = _grouped(q, k, v)
    mask = None
    if block_ids is not None or beta is not None:
        causal = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q.device).tril_()
        mask = causal.expand(k.shape[1], -1, -1)
        if block_ids is not None:
            member = membership(block_ids, -(-n_tokens // block_size))
            mask = member.repeat_interleave(block_size, dim=2)[..., :n_tokens] & causal
        mask = mask.unsqueeze(1)
    queries, keys = _with_beta(queries, keys, beta)
    if beta is not None and q.device.type == "cpu":  # its fused kernel wants values as wide as keys
        values = F.pad(values, (0, _ALIGNED_CHANNELS))
    group = queries.shape[1]
    out = F.scaled_dot_product_attention(
        queries,
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0 / math.sqrt(head_dim),
    )
    return _ungrouped(out[..., :head_dim])


def _flex(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, block_ids: Tensor | None, block_size: int) -> Tensor:
    """torch's FlexAttention: tiles that no query of theirs selected are skipped; beta comes as key channels, since the
    gradient of a captured bias is added up token by token in atomics. Plain causal attention is torch's own. Compiled
    on CUDA; on a CPU it runs uncompiled and without gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    if block_ids is None and beta is None:
        return _sdpa(q, k, v, beta, block_ids, block_size)
    n_tokens, n_kv_heads = q.shape[0], k.shape[1]
    if block_ids is None:
        every = torch.arange(-(-n_tokens // block_size), dtype=torch.int32, device=q.device)
        current = torch.arange(n_tokens, device=q.device)[:, None, None] // block_size
        block_ids = torch.where(every <= current, every, -1).expand(-1, n_kv_heads, -1)
    run: Any = _compiled_flex() if q.is_cuda else flex_attention
    queries, keys, values = _grouped(q, k, v)
    queries, keys = _with_beta(queries, keys, beta)
    out = run(
        queries.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        block_mask=flex_mask(membership(block_ids, -(-n_tokens // block_size)), block_size),
        scale=1.0 / math.sqrt(q.shape[2]),
        enable_gqa=True,
    )
    return _ungrouped(out)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_mask(member: Tensor, block_size: int) -> Any:
    """FlexAttention's BlockMask [kv_head, 1, tile, tile] of member [kv_head, tokens, block].

    Raises ConfigError for a block size that is no divisor and no multiple of the 128-token tile.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if _TILE % block_size and block_size % _TILE:
        raise ConfigError(
            f"attention flex needs a block_size that divides {_TILE} or is a multiple of it, not {block_size}; "
            "use attention sdpa"
        )
    n_tokens = member.shape[1]
    n_tiles = -(-n_tokens // _TILE)
    rows = F.pad(member, (0, 0, 0, n_tiles * _TILE - n_tokens)).unflatten(1, (n_tiles, _TILE))
    beyond = torch.arange(n_tiles * _TILE, device=member.device).view(1, n_tiles, _TILE, 1) >= n_tokens
    some, every = rows.any(2), (rows | beyond).all(2)
    if block_size < _TILE:
        blocks_per_tile = _TILE // block_size
        fill = (0, n_tiles * blocks_per_tile - some.shape[2])
        some = F.pad(some, fill).unflatten(2, (n_tiles, blocks_per_tile)).any(3)
        every = F.pad(every, fill).unflatten(2, (n_tiles, blocks_per_tile)).all(3)
    else:
        some = some.repeat_interleave(block_size // _TILE, dim=2)[..., :n_tiles]
        every = every.repeat_interleave(block_size // _TILE, dim=2)[..., :n_tiles]
    tiles = torch.arange(n_tiles, device=member.device)
    whole = every & (tiles < tiles.unsqueeze(1))  # causality cuts the diagonal tiles
    partial = some & ~whole & (tiles <= tiles.unsqueeze(1))

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return member[row, query, key // block_size] & (key <= query)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().sort(dim=-1, descending=True, stable=True).indices
        return chosen.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(whole), BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(n_tokens, n_tokens)
    )


def _triton(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, block_ids: Tensor | None, block_size: int) -> Tensor:
    """Kernels of our own, on a GPU or in Triton's interpreter; plain causal attention is torch's own."""
    if block_ids is None and beta is None:
        return _sdpa(q, k, v, beta, block_ids, block_size)
    if not (use_triton(q, k, v) or interpreting()):
        raise ConfigError("attention triton needs a GPU and a type other than float64; use attention sdpa")
    from nosa_sys.training.attention_triton import block_attention

    member = None if block_ids is None else membership(block_ids, -(-q.shape[0] // block_size))
    return block_attention(q, k, v, beta, member, block_size)


ATTENTIONS: dict[str, Attention] = dict(zip(ATTENTION_NAMES, (_sdpa, _flex, _triton), strict=True))
