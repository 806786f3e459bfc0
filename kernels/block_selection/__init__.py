"""Selection of blocks: the Triton kernel on CUDA, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.errors import NumericsError
from nosa_sys.kernels.block_selection import reference
from nosa_sys.kernels.block_selection.reference import Selection, select_everything
from nosa_sys.kernels.launch import use_triton
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig

# Set in an error code when the NaN is in the betas; the rest of the code is the block.
BETA_ERROR = 1 << 30


def select_blocks(
    scores: Tensor, betas: Tensor, n_blocks: Tensor, cfg: SparseConfig, method: Method, *, first_row: int = 0
) -> Selection:
    """As ``reference.select_blocks``. Inside a CUDA-graph capture nothing is checked: there, use the kernel's own entry
    (``triton.select_pooled``), whose ``errors`` go to ``raise_selection_errors`` after a replay."""
    width = scores.shape[2] if method.dense else cfg.topk
    if not use_triton(scores, betas) or scores.shape[2] <= width:
        return reference.select_blocks(scores, betas, n_blocks, cfg, method, first_row=first_row)
    from nosa_sys.kernels.block_selection import triton

    result = triton.select_pooled(scores, betas, n_blocks, cfg, method)
    if not torch.cuda.is_current_stream_capturing():
        raise_selection_errors(result.errors, first_row=first_row)
    return Selection(result.block_ids, result.origins, result.counts)


def raise_selection_errors(errors: Tensor, *, first_row: int = 0, where: str = "") -> None:
    """Raise NumericsError when ``errors`` int32 [batch, kv_head] of a selection kernel holds a NaN report (>= 0).

    Waits for the device. ``where`` goes in front of the row, for instance "layer 3, "."""
    found = (errors >= 0).nonzero()
    if len(found) == 0:
        return
    row, head = found[0].tolist()
    code = int(errors[row, head])
    name = "beta" if code & BETA_ERROR else "stage-1 score"
    raise NumericsError(
        f"NaN in the pooled {name} of {where}row {first_row + row}, KV head {head}, block {code & (BETA_ERROR - 1)}; "
        "no order exists: look for infinite or NaN weights and activations before this layer"
    )


__all__ = ["BETA_ERROR", "Selection", "raise_selection_errors", "select_blocks", "select_everything"]
