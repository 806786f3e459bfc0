"""Selection of the blocks that one query attends to (arXiv 2510.13602, section 3).

Forced blocks are the sinks and the sliding window with the current block. Of the rest, the best ``a`` by the pooled
stage-1 score are query-aware picks, and the best by the pooled beta fill the budget up to k. The order is total on
every device and type: score descending, then the lower index.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nosa_sys.errors import NumericsError
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig

# The codes of trace schema 1 (nosa_sys.traces.schema, which kernels do not import).
SINK, WINDOW, QUERY_AWARE, QUERY_AGNOSTIC, DENSE = range(5)


class Selection(NamedTuple):
    """Selected blocks: ids int32 [batch, kv_head, k] ascending and origins int8, both padded with -1 at the end;
    counts int32 [batch], the ids that are no padding."""

    block_ids: Tensor
    origins: Tensor
    counts: Tensor


@torch.no_grad()
def select_blocks(
    scores: Tensor, betas: Tensor, n_blocks: Tensor, cfg: SparseConfig, method: Method, *, first_row: int = 0
) -> Selection:
    """Select blocks for one query per row.

    scores and betas [batch, kv_head, block], pooled; n_blocks [batch], the blocks that exist, current one included:
    columns at or past it may hold anything. A row of at most k blocks selects all of them (origin 4). The result is k
    wide; for a dense method it is as wide as the scores. A candidate of score -inf is eligible, last of all.
    ``first_row`` is added to the row that an error names. Raises NumericsError for a NaN among the candidates of a
    ranking that is used.
    """
    n_heads, n_columns = scores.shape[1:]
    width = n_columns if method.dense else cfg.topk
    if n_columns <= width:
        return select_everything(n_blocks, n_heads, n_columns, width)

    ids = torch.arange(n_columns, device=scores.device)
    count = n_blocks.view(-1, 1, 1)
    exists = ids < count
    whole = count <= cfg.topk
    window = exists & (ids >= count - 1 - cfg.local_blocks)
    forced = window | (ids < cfg.init_blocks)
    candidates = (exists & ~forced & ~whole).expand_as(scores)
    # A row with more than k blocks is long enough for its sinks and window to be apart: the same counts for all.
    n_query_aware = method.query_aware_picks(cfg, cfg.n_forced)
    n_agnostic = method.fill(cfg, cfg.n_forced)

    origins = torch.where(window, WINDOW, SINK).expand_as(scores)
    chosen = ((forced | whole) & exists).expand_as(scores)
    for ranking, picks, origin, name in (
        (scores, n_query_aware, QUERY_AWARE, "stage-1 score"),
        (betas, n_agnostic, QUERY_AGNOSTIC, "beta"),
    ):
        if picks == 0:
            continue
        ranking = ranking.masked_fill(~candidates, -math.inf)
        _refuse_nan(ranking, name, first_row)
        picked = _best(ranking, candidates, picks)
        origins = torch.where(picked, origin, origins)
        chosen, candidates = chosen | picked, candidates & ~picked
    origins = torch.where(whole, DENSE, origins)

    # Each chosen block goes to its rank among the chosen; everything else to one spare column that is cut off.
    target = torch.where(chosen, chosen.cumsum(-1) - 1, width)
    shape = (*scores.shape[:2], width + 1)
    block_ids = torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    block_ids.scatter_(-1, target, ids.int().expand_as(scores))
    codes = torch.full(shape, -1, dtype=torch.int8, device=scores.device)
    codes.scatter_(-1, target, origins.to(torch.int8))
    return Selection(block_ids[..., :width], codes[..., :width], n_blocks.clamp(max=width).int())


@torch.no_grad()
def select_everything(n_blocks: Tensor, n_heads: int, n_columns: int, width: int) -> Selection:
    """The dense selection: blocks 0 .. n_blocks - 1 of each row, ``width`` >= n_columns >= n_blocks wide."""
    ids = torch.arange(width, device=n_blocks.device, dtype=torch.int32)
    exists = (ids < n_blocks.clamp(max=n_columns).view(-1, 1, 1)).expand(-1, n_heads, -1)
    block_ids = torch.where(exists, ids, -1)
    return Selection(block_ids, torch.where(exists, DENSE, -1).to(torch.int8), n_blocks.int())


def _best(ranking: Tensor, candidates: Tensor, picks: int) -> Tensor:
    """Mask of the first ``picks`` candidates in the order (value descending, index ascending).

    ``ranking`` is -inf outside the candidates. The smallest value that is still picked needs no stable sort; equal
    values are then taken from the lowest index on.
    """
    threshold = ranking.topk(picks, dim=-1).values[..., -1:]
    above = ranking > threshold
    equal = (ranking == threshold) & candidates
    room = picks - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _refuse_nan(ranking: Tensor, name: str, first_row: int) -> None:
    broken = ranking.isnan()
    if broken.any():
        row, head, block = broken.nonzero()[0].tolist()
        raise NumericsError(
            f"NaN in the pooled {name} of row {first_row + row}, KV head {head}, block {block}; no order exists: "
            "look for infinite or NaN weights and activations before this layer"
        )
