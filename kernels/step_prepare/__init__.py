"""Geometry of a decode step from lanes and positions: the reference."""

from __future__ import annotations

from torch import Tensor

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
    """As ``reference.prepare_step``."""
    return reference.prepare_step(lanes, positions, page_table, inverse_frequencies, n_kv_heads, block_size)
