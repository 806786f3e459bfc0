"""Sparse decode attention over slots or pages: the Triton kernels on CUDA, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.sparse_decode_attention import reference


def sparse_decode_attention(
    q: Tensor,
    slots: Tensor,
    slot_betas: Tensor | None,
    slot_rows: Tensor | None,
    block_ids: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``reference.sparse_decode_attention``; the kernel has no gradient, so tensors that want one take the
    reference, and recognises equal block ids only where they are neighbours."""
    learns = torch.is_grad_enabled() and (q.requires_grad or slots.requires_grad)
    learns = learns or (torch.is_grad_enabled() and slot_betas is not None and slot_betas.requires_grad)
    if use_triton(q, slots) and not learns:
        from nosa_sys.kernels.sparse_decode_attention import triton

        return triton.sparse_decode_attention(q, slots, slot_betas, slot_rows, block_ids, lengths, page_table, counts)
    return reference.sparse_decode_attention(q, slots, slot_betas, slot_rows, block_ids, lengths, page_table, counts)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.merge_partials``."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (out_a, lse_a, out_b, lse_b))
    if use_triton(out_a, lse_a) and not learns:
        from nosa_sys.kernels.sparse_decode_attention import triton

        return triton.merge_partials(out_a, lse_a, out_b, lse_b)
    return reference.merge_partials(out_a, lse_a, out_b, lse_b)
