"""Stage-1 scores against per-head loops in numpy; memory past the windows is poisoned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.stage1_scores.reference import stage1_scores, stage1_scores_causal


def loop_scores(q: np.ndarray, means: np.ndarray, n_windows: int) -> np.ndarray:
    """q [q_head, head_dim], means [kv_head, window, head_dim] -> [kv_head, window]."""
    n_kv, n_columns, dim = means.shape
    out = np.zeros((n_kv, n_columns))
    group = len(q) // n_kv
    for head in range(len(q)):
        if n_windows:
            logits = np.array([q[head] @ means[head // group, i] / np.sqrt(dim) for i in range(n_windows)])
            shares = np.exp(logits - logits.max())
            out[head // group, :n_windows] += shares / shares.sum()
    return out


@given(
    n_kv=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 5, 64]),
    n_columns=st.integers(0, 9),
    data=st.data(),
)
def test_scores_equal_a_loop_over_heads(n_kv: int, group: int, dim: int, n_columns: int, data: st.DataObject) -> None:
    n_windows = data.draw(st.lists(st.integers(0, n_columns), min_size=1, max_size=3))
    batch = len(n_windows)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    q = torch.randn(batch, n_kv * group, dim, generator=rng, dtype=torch.float64)
    means = torch.randn(batch, n_kv, n_columns, dim, generator=rng, dtype=torch.float64)
    for row, count in enumerate(n_windows):
        means[row, :, count:] = torch.nan
    scores = stage1_scores(q, means, torch.tensor(n_windows))
    for row, count in enumerate(n_windows):
        np.testing.assert_allclose(scores[row].numpy(), loop_scores(q[row].numpy(), means[row].numpy(), count), 1e-10)


@given(
    n_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    stride=st.sampled_from([1, 2, 4]),
    first=st.integers(0, 20),
    n_tokens=st.integers(1, 12),
)
def test_causal_scores_see_only_whole_past_windows(
    n_kv: int, group: int, stride: int, first: int, n_tokens: int
) -> None:
    kernel = 2 * stride
    rng = torch.Generator().manual_seed(first * 31 + n_tokens)
    q = torch.randn(n_tokens, n_kv * group, 6, generator=rng, dtype=torch.float64)
    n_columns = max(0, (first + n_tokens - kernel) // stride + 1)
    means = torch.randn(n_kv, n_columns + 2, 6, generator=rng, dtype=torch.float64)
    means[:, n_columns:] = torch.nan  # windows that no query of the chunk may see
    scores = stage1_scores_causal(q, means, torch.arange(first, first + n_tokens), kernel, stride)
    for t in range(n_tokens):
        visible = sum(stride * i + kernel - 1 <= first + t for i in range(n_columns + 2))
        expected = loop_scores(q[t].numpy(), means.numpy(), visible)
        np.testing.assert_allclose(scores[t].numpy(), expected, 1e-10)


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 2), (6, 2), (4, 4), (8, 1)])
def test_case_15_query_heads_score_for_their_own_kv_head(n_q: int, n_kv: int) -> None:
    """Case 15: each KV head sums the g heads that follow one another, and the sum is g; the heads of a group point
    along an axis of their own, and only their own KV head has a window there."""
    means = torch.zeros(1, n_kv, 3, 4)
    q = torch.zeros(1, n_q, 4)
    for head in range(n_kv):
        means[0, head, head % 3, head] = 100.0
        q[0, head * (n_q // n_kv) : (head + 1) * (n_q // n_kv), head] = 1.0
    scores = stage1_scores(q, means, torch.tensor([3]))
    for head in range(n_kv):
        assert scores[0, head, head % 3].item() == pytest.approx(n_q // n_kv)
        assert scores[0, head].sum().item() == pytest.approx(n_q // n_kv)


def test_half_precision_inputs_are_scored_in_float32() -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 16, generator=rng).bfloat16()
    means = torch.randn(1, 2, 20, 16, generator=rng)
    scores = stage1_scores(q, means, torch.tensor([20]))
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(
        scores[0].numpy(), loop_scores(q[0].double().numpy(), means[0].double().numpy(), 20), rtol=1e-5
    )
