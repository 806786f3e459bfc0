"""One decode token of every row, the definition: split the projection, score the values, rotate, append.

Order as in the paper's layer: beta from the un-roped values, rotary embedding on q and k, compressed keys from the
ROPED keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nosa_sys.kernels.compressed_keys.append_reference import append_windows
from nosa_sys.kernels.eviction_head.reference import split_qkv_and_beta


@dataclass(frozen=True)
class HeadShape:
    """Heads and windows of one layer; ``head`` is ed_dma, dma or none."""

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    head: str
    stride: int


@dataclass(frozen=True)
class TokenContext:
    """What one layer keeps on the device for every token.

    ring [lane, kernel, kv_head, head_dim]: the last roped keys, token t at t % kernel; token_betas
    [lane, kv_head, ...] by token; key_means [lane, kv_head, window, head_dim]; beta_means [lane, kv_head, window].
    """

    ring: Tensor
    token_betas: Tensor
    key_means: Tensor
    beta_means: Tensor


@dataclass(frozen=True)
class CurrentBlocks:
    """Where the token's K, V and beta go: slots [slot_row, 2, block, head_dim], slot_betas [slot_row, block] (None: not
    kept), and rows int64 [row, kv_head], the slot row of each current block (-1: nothing is written)."""

    slots: Tensor
    slot_betas: Tensor | None
    rows: Tensor


@torch.no_grad()
def append_token(
    qkv: Tensor,
    A: Tensor,
    delta: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    context: TokenContext,
    shape: HeadShape,
    *,
    lanes: Tensor | None = None,
    current: CurrentBlocks | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token a row.

    qkv [row, (q_head + 2 * kv_head) * head_dim]; A [kv_head], delta [kv_head, kv_head * head_dim]; cos and sin
    [row, head_dim / 2] of the row's position; positions int64 [row]; lanes int64 [row] (None: the row itself), -1 is
    padding that writes nothing. Writes the key into the ring, the beta into token_betas, the windows that the token
    completes, and with ``current`` K, V and beta into the slots. Returns roped q [row, q_head, head_dim], roped k and
    plain v [row, kv_head, head_dim], and beta [row, kv_head].
    """
    q, k, v, beta = split_qkv_and_beta(qkv, A, delta, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, shape.head)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    lane = torch.arange(qkv.shape[0], device=qkv.device) if lanes is None else lanes
    real = lane >= 0
    rows, at = lane[real], positions[real]
    context.ring[rows, at % context.ring.shape[1]] = k[real]
    context.token_betas.flatten(2)[rows, :, at] = beta[real].to(context.token_betas.dtype)
    append_windows(
        context.ring,
        context.token_betas,
        context.key_means,
        context.beta_means,
        positions + 1,
        shape.stride,
        lanes=lane,
    )
    if current is not None:
        place_token(k, v, beta, positions, current)
    return q, k, v, beta


@torch.no_grad()
def place_token(k: Tensor, v: Tensor, beta: Tensor, positions: Tensor, current: CurrentBlocks) -> None:
    """Write k and v [row, kv_head, head_dim] and beta [row, kv_head] into their current blocks."""
    offset = (positions % current.slots.shape[2])[:, None].expand_as(current.rows)
    real = current.rows >= 0
    rows, offset = current.rows[real], offset[real]
    current.slots[rows, 0, offset] = k[real]
    current.slots[rows, 1, offset] = v[real]
    if current.slot_betas is not None:
        current.slot_betas[rows, offset] = beta[real].to(current.slot_betas.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of channel pairs (i, i + D/2): x [row, head, D], cos and sin [row, D/2]."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
