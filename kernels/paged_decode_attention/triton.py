"""Dense paged decode: the attention kernel of the slots, its rows read from a page table, without bias.

Floor and knobs: see ``sparse_decode_attention.triton``, whose kernels these are.
"""

from __future__ import annotations

from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.sparse_decode_attention.triton import attend, attend_spec


def paged_decode_attention(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    splits: int | None = None,
    ctas_per_sm: int = 2,
    num_warps: int = 4,
    num_stages: int = 4,
) -> tuple[Tensor, Tensor]:
    """As ``reference.paged_decode_attention``; capturable, lengths and table are read on the device."""
    if not pages.is_contiguous():
        raise ConfigError(f"pages have strides {pages.stride()}; they must be contiguous")
    return attend(
        q,
        pages.flatten(0, 1),
        None,
        table,
        None,
        lengths,
        pages.shape[1],
        splits=splits,
        ctas_per_sm=ctas_per_sm,
        num_warps=num_warps,
        num_stages=num_stages,
    )


AOT_SPECS = [
    attend_spec(dtype, dim, block, paged=True, biased=False)
    for dtype, dim, block in (("bf16", 128, 64), ("fp16", 128, 256), ("fp32", 128, 16))
]
