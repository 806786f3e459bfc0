"""The locality guarantee of NOSA as executable bounds, for every row of a trace at once.

With one fixed total order, betas that are final before a block leaves the window, and select_blocks >= 1, two
successive selections of a stream share at least ``(|F| - nb) + m + max(0, 2a - (|P| - m))`` blocks (nb = blocks born),
and a step loads at most ``min(a, max(0, N - k))`` of them (arXiv 2510.13602, section 3, sharpened to exact counts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reuse import BlockUses, overlap_with_previous
from nosa_sys.traces.selection import forced_mask


def loads_bound(n_blocks: np.ndarray, cfg: SparseConfig, method: Method) -> np.ndarray:
    """Most blocks that a warm step may fetch, int64 ``[row]``, for N blocks in context ``[row]``."""
    return _by_value(n_blocks, lambda n: method.max_loads(cfg, n))


def overlap_bound(n_blocks: np.ndarray, cfg: SparseConfig, method: Method, born: np.ndarray) -> np.ndarray:
    """Least |G & Gprev| of a step, int64 ``[row]``; ``n_blocks`` after the step, ``born`` of them at it (0 or 1)."""
    out = np.empty(len(n_blocks), dtype=np.int64)
    for n_born in (0, 1):
        at = born == n_born
        out[at] = _by_value(n_blocks[at], lambda n, nb=n_born: method.min_overlap(cfg, n - nb, n))  # type: ignore[misc]
    return out


def _by_value(values: np.ndarray, bound: Callable[[int], int]) -> np.ndarray:
    distinct, where = np.unique(values, return_inverse=True)
    return np.array([bound(int(n)) for n in distinct], dtype=np.int64)[where]


def core_mask(pooled_betas: np.ndarray, n_blocks: np.ndarray, cfg: SparseConfig, method: Method) -> np.ndarray:
    """The core R: top m of the candidates by pooled beta, always part of G. bool ``[row, block]``, rows with N > k."""
    width = pooled_betas.shape[1]
    candidate = ~forced_mask(n_blocks, width, cfg) & (np.arange(width)[None, :] < n_blocks[:, None])
    keys = np.where(candidate, -pooled_betas, np.nan)  # NaN sorts last
    best = np.argsort(keys, axis=1, kind="stable")[:, : method.fill(cfg, cfg.n_forced)]
    core = np.zeros(candidate.shape, dtype=np.bool_)
    np.put_along_axis(core, best, True, axis=1)
    return core


@dataclass(frozen=True)
class LocalityRows:
    """Bounds beside what happened, all ``[row]`` of the rows sorted by stream and time.

    ``warm`` excludes cold rows and each stream's first row; the other columns mean something where it is set.
    ``loads`` counts blocks of G that the previous G lacked, the current block left out (slots = k; more slots load
    fewer).
    """

    warm: np.ndarray
    n_blocks: np.ndarray
    overlap: np.ndarray
    overlap_bound: np.ndarray
    loads: np.ndarray
    loads_bound: np.ndarray
    n_selected: np.ndarray

    @property
    def broken(self) -> np.ndarray:
        """Rows that break either bound, bool [row]; none can if the selection follows the rules."""
        return self.warm & ((self.overlap < self.overlap_bound) | (self.loads > self.loads_bound))

    def facts(self, cfg: SparseConfig) -> dict[str, Any]:
        """Extremes over warm rows; None where there is no such row. ``gamma`` extremes are over rows with N >= k."""
        sparse = self.warm & (self.n_blocks >= cfg.topk)
        gamma = self.overlap[sparse] / self.n_selected[sparse]
        return {
            "n_warm_rows": int(self.warm.sum()),
            "max_loads": int(self.loads[self.warm].max()) if self.warm.any() else None,
            "loads_bound": int(self.loads_bound[self.warm].max()) if self.warm.any() else None,
            "n_rows_at_loads_bound": int((self.warm & (self.loads == self.loads_bound)).sum()),
            "gamma_min": float(gamma.min()) if len(gamma) else None,
            "n_rows_at_overlap_bound": int((sparse & (self.overlap == self.overlap_bound)).sum()),
        }


def locality_rows(uses: BlockUses, cfg: SparseConfig, method: Method) -> LocalityRows:
    """Evaluate both bounds on every row; positions within a stream must be consecutive."""
    rows, streams = uses.rows, uses.streams
    position = rows.position.astype(np.int64)
    n_blocks = position // cfg.block_size + 1
    born = (position % cfg.block_size == 0).astype(np.int64)
    overlap = overlap_with_previous(uses)
    time = streams.time[uses.row]
    is_new = ((uses.previous < 0) | (uses.previous != time - 1)) & (rows.block_ids != n_blocks[uses.row] - 1)
    return LocalityRows(
        warm=~rows.cold & (streams.time > 0),
        n_blocks=n_blocks,
        overlap=overlap,
        overlap_bound=overlap_bound(n_blocks, cfg, method, born),
        loads=np.bincount(uses.row[is_new], minlength=len(rows)).astype(np.int64),
        loads_bound=loads_bound(n_blocks, cfg, method),
        n_selected=rows.n_selected,
    )
