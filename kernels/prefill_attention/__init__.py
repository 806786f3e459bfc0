"""Prefill selection and attention: the Triton kernels on CUDA, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.prefill_attention import reference
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig


def prefill_selection(
    q: Tensor, key_means: Tensor, beta_means: Tensor, first_position: int, cfg: SparseConfig, method: Method
) -> Selection:
    """As ``reference.prefill_selection``."""
    if use_triton(q, key_means, beta_means):
        from nosa_sys.kernels.prefill_attention import selection

        return selection.prefill_selection(q, key_means, beta_means, first_position, cfg, method)
    return reference.prefill_selection(q, key_means, beta_means, first_position, cfg, method)


def queue_selection(
    q: Tensor, key_means: Tensor, beta_means: Tensor, first_position: int, cfg: SparseConfig, method: Method
) -> tuple[Selection, Tensor | None]:
    """``prefill_selection`` without waiting for a GPU: the selection, and int32 [last queries, kv_head] that
    ``block_selection.raise_selection_errors`` turns into the NumericsError. None where there is nothing left to check:
    the reference raises at once."""
    if use_triton(q, key_means, beta_means):
        from nosa_sys.kernels.prefill_attention import selection

        return selection.queue_selection(q, key_means, beta_means, first_position, cfg, method)
    return reference.prefill_selection(q, key_means, beta_means, first_position, cfg, method), None


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    block_ids: Tensor | None,
    first_position: int,
    block_size: int,
) -> Tensor:
    """As ``reference.prefill_attention``; the kernel has no gradient, so tensors that want one take the reference."""
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, beta))
    if use_triton(q, k, v) and not learns:
        from nosa_sys.kernels.prefill_attention import triton

        return triton.prefill_attention(q, k, v, beta, block_ids, first_position, block_size)
    return reference.prefill_attention(q, k, v, beta, block_ids, first_position, block_size)
