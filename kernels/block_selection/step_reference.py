"""Scores, pooling and selection of one decode step, lengths read on the device: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.kernels.stage1_scores.reference import stage1_scores
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig

# Set in an error code when the NaN is in the betas; the rest of the code is the block.
BETA_ERROR = 1 << 30


class StepSelection(NamedTuple):
    """Selection of one decode step. block_ids int32 and origins int8 [batch, kv_head, k], counts int32 [batch] as in
    ``reference.Selection``; errors int32 [batch, kv_head]: -1, or the first block whose ranking value is NaN (plus
    ``BETA_ERROR`` for a beta); window_scores [batch, kv_head, window], pooled_scores and pooled_betas
    [batch, kv_head, block] float32, None where not asked for."""

    block_ids: Tensor
    origins: Tensor
    counts: Tensor
    errors: Tensor
    window_scores: Tensor | None
    pooled_scores: Tensor | None
    pooled_betas: Tensor | None


@torch.no_grad()
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
    """q [batch, q_head, head_dim] roped; key_means [batch, kv_head, window, head_dim]; beta_means [batch, kv_head,
    window]; lengths [batch], context tokens (0: a row of padding, which selects nothing); n_blocks, how many blocks a
    row can have. NaN never raises: it is reported in ``errors``, and the row's selection is then of no use.
    """
    lengths = lengths.to(torch.int64)
    counts = ((lengths + cfg.block_size - 1) // cfg.block_size).clamp(max=n_blocks)
    n_windows = ((lengths - cfg.kernel_size) // cfg.kernel_stride + 1).clamp(min=0, max=key_means.shape[2])
    scores = stage1_scores(q, key_means, n_windows)
    pooled_scores = pool_windows(scores, n_windows, n_blocks, cfg)
    pooled_betas = pool_windows(beta_means, n_windows, n_blocks, cfg)
    errors = _first_errors(pooled_scores, pooled_betas, counts, cfg, method)
    scores_in = pooled_scores.nan_to_num(nan=0.0, neginf=-torch.inf)
    betas_in = pooled_betas.nan_to_num(nan=0.0, neginf=-torch.inf)
    chosen = select_blocks(scores_in, betas_in, counts, cfg, method)
    kept = (pooled_scores, pooled_betas) if keep_pooled else (None, None)
    return StepSelection(chosen.block_ids.contiguous(), chosen.origins, chosen.counts, errors, scores, *kept)


def _first_errors(scores: Tensor, betas: Tensor, counts: Tensor, cfg: SparseConfig, method: Method) -> Tensor:
    """int32 [batch, kv_head]: -1, or the first candidate block with a NaN in a ranking that is used."""
    ids = torch.arange(scores.shape[2], device=scores.device)
    count = counts.view(-1, 1, 1)
    free = (ids >= cfg.init_blocks) & (ids < count - 1 - cfg.local_blocks) & (count > cfg.topk)
    errors = torch.full(scores.shape[:2], -1, dtype=torch.int64, device=scores.device)
    used = (
        (betas, method.fill(cfg, cfg.n_forced), BETA_ERROR),
        (scores, method.query_aware_picks(cfg, cfg.n_forced), 0),
    )
    for values, picks, code in used:  # the scores are looked at last: their report wins
        broken = values.isnan() & free
        first = torch.where(broken, ids, scores.shape[2]).amin(-1)
        errors = torch.where(broken.any(-1) & (picks > 0), first + code, errors)
    return errors.int()
