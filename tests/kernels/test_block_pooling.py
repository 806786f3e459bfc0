"""Pooling of windows to blocks against a brute force over token sets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.sparse_config import SparseConfig


def config(stride: int, ratio: int) -> SparseConfig:
    block = stride * ratio
    return SparseConfig(
        block_size=block,
        kernel_size=2 * stride,
        kernel_stride=stride,
        topk=8,
        init_blocks=1,
        window_size=block,
        select_blocks=2,
    )


def overlapping_max(values: list[float], cfg: SparseConfig, block: int) -> float:
    """The best of the windows that share a token with the block, found by intersecting token sets."""
    tokens = set(range(block * cfg.block_size, (block + 1) * cfg.block_size))
    best = -math.inf
    for i, value in enumerate(values):
        if tokens & set(range(cfg.kernel_stride * i, cfg.kernel_stride * i + cfg.kernel_size)):
            best = max(best, value)
    return best


@given(stride=st.sampled_from([1, 2, 16]), ratio=st.integers(1, 8), data=st.data())
def test_each_block_takes_the_best_overlapping_window(stride: int, ratio: int, data: st.DataObject) -> None:
    cfg = config(stride, ratio)
    lengths = data.draw(st.lists(st.integers(1, 6 * cfg.block_size), min_size=1, max_size=3))
    n_blocks = cfg.n_blocks(max(lengths))
    n_columns = cfg.n_windows(max(lengths)) + data.draw(st.integers(0, 3))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn(len(lengths), 2, n_columns, generator=rng)
    n_windows = torch.tensor([cfg.n_windows(length) for length in lengths])
    for row, count in enumerate(n_windows.tolist()):
        x[row, :, count:] = torch.nan
    pooled = pool_windows(x, n_windows, n_blocks, cfg)
    assert torch.equal(pooled, pool_windows(x, n_windows[:, None], n_blocks, cfg))
    for row, count in enumerate(n_windows.tolist()):
        for head in range(2):
            values = x[row, head, :count].tolist()
            expected = [overlapping_max(values, cfg, block) for block in range(n_blocks)]
            assert pooled[row, head].tolist() == expected
            assert torch.equal(pool_windows(x[row, head], count, n_blocks, cfg), pooled[row, head])


def test_the_default_geometry_is_five_windows_a_block() -> None:
    x = torch.arange(15.0)
    assert pool_windows(x, 15, 4, SparseConfig()).tolist() == [3.0, 7.0, 11.0, 14.0]
    assert pool_windows(-x, 15, 4, SparseConfig()).tolist() == [0.0, -3.0, -7.0, -11.0]


def test_case_21_a_context_without_windows_pools_to_nothing() -> None:
    """Case 21: 31 tokens have no window; the block exists and is -inf."""
    assert pool_windows(torch.empty(1, 2, 0), torch.tensor([0]), 1, SparseConfig()).tolist() == [[[-math.inf]] * 2]


def test_case_25_a_nan_window_is_not_hidden_by_the_maximum() -> None:
    x = torch.zeros(12)
    x[5] = torch.nan
    pooled = pool_windows(x, 12, 3, SparseConfig())
    assert pooled.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("last", [3, 7])
def test_a_shared_window_reaches_both_of_its_blocks(last: int) -> None:
    x = torch.zeros(12)
    x[last] = 1.0
    block = last // 4
    pooled = pool_windows(x, 12, 3, SparseConfig())
    assert pooled.tolist() == [1.0 if j in (block, block + 1) else 0.0 for j in range(3)]
