"""Dense decode attention over pages: the Triton kernel on CUDA, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.paged_decode_attention import reference


def paged_decode_attention(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.paged_decode_attention``."""
    if use_triton(q, pages):
        from nosa_sys.kernels.paged_decode_attention import triton

        return triton.paged_decode_attention(q, pages, table, lengths)
    return reference.paged_decode_attention(q, pages, table, lengths)
