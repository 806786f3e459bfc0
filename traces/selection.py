"""Block selection in numpy: pooling, forced blocks, query-aware picks, query-agnostic fill.

arXiv 2510.13602, section 3.

The torch twin of the engine lives in kernels/block_selection and kernels/block_pooling; a test holds them equal.
"""

from __future__ import annotations

import numpy as np

from nosa_sys.errors import NumericsError
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import ORIGIN_AGNOSTIC, ORIGIN_DENSE, ORIGIN_QUERY, ORIGIN_SINK, ORIGIN_WINDOW


def pool_windows_np(windows: np.ndarray, n_windows: np.ndarray | int, n_blocks: int, cfg: SparseConfig) -> np.ndarray:
    """Max over the windows that overlap each block.

    Args:
        windows: ``[row, window]``; entries at or past the row's ``n_windows`` are ignored, NaN included.
        n_windows: complete windows of each row, ``[row]`` or one number.
        n_blocks: width of the result.

    Returns:
        ``[row, n_blocks]`` of the same dtype: block j takes windows r*j-1 .. r*j+r-1 with r = block / stride;
        -inf where none of them is complete.
    """
    n_rows, width = windows.shape
    ratio = cfg.windows_per_block
    used = min(width, ratio * n_blocks)
    visible = np.arange(used)[None, :] < np.asarray(n_windows).reshape(-1, 1)
    padded = np.full((n_rows, 1 + ratio * n_blocks), -np.inf, dtype=windows.dtype)
    padded[:, 1 : 1 + used] = np.where(visible, windows[:, :used], -np.inf)
    inside = padded[:, 1:].reshape(n_rows, n_blocks, ratio).max(axis=2, initial=-np.inf)
    before = padded[:, : ratio * n_blocks : ratio]
    return np.maximum(inside, before)


def forced_mask(n_blocks: np.ndarray, width: int, cfg: SparseConfig) -> np.ndarray:
    """bool ``[row, width]``: sinks, the window's past blocks and the current block, for ``n_blocks`` ``[row]``."""
    block = np.arange(width)[None, :]
    current = np.asarray(n_blocks).reshape(-1, 1) - 1
    return (block <= current) & ((block < cfg.init_blocks) | (block >= current - cfg.local_blocks))


def select_blocks_np(
    pooled_scores: np.ndarray | None,
    pooled_betas: np.ndarray | None,
    n_blocks: np.ndarray | int,
    cfg: SparseConfig,
    method: Method,
) -> tuple[np.ndarray, np.ndarray]:
    """Select G = F, then the best ``a`` by score, then the best ``m`` by beta; ties go to the lower index.

    Args:
        pooled_scores: stage-1 scores ``[row, block]``; None where the method takes no query-aware pick.
        pooled_betas: pooled betas ``[row, block]``; None where the method has no query-agnostic fill.
        n_blocks: N of each row, ``[row]`` or one number. Columns at or past it are ignored, NaN included.

    Returns:
        (block_ids int32, origins int8), both ``[row, k]``, ascending, -1 padded (``[row, max N]`` for method full).
        Rows with N <= k take every block with origin "dense".

    Raises:
        NumericsError: a NaN among the candidates, naming row and block.
    """
    given = next((x for x in (pooled_scores, pooled_betas) if x is not None), None)
    counts = np.atleast_1d(np.asarray(n_blocks, dtype=np.int64))
    n_rows = len(given) if given is not None else len(counts)
    counts = np.broadcast_to(counts, (n_rows,))
    width = cfg.topk if not method.dense else int(counts.max(initial=0))
    block_ids = np.broadcast_to(np.arange(width, dtype=np.int32), (n_rows, width)).copy()
    origins = np.full((n_rows, width), ORIGIN_DENSE, dtype=np.int8)
    absent = block_ids >= counts[:, None]
    block_ids[absent], origins[absent] = -1, -1
    sparse = np.flatnonzero(counts > cfg.topk) if not method.dense else np.zeros(0, dtype=np.int64)
    if len(sparse):
        block_ids[sparse], origins[sparse] = _select_sparse(
            None if pooled_scores is None else pooled_scores[sparse],
            None if pooled_betas is None else pooled_betas[sparse],
            counts[sparse],
            sparse,
            cfg,
            method,
        )
    return block_ids, origins


def _select_sparse(
    scores: np.ndarray | None,
    betas: np.ndarray | None,
    n_blocks: np.ndarray,
    row_numbers: np.ndarray,
    cfg: SparseConfig,
    method: Method,
) -> tuple[np.ndarray, np.ndarray]:
    width = int(n_blocks.max())
    forced = forced_mask(n_blocks, width, cfg)
    candidate = ~forced & (np.arange(width)[None, :] < n_blocks[:, None])
    grid = np.full(forced.shape, -1, dtype=np.int8)
    grid[forced] = ORIGIN_WINDOW
    grid[:, : cfg.init_blocks] = ORIGIN_SINK
    picks = method.query_aware_picks(cfg, cfg.n_forced)  # N > k >= |F|: the forced set is whole
    fill = method.fill(cfg, cfg.n_forced)
    for values, amount, origin, name in (
        (scores, picks, ORIGIN_QUERY, "score"),
        (betas, fill, ORIGIN_AGNOSTIC, "pooled beta"),
    ):
        if not amount:
            continue
        if values is None:
            raise ValueError(f"method {method.name} selects by {name}, which was not given")
        values = values[:, :width]
        _refuse_nan(values, candidate, row_numbers, name)
        grid[_best(values, candidate & (grid < 0), amount)] = origin
    chosen = grid >= 0
    block_ids = np.nonzero(chosen)[1].reshape(len(grid), cfg.topk).astype(np.int32)
    return block_ids, grid[chosen].reshape(len(grid), cfg.topk)


def _best(values: np.ndarray, allowed: np.ndarray, amount: int) -> np.ndarray:
    """bool ``[row, block]``: the ``amount`` highest allowed values of each row, ties to the lower index.

    The same as the first of a stable sort, but without sorting: all above the last value that is taken, then of those
    equal to it the lowest indices.
    """
    # NaN goes behind everything, so it keeps blocks that are not allowed behind allowed ones that score -inf
    keys = np.where(allowed, -values, np.nan)
    last = np.partition(keys, amount - 1, axis=1)[:, amount - 1 : amount]
    chosen, tied = keys < last, keys == last
    room = amount - chosen.sum(axis=1)
    crowded = np.flatnonzero(tied.sum(axis=1) > room)
    tied[crowded] &= np.cumsum(tied[crowded], axis=1) <= room[crowded, None]
    return chosen | tied


def _refuse_nan(values: np.ndarray, candidate: np.ndarray, row_numbers: np.ndarray, name: str) -> None:
    bad = np.isnan(values) & candidate
    if bad.any():
        row, block = np.argwhere(bad)[0]
        raise NumericsError(f"{name} of row {row_numbers[row]}, block {block} is NaN; a selection needs numbers")
