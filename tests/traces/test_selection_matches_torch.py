"""The numpy selection of replay and the torch selection of the engine agree to the last tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.selection import pool_windows_np, select_blocks_np


@pytest.mark.parametrize("method", ["nosa", "dma", "infllmv2", "full"])
@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_torch_and_numpy_select_the_same(method: str, levels: int) -> None:
    rng = np.random.default_rng(levels)
    cfg = SparseConfig(block_size=8, kernel_size=4, kernel_stride=2, topk=10, window_size=16, select_blocks=3)
    n_heads, n_blocks = 3, np.array([1, 9, 10, 11, 40, 64])
    n_windows = n_blocks * 4 - 2
    windows = rng.integers(levels, size=(2, len(n_blocks), n_heads, 256)).astype(np.float32)
    pooled_torch = [
        pool_windows(torch.from_numpy(x), torch.from_numpy(n_windows)[:, None], int(n_blocks.max()), cfg)
        for x in windows
    ]
    found = select_blocks(*pooled_torch, torch.from_numpy(n_blocks), cfg, get_method(method))
    repeated = np.repeat(n_blocks, n_heads)
    pooled = [
        pool_windows_np(x.reshape(-1, 256), np.repeat(n_windows, n_heads), int(n_blocks.max()), cfg) for x in windows
    ]
    for mine, theirs in zip(pooled, pooled_torch, strict=True):
        assert np.array_equal(mine, theirs.reshape(mine.shape).numpy())
    ids, origins = select_blocks_np(pooled[0], pooled[1], repeated, cfg, get_method(method))
    assert np.array_equal(ids, found.block_ids.reshape(ids.shape).numpy())
    assert np.array_equal(origins, found.origins.reshape(ids.shape).numpy())
