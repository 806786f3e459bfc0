"""Geometry of a decode step from lanes and positions: the Triton kernel on CUDA, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.step_prepare import reference
from nosa_sys.kernels.step_prepare.reference import StepGeometry


def prepare_step(
    lanes: Tensor,
    positions: Tensor,
    page_table: Tensor,
    inverse_frequencies: Tensor,
    n_kv_heads: int,
    block_size: int,
) -> StepGeometry:
    """As ``reference.prepare_step``; on CUDA one launch that a graph can hold."""
    if use_triton(lanes, inverse_frequencies):
        from nosa_sys.kernels.step_prepare import triton

        return triton.prepare_step(lanes, positions, page_table, inverse_frequencies, n_kv_heads, block_size)
    return reference.prepare_step(lanes, positions, page_table, inverse_frequencies, n_kv_heads, block_size)
