"""Selection of blocks: the Triton kernel on CUDA, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.errors import NumericsError
from nosa_sys.kernels.block_selection import reference, step_reference
from nosa_sys.kernels.block_selection.reference import Selection, select_everything
from nosa_sys.kernels.block_selection.step_reference import BETA_ERROR, StepSelection
from nosa_sys.kernels.launch import use_triton
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig


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


def score_and_select(
    q: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    lengths: Tensor,
    n_blocks: int,
    cfg: SparseConfig,
    method: Method,
    *,
    keep_pooled: bool = False,
) -> StepSelection:
    """As ``step_reference.score_and_select``; never synchronises, a graph can hold it."""
    if use_triton(q, key_means, beta_means):
        from nosa_sys.kernels.block_selection import triton

        return triton.score_and_select(
            q, key_means, beta_means, lengths, n_blocks, cfg, method, keep_pooled=keep_pooled
        )
    return step_reference.score_and_select(
        q, key_means, beta_means, lengths, n_blocks, cfg, method, keep_pooled=keep_pooled
    )


def select_pooled(
    scores: Tensor, betas: Tensor, n_blocks: Tensor, cfg: SparseConfig, method: Method
) -> tuple[Tensor, Tensor]:
    """Block ids and origins of ``select_blocks`` [batch, kv_head, k], without any check; a graph can hold it."""
    if use_triton(scores, betas):
        from nosa_sys.kernels.block_selection import triton

        return triton.select_pooled(scores, betas, n_blocks, cfg, method)[:2]
    return reference.select_blocks(scores.nan_to_num(0.0), betas.nan_to_num(0.0), n_blocks, cfg, method)[:2]


def raise_selection_errors(errors: Tensor, *, first_row: int = 0, where: str = "") -> None:
    """Raise NumericsError when ``errors`` int32 [batch, kv_head] of a selection kernel holds a NaN report (>= 0).

    Waits for the device. ``where`` goes in front of the row, for instance "layer 3, "."""
    found = (errors >= 0).nonzero()
    if len(found) == 0:
        return
    row, head = found[0].tolist()
    raise NumericsError(describe_error(int(errors[row, head]), f"{where}row {first_row + row}, KV head {head}"))


def describe_error(code: int, where: str) -> str:
    """What an error code >= 0 of a selection kernel says."""
    name = "beta" if code & BETA_ERROR else "stage-1 score"
    return (
        f"NaN in the pooled {name} of {where}, block {code & (BETA_ERROR - 1)}; no order exists: "
        "look for infinite or NaN weights and activations before this layer"
    )


__all__ = [
    "BETA_ERROR",
    "Selection",
    "StepSelection",
    "describe_error",
    "raise_selection_errors",
    "score_and_select",
    "select_blocks",
    "select_everything",
    "select_pooled",
]
