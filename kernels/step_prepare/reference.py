"""What a decode step needs of its rows before the first layer: lengths, current blocks, row numbers, rotary factors.

A row is one sequence of the batch, a lane its place on the device; page p of head h is row p * n_kv_heads + h of the
block pool. Everything follows from lanes and positions, which are all that changes from one step to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nosa_sys.kernels.numerics import acc_dtype


class StepGeometry(NamedTuple):
    """One step's rows; padding (lane -1) has length 0, -1 in every number, cosine 1 and sine 0.

    lengths int32 [row]: context tokens, the step's own included; current_blocks int32 [row], and the same for every
    head in head_blocks int32 [row * kv_head]; row_heads int64 [row * kv_head]: lane * n_kv_heads + head;
    page_rows int64 [row * kv_head]: pool row of the current block, -1 where its page is unknown (-1 in the table, or
    the block past its end); write_back_rows int64 [row * kv_head]: the same where this token fills the block, else -1;
    cos and sin [row, head_dim / 2], float32 (float64 for float64 frequencies).
    """

    lengths: Tensor
    current_blocks: Tensor
    head_blocks: Tensor
    row_heads: Tensor
    page_rows: Tensor
    write_back_rows: Tensor
    cos: Tensor
    sin: Tensor


@torch.no_grad()
def prepare_step(
    lanes: Tensor,
    positions: Tensor,
    page_table: Tensor,
    inverse_frequencies: Tensor,
    n_kv_heads: int,
    block_size: int,
) -> StepGeometry:
    """Work out a step's geometry.

    lanes int64 [row], -1 is padding; positions int64 [row]: the position of the token that the row consumes, any value
    in padding; page_table int64 [lane, block], -1 unknown; inverse_frequencies [head_dim / 2]: angle per position of
    each channel pair, scaled as the model says.
    """
    real = lanes >= 0
    lane, position = lanes.clamp(min=0), torch.where(real, positions, 0)
    block = position // block_size
    n_blocks = page_table.shape[1]
    known = real & (block < n_blocks)
    page = torch.where(known, page_table[lane, torch.where(known, block, 0)], -1)
    heads = torch.arange(n_kv_heads, device=lanes.device)

    def by_head(base: Tensor, where: Tensor) -> Tensor:
        return torch.where(where[:, None], base[:, None] * n_kv_heads + heads, -1).flatten()

    current = torch.where(real, block, -1).int()
    filled = (position + 1) % block_size == 0
    angles = position.to(acc_dtype(inverse_frequencies))[:, None] * inverse_frequencies
    return StepGeometry(
        lengths=torch.where(real, position + 1, 0).int(),
        current_blocks=current,
        head_blocks=current.repeat_interleave(n_kv_heads),
        row_heads=by_head(lane, real),
        page_rows=by_head(page, page >= 0),
        write_back_rows=by_head(page, (page >= 0) & filled),
        cos=angles.cos(),
        sin=angles.sin(),
    )
