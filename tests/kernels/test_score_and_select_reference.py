"""The fused selection's definition against its parts, row by row."""

import torch

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection import BETA_ERROR, score_and_select
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.kernels.stage1_scores.reference import stage1_scores
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig

CFG = SparseConfig(topk=6, window_size=128, select_blocks=2, block_size=64)


def inputs(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n_windows = CFG.n_windows(max(lengths))
    q = torch.randn((len(lengths), 4, 16), generator=generator)
    means = torch.randn((len(lengths), 2, n_windows, 16), generator=generator)
    betas = torch.randn((len(lengths), 2, n_windows), generator=generator)
    return q, means, betas


def test_each_row_is_its_solo_selection_and_padding_selects_nothing():
    lengths = [0, 40, 64 * 6, 64 * 6 + 1, 1000, 1331]
    q, means, betas = inputs(lengths)
    for row, length in enumerate(lengths):  # memory past a row's own windows holds nothing
        n = CFG.n_windows(length)
        means[row, :, n:], betas[row, :, n:] = torch.nan, torch.nan
    for method in ("nosa", "infllmv2", "dma"):
        method = get_method(method)
        found = score_and_select(q, means, betas, torch.tensor(lengths), CFG.n_blocks(max(lengths)), CFG, method)
        assert (found.errors == -1).all()
        assert found.counts[0] == 0
        assert (found.block_ids[0] == -1).all()
        for row, length in enumerate(lengths[1:], start=1):
            n, blocks = CFG.n_windows(length), CFG.n_blocks(length)
            count = torch.tensor([n])
            scores = pool_windows(
                stage1_scores(q[row : row + 1], means[row : row + 1, :, :n], count), count, blocks, CFG
            )
            pooled = pool_windows(betas[row : row + 1, :, :n], count, blocks, CFG)
            alone = select_blocks(scores, pooled, torch.tensor([blocks]), CFG, method)
            assert torch.equal(found.block_ids[row], alone.block_ids[0])


def test_nan_is_reported_where_it_ranks():
    lengths = [1331, 1331]
    q, means, betas = inputs(lengths)
    betas[1, 1, 4 * 7 + 1] = torch.nan
    betas[0, 0, 0] = torch.nan  # block 0 is a sink: never ranked
    found = score_and_select(q, means, betas, torch.tensor(lengths), 21, CFG, get_method("nosa"))
    assert found.errors.tolist() == [[-1, -1], [-1, 7 + BETA_ERROR]]
