"""Eviction head, rotary embedding and append: the Triton kernels on CUDA tensors, else the reference.

Whatever needs gradients takes the reference: the kernels have no backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.kernels.eviction_head import append_reference, reference
from nosa_sys.kernels.eviction_head.append_reference import CurrentBlocks, HeadShape, TokenContext
from nosa_sys.kernels.launch import use_triton


def _fast(*tensors: Tensor) -> bool:
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return use_triton(*tensors) and not needs_gradient


def eviction_beta(v: Tensor, A: Tensor, delta: Tensor, head: str = "ed_dma") -> Tensor:
    """As ``reference.eviction_beta``."""
    if _fast(v, A, delta):
        from nosa_sys.kernels.eviction_head.triton import eviction_beta as fast

        return fast(v, A, delta, head)
    return reference.eviction_beta(v, A, delta, head)


def split_qkv_and_beta(
    qkv: Tensor, A: Tensor, delta: Tensor, n_q_heads: int, n_kv_heads: int, head_dim: int, head: str = "ed_dma"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``reference.split_qkv_and_beta``: views of q, k and v, and the betas."""
    if not _fast(qkv, A, delta):
        return reference.split_qkv_and_beta(qkv, A, delta, n_q_heads, n_kv_heads, head_dim, head)
    from nosa_sys.kernels.eviction_head.triton import eviction_beta as fast

    q, k, v, _ = reference.split_qkv_and_beta(qkv, A, delta, n_q_heads, n_kv_heads, head_dim, "none")
    return q, k, v, fast(qkv[:, (n_q_heads + n_kv_heads) * head_dim :], A, delta, head)


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
    """As ``append_reference.append_token``: the decode step's token of every row."""
    if use_triton(qkv, A, delta, cos):
        from nosa_sys.kernels.eviction_head.triton import append_token as fast

        return fast(qkv, A, delta, cos, sin, positions, context, shape, lanes=lanes, current=current)
    return append_reference.append_token(
        qkv, A, delta, cos, sin, positions, context, shape, lanes=lanes, current=current
    )
