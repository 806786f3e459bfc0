"""The numpy selection against sorted() in plain Python, and its edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import NumericsError
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.selection import pool_windows_np, select_blocks_np
from tests.traces.synthetic import SMALL, n_windows_at, pooled, select

NOSA = get_method("nosa")


@given(
    position=st.integers(0, 90),
    method=st.sampled_from(["nosa", "dma", "infllmv2", "full"]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 2**16),
    cfg=st.sampled_from(
        [
            SMALL,
            SparseConfig(16, 4, 2, topk=6, init_blocks=0, window_size=16, select_blocks=2),
            SparseConfig(6, 4, 2, topk=9, init_blocks=2, window_size=18, select_blocks=1),
        ]
    ),
)
def test_equals_the_definition_in_plain_python(position: int, method: str, levels: int, seed: int, cfg: SparseConfig):
    rng = np.random.default_rng(seed)
    n_windows = n_windows_at(position, cfg)
    n_blocks = position // cfg.block_size + 1
    # windows beyond the visible ones and columns beyond the context are poisoned
    scores, betas = (rng.integers(levels, size=n_windows + 3).astype(np.float32) for _ in range(2))
    scores[n_windows:] = betas[n_windows:] = np.nan
    width = n_blocks + 2
    grids = [pool_windows_np(x[None, :], n_windows, width, cfg) for x in (scores, betas)]
    for grid in grids:
        grid[:, n_blocks:] = np.nan
    ids, origins = select_blocks_np(grids[0], grids[1], n_blocks, cfg, get_method(method))
    expected = select(position, scores.tolist(), betas.tolist(), cfg, method)
    keep = ids[0] >= 0
    assert ids[0][keep].tolist() == sorted(expected)
    assert origins[0][keep].tolist() == [expected[b] for b in sorted(expected)]
    assert (origins[0] >= 0).tolist() == keep.tolist()
    assert ids.shape[1] == (n_blocks if method == "full" else cfg.topk)


@given(st.integers(0, 200), st.integers(0, 2**16))
def test_pooling_equals_plain_python(position: int, seed: int) -> None:
    cfg = SparseConfig(block_size=6, kernel_size=4, kernel_stride=2, topk=9, window_size=12, select_blocks=2)
    n_windows, n_blocks = n_windows_at(position, cfg), position // 6 + 1
    windows = np.random.default_rng(seed).normal(size=n_windows)
    found = pool_windows_np(windows[None, :], n_windows, n_blocks, cfg)[0]
    assert found.tolist() == [pooled(windows.tolist(), n_windows, b, cfg) for b in range(n_blocks)]


def test_case_25_nan_among_candidates_is_named() -> None:
    """case 25: NaN never wins: an error names row and block; forced blocks may hold anything."""
    scores = np.random.default_rng(0).random((2, 20))
    betas = scores.copy()
    scores[1, 0] = scores[1, 19] = np.nan  # sink and current block: never ranked
    select_blocks_np(scores, betas, 20, SMALL, NOSA)
    scores[1, 7] = np.nan
    with pytest.raises(NumericsError, match="row 1, block 7"):
        select_blocks_np(scores, betas, 20, SMALL, NOSA)
    betas[0, 3] = np.nan
    with pytest.raises(NumericsError, match="pooled beta of row 0, block 3"):
        select_blocks_np(None, betas, 20, SMALL, get_method("dma"))


def test_case_01_context_shorter_than_the_budget() -> None:
    """case 1: three blocks of a budget of 64: all three, padded with -1, nothing read from the scores."""
    poison = np.full((1, 3), np.nan)
    ids, origins = select_blocks_np(poison, poison, 3, SparseConfig(), NOSA)
    assert ids.shape == (1, 64)
    assert ids[0, :4].tolist() == [0, 1, 2, -1]
    assert origins[0, :4].tolist() == [4, 4, 4, -1]


def test_minus_infinity_is_eligible_but_last() -> None:
    scores = np.full((1, 9), -np.inf)
    scores[0, 5] = 0.0
    ids, origins = select_blocks_np(scores, scores, 9, SMALL, NOSA)
    assert ids[0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert origins[0].tolist() == [0, 2, 3, 3, 2, 1, 1, 1]


def test_rows_of_different_lengths_in_one_call() -> None:
    values = np.random.default_rng(1).random((3, 30))
    together, _ = select_blocks_np(values, values, np.array([5, 30, 12]), SMALL, NOSA)
    for row, n_blocks in enumerate((5, 30, 12)):
        alone, _ = select_blocks_np(values[row : row + 1, :n_blocks], values[row : row + 1], n_blocks, SMALL, NOSA)
        assert together[row].tolist() == alone[0].tolist()
