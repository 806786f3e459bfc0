"""Block selection against sorting in plain Python: total order, budgets, origins, padding, NaN."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.methods import METHODS, get_method
from nosa_sys.sparse_config import SparseConfig

NOSA = get_method("nosa")
SINK, WINDOW, QUERY, AGNOSTIC, DENSE = range(5)


def config(topk: int, init: int, local: int, select: int) -> SparseConfig:
    return SparseConfig(64, 32, 16, topk=topk, init_blocks=init, window_size=64 * local, select_blocks=select)


def sorted_selection(
    scores: list[float], betas: list[float], n: int, cfg: SparseConfig, method: str
) -> list[tuple[int, int]]:
    """(block, origin) pairs by the definition, for one row and head."""
    if method == "full" or n <= cfg.topk:
        return [(block, DENSE) for block in range(n)]
    origin = dict.fromkeys(range(cfg.init_blocks), SINK)
    origin |= dict.fromkeys(range(n - 1 - cfg.local_blocks, n), WINDOW)
    budget = {
        "nosa": cfg.init_blocks + cfg.local_blocks + cfg.select_blocks,
        "infllmv2": cfg.topk,
        "dma": cfg.init_blocks + cfg.local_blocks,
    }
    a = max(0, budget[method] - len(origin))
    rest = [block for block in range(n) if block not in origin]
    rest.sort(key=lambda block: (-scores[block], block))
    origin |= dict.fromkeys(rest[:a], QUERY)
    rest = sorted(rest[a:], key=lambda block: (-betas[block], block))
    origin |= dict.fromkeys(rest[: cfg.topk - len(origin)], AGNOSTIC)
    return sorted(origin.items())


@st.composite
def configs(draw: st.DrawFn) -> SparseConfig:
    init, local, select = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return config(init + local + select + draw(st.integers(0, 6)), init, local, select)


@given(cfg=configs(), method=st.sampled_from(sorted(METHODS)), coarse=st.booleans(), data=st.data())
def test_selection_equals_sorting(cfg: SparseConfig, method: str, coarse: bool, data: st.DataObject) -> None:
    n_blocks = data.draw(st.lists(st.integers(1, cfg.topk + 12), min_size=1, max_size=4))
    n_heads, n_columns = data.draw(st.integers(1, 3)), max(n_blocks) + data.draw(st.integers(0, 2))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))

    def ranking() -> torch.Tensor:
        x = torch.randn(len(n_blocks), n_heads, n_columns, generator=rng)
        x = x.round() if coarse else x  # many ties, and both zeros
        x[torch.rand(x.shape, generator=rng) < 0.2] = -math.inf
        for row, n in enumerate(n_blocks):
            x[row, :, n:] = torch.nan
        return x

    scores, betas = ranking(), ranking()
    got = select_blocks(scores, betas, torch.tensor(n_blocks), cfg, get_method(method))
    width = n_columns if method == "full" else cfg.topk
    assert got.block_ids.shape == got.origins.shape == (len(n_blocks), n_heads, width)
    assert (got.block_ids.dtype, got.origins.dtype, got.counts.dtype) == (torch.int32, torch.int8, torch.int32)
    for row, n in enumerate(n_blocks):
        for head in range(n_heads):
            pairs = sorted_selection(scores[row, head].tolist(), betas[row, head].tolist(), n, cfg, method)
            padding = [-1] * (width - len(pairs))
            assert got.block_ids[row, head].tolist() == [block for block, _ in pairs] + padding
            assert got.origins[row, head].tolist() == [origin for _, origin in pairs] + padding
            assert got.counts[row].item() == len(pairs)


@given(cfg=configs(), extra=st.integers(1, 20), seed=st.integers(0, 999))
def test_a_batch_row_does_not_depend_on_the_others(cfg: SparseConfig, extra: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    n = torch.tensor([cfg.topk + extra, 1, cfg.topk])
    scores, betas = (torch.randn(3, 2, cfg.topk + extra, generator=rng) for _ in range(2))
    together = select_blocks(scores, betas, n, cfg, NOSA)
    for row in range(3):
        alone = select_blocks(
            scores[row : row + 1, :, : n[row]], betas[row : row + 1, :, : n[row]], n[row : row + 1], cfg, NOSA
        )
        assert torch.equal(alone.block_ids[0], together.block_ids[row])
        assert torch.equal(alone.origins[0], together.origins[row])


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_case_01_context_shorter_than_the_budget(poison: float) -> None:
    """Case 1: 3 blocks and k = 64 select {0, 1, 2}; the columns after them may hold anything."""
    scores = torch.full((1, 2, 100), poison)
    got = select_blocks(scores, scores, torch.tensor([3]), SparseConfig(), NOSA)
    assert got.block_ids[0, 1].tolist() == [0, 1, 2] + [-1] * 61
    assert got.origins[0, 1].tolist() == [DENSE] * 3 + [-1] * 61
    assert got.counts.tolist() == [3]


@pytest.mark.parametrize("k", [3, 48, 64])
@pytest.mark.parametrize("n", [8, 100])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_case_24_set_sizes_are_exact_for_any_k(k: int, n: int, method: str) -> None:
    """Case 24: k = 3, 48 and 64 with 8 and 100 blocks give min(k, n) distinct ids."""
    cfg = config(k, 1, 1, 1)
    rng = torch.Generator().manual_seed(k + n)
    scores, betas = (torch.rand(1, 3, n, generator=rng) for _ in range(2))
    got = select_blocks(scores, betas, torch.tensor([n]), cfg, get_method(method))
    for head in range(3):
        ids = [block for block in got.block_ids[0, head].tolist() if block >= 0]
        assert len(ids) == len(set(ids)) == (n if method == "full" else min(k, n))


@pytest.mark.parametrize("k", [0, 1, 2])
def test_case_24_a_budget_below_the_forced_blocks_is_refused(k: int) -> None:
    """Case 24 and 25: sinks, window and current block need 3 here."""
    with pytest.raises(ConfigError, match="topk"):
        config(k, 1, 1, 0)


def test_case_25_forced_blocks_and_the_best_one() -> None:
    """Case 25: 18 forced of 20 blocks; k = 16 is refused, k = 19 keeps all forced and the best of the rest."""
    with pytest.raises(ConfigError, match="topk=16"):
        config(16, 1, 16, 2)
    cfg = config(19, 1, 16, 2)
    scores = torch.zeros(1, 1, 20)
    scores[0, 0, 0] = scores[0, 0, 3:] = math.inf
    scores[0, 0, 2] = 0.5
    got = select_blocks(scores, torch.zeros(1, 1, 20), torch.tensor([20]), cfg, NOSA)
    assert got.block_ids[0, 0].tolist() == [0, *range(2, 20)]
    assert got.origins[0, 0].tolist() == [SINK, QUERY, *[WINDOW] * 17]


@pytest.mark.parametrize(("broken", "name"), [("scores", "stage-1 score"), ("betas", "beta")])
def test_case_25_nan_among_the_candidates_names_row_head_and_block(broken: str, name: str) -> None:
    """Case 25: a NaN score has no place in an order, so it is an error."""
    cfg = config(5, 1, 1, 2)
    values = {key: torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0)) for key in ("scores", "betas")}
    values[broken][1, 2, 4] = math.nan
    with pytest.raises(NumericsError, match=f"{name} of row 11, KV head 2, block 4"):
        select_blocks(values["scores"], values["betas"], torch.tensor([9, 9]), cfg, NOSA, first_row=10)


def test_nan_where_nothing_is_ranked_is_ignored() -> None:
    cfg = config(5, 1, 1, 2)
    scores = torch.rand(1, 1, 12, generator=torch.Generator().manual_seed(0))
    clean = select_blocks(scores, scores, torch.tensor([9]), cfg, NOSA)
    poisoned = scores.clone()
    poisoned[..., [0, 7, 8, 9, 10, 11]] = math.nan  # sink, window, and blocks that do not exist
    got = select_blocks(poisoned, poisoned, torch.tensor([9]), cfg, NOSA)
    assert torch.equal(got.block_ids, clean.block_ids)
    # A method that does not use a ranking does not read it.
    nothing = torch.full_like(scores, math.nan)
    select_blocks(nothing, scores, torch.tensor([9]), cfg, get_method("dma"))
    select_blocks(scores, nothing, torch.tensor([9]), cfg, get_method("infllmv2"))


def test_ties_go_to_the_lower_index_at_any_size() -> None:
    cfg = dataclasses.replace(SparseConfig(), init_blocks=0)
    flat = torch.zeros(1, 2, 3000)
    flat[0, 1, ::2] = -0.0
    got = select_blocks(flat, flat, torch.tensor([3000]), cfg, NOSA)
    for head in range(2):
        assert got.block_ids[0, head].tolist() == [*range(64 - 17), *range(3000 - 17, 3000)]
