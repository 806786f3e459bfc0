"""Prefill against a gather in float64 numpy, one query at a time, and against the decode operations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nosa_sys.errors import CapacityError, NumericsError
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.eviction_head.reference import eviction_beta
from nosa_sys.kernels.prefill_attention.reference import prefill_attention, prefill_selection
from nosa_sys.kernels.sparse_decode_attention.reference import sparse_decode_attention
from nosa_sys.kernels.stage1_scores.reference import stage1_scores
from nosa_sys.methods import METHODS, get_method
from nosa_sys.sparse_config import SparseConfig

SMALL = SparseConfig(8, 4, 2, topk=6, init_blocks=1, window_size=16, select_blocks=2)


def tensors(
    n_tokens: int, context: int, n_q: int, n_kv: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, q_head, dim], k and v [context, kv_head, dim], beta [context, kv_head]."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(n_tokens, n_q, dim, generator=rng, dtype=torch.float64)
    k = torch.randn(context, n_kv, dim, generator=rng, dtype=torch.float64)
    v = torch.randn(context, n_kv, dim, generator=rng, dtype=torch.float64)
    beta = 2 * torch.randn(context, n_kv, generator=rng, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype if dtype == torch.float64 else torch.float32)


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None,
    block_ids: torch.Tensor | None,
    first: int,
    block: int,
) -> np.ndarray:
    """One query and head at a time, float64, over exactly the rows it may see."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            kv = head // group
            rows = list(range(first + t + 1))
            if block_ids is not None:
                ids = set(block_ids[t, kv].tolist()) - {-1}
                rows = [r for r in rows if r // block in ids]
            if not rows:
                continue
            scores = k[rows, kv].double().numpy() @ q[t, head].double().numpy() / np.sqrt(q.shape[2])
            if beta is not None:
                scores = scores + beta[rows, kv].double().numpy()
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[rows, kv].double().numpy() / weights.sum()
    return out


@settings(max_examples=40)
@given(
    n_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 5]),
    block=st.sampled_from([1, 4, 16]),
    first=st.integers(0, 70),
    n_tokens=st.integers(1, 20),
    with_beta=st.booleans(),
    dense=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_attention_equals_a_gather_per_query(
    n_kv: int,
    group: int,
    dim: int,
    block: int,
    first: int,
    n_tokens: int,
    with_beta: bool,
    dense: bool,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    context = first + n_tokens
    q, k, v, beta = tensors(n_tokens, context + 3, n_kv * group, n_kv, dim, first, dtype)
    k[context:], v[context:], beta[context:] = torch.nan, torch.nan, torch.nan
    block_ids = None
    if not dense:
        seed = data.draw(st.integers(0, 99))
        rng = torch.Generator().manual_seed(seed)
        # padding anywhere, duplicates, blocks of the future and past the end, queries without any
        block_ids = torch.randint(-1, context // block + 2, (n_tokens, n_kv, 3), generator=rng, dtype=torch.int32)
        block_ids[torch.rand(n_tokens, n_kv, generator=rng) < 0.2] = -1
    bias = beta if with_beta else None
    out = prefill_attention(q, k, v, bias, block_ids, first, block)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = gather_attention(q, k, v, bias, block_ids, first, block)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=30)
@given(
    method=st.sampled_from(sorted(METHODS)),
    first=st.integers(0, 90),
    n_tokens=st.integers(0, 40),
    ratio=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_selection_equals_decode_with_the_context_cut_at_the_query(
    method: str, first: int, n_tokens: int, ratio: int, seed: int
) -> None:
    cfg = SparseConfig(2 * ratio, 4, 2, topk=6, init_blocks=1, window_size=4 * ratio, select_blocks=2)
    context = first + n_tokens
    q, k, _, beta = tensors(n_tokens, context, 4, 2, 5, seed)
    means, beta_means = window_means(k, 4, 2).transpose(0, 1), window_means(beta, 4, 2).T
    got = prefill_selection(q, means, beta_means, first, cfg, get_method(method))
    assert len(got.block_ids) == len(got.origins) == len(got.counts) == n_tokens
    for t in range(n_tokens):
        length = first + t + 1
        n_windows, n_blocks = torch.tensor([cfg.n_windows(length)]), cfg.n_blocks(length)
        # Only what existed then: nothing of the future is even in memory.
        scores = stage1_scores(q[t : t + 1], window_means(k[:length], 4, 2).transpose(0, 1)[None], n_windows)
        pooled_scores = pool_windows(scores, n_windows, n_blocks, cfg)
        pooled_betas = pool_windows(window_means(beta[:length], 4, 2).T[None], n_windows, n_blocks, cfg)
        alone = select_blocks(pooled_scores, pooled_betas, torch.tensor([n_blocks]), cfg, get_method(method))
        width = alone.block_ids.shape[-1]
        assert torch.equal(got.block_ids[t, :, :width], alone.block_ids[0])
        assert torch.equal(got.origins[t, :, :width], alone.origins[0])
        assert (got.block_ids[t, :, width:] == -1).all()
        assert got.counts[t] == alone.counts[0]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 127])
def test_decode_attention_equals_prefill_attention(method: str, length: int) -> None:
    q, k, v, beta = tensors(length, length, 6, 2, 8, length)
    means, beta_means = window_means(k, 4, 2).transpose(0, 1), window_means(beta, 4, 2).T
    selection = prefill_selection(q, means, beta_means, 0, SMALL, get_method(method))
    bias = beta if get_method(method).uses_beta else None
    out = prefill_attention(q, k, v, bias, selection.block_ids, 0, 8)
    if method == "full":
        torch.testing.assert_close(out, prefill_attention(q, k, v, bias, None, 0, 8), rtol=1e-12, atol=1e-12)
    n_blocks = SMALL.n_blocks(length)
    slots = torch.full((2 * n_blocks, 2, 8, 8), torch.nan, dtype=torch.float64)
    slot_betas = torch.full((2 * n_blocks, 8), torch.nan, dtype=torch.float64)
    for head in range(2):
        for t in range(length):
            slots[head * n_blocks + t // 8, 0, t % 8] = k[t, head]
            slots[head * n_blocks + t // 8, 1, t % 8] = v[t, head]
            slot_betas[head * n_blocks + t // 8, t % 8] = beta[t, head]
    ids = selection.block_ids
    rows = torch.where(ids >= 0, ids + torch.tensor([0, n_blocks]).view(1, 2, 1), -1).long()
    decoded, _ = sparse_decode_attention(
        q, slots, None if bias is None else slot_betas, rows, ids, torch.arange(1, length + 1)
    )
    torch.testing.assert_close(decoded, out, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first_changed", [320, 350])
@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma", "full"])
def test_case_22_future_tokens_change_no_earlier_output(method: str, first_changed: int) -> None:
    """Case 22: prefill 640 tokens, change tokens from a block edge or from the middle of a block onward: selections
    and outputs before are bit-equal, and picks beyond the query's block are -1."""
    cfg = SparseConfig(64, 32, 16, topk=4, init_blocks=1, window_size=64, select_blocks=1)
    results = []
    for changed in (False, True):
        q, k, v, beta = tensors(640, 640, 6, 2, 16, 0, torch.float32)
        if changed:
            for tensor, other in zip((q, k, v, beta), tensors(640, 640, 6, 2, 16, 1, torch.float32), strict=True):
                tensor[first_changed:] = 10 * other[first_changed:]
        means, beta_means = window_means(k, 32, 16).transpose(0, 1), window_means(beta, 32, 16).T
        selection = prefill_selection(q, means, beta_means, 0, cfg, get_method(method))
        results.append((prefill_attention(q, k, v, beta, selection.block_ids, 0, 64), selection))
        own_block = torch.arange(640).view(-1, 1, 1) // 64
        assert (selection.block_ids <= own_block).all()
        expected = own_block.flatten() + 1 if method == "full" else (own_block.flatten() + 1).clamp(max=4)
        assert ((selection.block_ids >= 0).sum(-1) == expected[:, None]).all()
    (first, first_selection), (second, second_selection) = results
    before, after = slice(0, first_changed), slice(first_changed, None)
    assert torch.equal(first[before], second[before])
    assert not torch.equal(first[after], second[after])
    assert torch.equal(first_selection.block_ids[before], second_selection.block_ids[before])


def test_chunks_of_any_size_give_the_same_result() -> None:
    q, k, v, beta = tensors(150, 150, 4, 2, 8)
    means, beta_means = window_means(k, 4, 2).transpose(0, 1), window_means(beta, 4, 2).T
    whole = prefill_selection(q, means, beta_means, 0, SMALL, get_method("nosa"))
    out = prefill_attention(q, k, v, beta, whole.block_ids, 0, 8)
    for start, stop in ((0, 7), (7, 70), (70, 150)):
        n_windows = SMALL.n_windows(stop)
        part = prefill_selection(
            q[start:stop], means[:, :n_windows], beta_means[:, :n_windows], start, SMALL, get_method("nosa")
        )
        assert torch.equal(part.block_ids, whole.block_ids[start:stop])
        attended = prefill_attention(q[start:stop], k[:stop], v[:stop], beta[:stop], part.block_ids, start, 8)
        torch.testing.assert_close(attended, out[start:stop], rtol=1e-12, atol=1e-12)


def test_case_15_query_heads_read_their_own_kv_head() -> None:
    q, k, v, _ = tensors(70, 70, 8, 2, 4)
    v[:, 0], v[:, 1] = 1.0, 2.0
    out = prefill_attention(q, k, v, None, None, 0, 8)
    torch.testing.assert_close(out[:, :4], torch.ones_like(out[:, :4]))
    torch.testing.assert_close(out[:, 4:], torch.full_like(out[:, 4:], 2.0))


def test_case_25_nan_is_reported_with_its_position() -> None:
    q, k, _, beta = tensors(80, 100, 4, 2, 8)
    means, beta_means = window_means(k, 4, 2).transpose(0, 1), window_means(beta, 4, 2).T
    q[70, 3] = torch.nan
    with pytest.raises(NumericsError, match="row 90, KV head 1, block 1"):
        prefill_selection(q, means, beta_means, 20, SMALL, get_method("nosa"))


def test_lacking_windows_are_refused() -> None:
    q, k, _, beta = tensors(80, 80, 4, 2, 8)
    means, beta_means = window_means(k[:76], 4, 2).transpose(0, 1), window_means(beta, 4, 2).T
    with pytest.raises(CapacityError, match=r"37 key means and 39 beta means .* all 39"):
        prefill_selection(q, means, beta_means, 0, SMALL, get_method("nosa"))


@pytest.mark.parametrize("head", ["ed_dma", "dma"])
def test_case_29_gradient_of_the_eviction_head_by_finite_differences(head: str) -> None:
    """Case 29: 8 tokens in float64, all queries share block 0; relative error below 1e-5 for A, delta and q, k, v."""
    q, k, v, _ = tensors(8, 8, 4, 2, 3, 3)
    rng = torch.Generator().manual_seed(4)
    target = torch.randn(8, 4, 3, generator=rng, dtype=torch.float64)
    A = torch.randn(2, generator=rng, dtype=torch.float64)
    delta = torch.randn(2, 6, generator=rng, dtype=torch.float64)
    block_ids = torch.zeros(8, 2, 2, dtype=torch.int32)
    block_ids[4:, :, 1] = 1
    block_ids[:4, :, 1] = -1

    def loss(A: torch.Tensor, delta: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        beta = eviction_beta(v.detach().flatten(1), A, delta, head)
        return (prefill_attention(q, k, v, beta, block_ids, 0, 4) * target).sum()

    leaves = [x.clone().requires_grad_() for x in (A, delta, q, k, v)]
    loss(*leaves).backward()
    step = 1e-6
    for i, leaf in enumerate(leaves):
        assert leaf.grad is not None
        for index in np.ndindex(*leaf.shape):
            slopes = []
            for sign in (1, -1):
                moved = [x.detach().clone() for x in leaves]
                moved[i][index] += sign * step
                if i == 4:  # v reaches the loss through attention only: the head's input is cut off
                    beta = eviction_beta(leaves[4].detach().flatten(1), A, delta, head)
                    out = prefill_attention(moved[2], moved[3], moved[4], beta, block_ids, 0, 4)
                    slopes.append(sign * (out * target).sum().item())
                else:
                    slopes.append(sign * loss(*moved).item())
            assert leaf.grad[index].item() == pytest.approx(sum(slopes) / (2 * step), rel=1e-5, abs=1e-7)
    assert all(leaf.grad is not None and leaf.grad.abs().max() > 0 for leaf in leaves)


def test_gradients_are_finite_where_a_query_sees_nothing() -> None:
    q, k, v, beta = tensors(70, 70, 2, 1, 4)
    block_ids = torch.full((70, 1, 1), 8, dtype=torch.int32)  # the last block: only the last queries see it
    beta.requires_grad_()
    out = prefill_attention(q, k, v, beta, block_ids, 0, 8)
    assert (out[:64] == 0).all()
    out.sum().backward()
    assert beta.grad is not None
    assert torch.isfinite(beta.grad).all()


class _LargestTensor(TorchDispatchMode):
    """Remembers the element count of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.n_elements = max(self.n_elements, math.prod(item.shape))
        return result


@pytest.mark.parametrize("dense", [False, True])
def test_no_tensor_grows_with_the_square_of_the_context(dense: bool) -> None:
    cfg = SparseConfig(64, 32, 16, topk=4, init_blocks=1, window_size=64, select_blocks=1)
    n_tokens = 8192
    q, k, v, beta = tensors(n_tokens, n_tokens, 4, 2, 4, 0, torch.float32)
    means, beta_means = window_means(k, 32, 16).transpose(0, 1), window_means(beta, 32, 16).T
    with torch.inference_mode(), _LargestTensor() as largest:
        selection = prefill_selection(q[-512:], means, beta_means, n_tokens - 512, cfg, get_method("nosa"))
        ids = None if dense else selection.block_ids
        prefill_attention(q[-512:], k, v, beta, ids, n_tokens - 512, 64)
    assert largest.n_elements <= 64 * 2 * n_tokens  # chunk x group x context, never all queries at once
