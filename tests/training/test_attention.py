"""Training attention: both forms against the reference, gradients by finite differences, bfloat16 betas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.eviction_head.reference import eviction_beta
from nosa_sys.kernels.prefill_attention.reference import prefill_attention
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import attend, beta_channels, flex_mask, membership, select

CFG = SparseConfig(16, 16, 8, topk=4, init_blocks=1, window_size=16, select_blocks=1)
TOKENS, HQ, HKV, D = 150, 4, 2, 8


def inputs(seed: int = 0, n_tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)

    beta = (noise(n_tokens, HKV).double() * 2).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    return noise(n_tokens, HQ, D), noise(n_tokens, HKV, D), noise(n_tokens, HKV, D), beta


def picked(q: Tensor, k: Tensor, beta: Tensor, cfg: SparseConfig, method: str) -> Tensor | None:
    selected = select(q, k, beta, cfg, get_method(method))
    return None if selected is None else selected.block_ids


def dense_oracle(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, ids: Tensor | None, block: int) -> Tensor:
    """Token by token, from the formula alone."""
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            chosen = range(t // block + 1) if ids is None else [j for j in ids[t, group].tolist() if j >= 0]
            tokens = [s for j in chosen for s in range(j * block, min(t + 1, (j + 1) * block))]
            scores = k[tokens, group] @ q[t, head] / math.sqrt(q.shape[2])
            if beta is not None:
                scores = scores + beta[tokens, group]
            out[t, head] = scores.softmax(0) @ v[tokens, group]
    return out


@pytest.mark.parametrize("name", ["sdpa", "flex"])
@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma", "full"])
@pytest.mark.parametrize("biased", [True, False])
def test_both_forms_are_attention_over_the_selected_tokens(name: str, method: str, biased: bool) -> None:
    q, k, v, beta = inputs()
    ids = picked(q, k, beta, CFG, method)
    assert (ids is None) == (method == "full")
    bias = beta if biased else None
    got = attend(name, q, k, v, bias, ids, CFG.block_size)
    torch.testing.assert_close(got, dense_oracle(q, k, v, bias, ids, CFG.block_size), rtol=1e-9, atol=1e-9)


def test_case_29_gradients_by_finite_differences() -> None:
    """All of q, k, v, A and delta, many queries sharing each block: relative error below 1e-5."""
    q, k, v, _ = inputs(1)
    rng = torch.Generator().manual_seed(2)
    A = torch.tensor([1.3, -0.7], dtype=torch.float64)
    delta = torch.randn(HKV, HKV * D, generator=rng, dtype=torch.float64)
    weights = torch.randn(q.shape, generator=rng, dtype=torch.float64)
    ids = picked(q, k, eviction_beta(v.flatten(1), A, delta), CFG, "nosa")
    assert ids is not None
    shared = membership(ids, 10).sum(1)  # queries of each block
    assert shared.min() >= 6
    assert (ids[..., 3] >= 0).sum() > 150, "some queries must be sparse"

    def value(*x: Tensor) -> Tensor:
        beta = eviction_beta(x[2].flatten(1), x[3], x[4])
        return (attend("sdpa", x[0], x[1], x[2], beta, ids, CFG.block_size) * weights).sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v, A, delta)]
    value(*leaves).backward()
    for index, leaf in enumerate(leaves):
        assert leaf.grad is not None
        for number in torch.randperm(leaf.numel(), generator=rng)[:24].tolist():
            moved = [x.detach().clone() for x in leaves]
            step = 1e-5
            moved[index].view(-1)[number] += step
            up = value(*moved)
            moved[index].view(-1)[number] -= 2 * step
            slope = (up - value(*moved)) / (2 * step)
            got = leaf.grad.view(-1)[number]
            assert abs(got - slope) <= 1e-5 * max(abs(slope), leaf.grad.abs().max() * 1e-2), (index, number)


def test_gradients_equal_those_of_the_reference() -> None:
    """An independent path: the engine's own differentiable reference, through softmax over gathered blocks."""
    tensors = inputs(3)
    ids = picked(*tensors[:2], tensors[3], CFG, "nosa")
    grads = []
    for way in (0, 1):
        q, k, v, beta = (x.clone().requires_grad_() for x in tensors)
        out = attend("sdpa", q, k, v, beta, ids, 16) if way else prefill_attention(q, k, v, beta, ids, 0, 16)
        out.square().sum().backward()
        grads.append([x.grad for x in (q, k, v, beta)])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
def test_case_22_picks_beyond_the_query_are_minus_one(method: str) -> None:
    """With k larger than what a query can see: all that exists, ascending, and -1 behind it."""
    cfg = dataclasses.replace(CFG, topk=8)
    q, k, _, beta = inputs()
    ids = picked(q, k, beta, cfg, method)
    assert ids is not None
    for t in range(TOKENS):
        current = t // cfg.block_size
        for head in ids[t].tolist():
            picks = head[: head.index(-1)] if -1 in head else head
            assert set(head[len(picks) :]) <= {-1}
            assert len(picks) == min(cfg.topk, current + 1)
            assert picks == sorted(set(picks))
            assert picks[-1] == current


def test_selection_lets_no_gradient_through() -> None:
    q, k, _, beta = (x.requires_grad_() for x in inputs())
    ids = picked(q, k, beta, CFG, "nosa")
    assert ids is not None
    assert ids.dtype == torch.int32


def test_bfloat16_keeps_a_float32_beta() -> None:
    beta = torch.tensor([0.1, 3.14159274, -27.0193, 1000.0, -1000.0, 1e-6], requires_grad=True)
    channels = beta_channels(beta, 64, torch.bfloat16)
    assert channels.shape == (6, 8)
    torch.testing.assert_close(channels.float().sum(-1) / 8, beta.detach(), rtol=2e-7, atol=0)
    channels.float().sum().backward()
    torch.testing.assert_close(beta.grad, torch.full((6,), 8.0))


def test_bfloat16_attention_ranks_close_betas() -> None:
    """Betas near 100 that differ by 0.2 are one number in bfloat16; their weights must still differ."""
    q, k, v = (torch.zeros(3, 1, D, dtype=torch.bfloat16) for _ in range(3))
    v[1] = 1.0
    beta = torch.tensor([[100.0], [100.2], [-1000.0]])
    got = attend("sdpa", q, k, v, beta, None, 16)[2, 0, 0]
    assert float(got) == pytest.approx(1 / (1 + math.exp(-0.2)), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_case_13_the_largest_bias_of_a_plain_dma_head_is_carried(name: str, dtype: torch.dtype) -> None:
    """Two tokens at the head's limit share all of the weight."""
    head_dim = 128
    q, k, v = (torch.zeros(6, 1, head_dim, dtype=dtype) for _ in range(3))
    v[2], v[4] = 1.0, 3.0
    logits = torch.tensor([[0.0], [0.0], [1000.0], [0.0], [1000.0], [-1000.0]])
    beta = eviction_beta(logits, torch.ones(1), torch.ones(1, 1), "dma")
    ids = torch.zeros(6, 1, 1, dtype=torch.int32)
    got = attend(name, q, k, v, beta, ids, 16)
    assert got[5, 0].tolist() == pytest.approx([2.0] * head_dim, rel=1e-2)


@pytest.mark.parametrize("n_tokens", [256, 300, 37])
@pytest.mark.parametrize("block_size", [16, 128, 256])
def test_flex_tiles_cover_exactly_what_is_seen(n_tokens: int, block_size: int) -> None:
    rng = torch.Generator().manual_seed(n_tokens)
    n_blocks = -(-n_tokens // block_size)
    member = torch.rand(2, n_tokens, n_blocks, generator=rng) < 0.3
    member[0, : n_tokens // 2] = True
    current = torch.arange(n_tokens) // block_size
    member &= torch.arange(n_blocks) <= current[:, None]
    seen = member.repeat_interleave(block_size, 2)[..., :n_tokens] & torch.ones(n_tokens, n_tokens).tril().bool()
    mask = flex_mask(member, block_size)
    n_tiles = -(-n_tokens // 128)
    tiles = torch.nn.functional.pad(seen, (0, n_tiles * 128 - n_tokens) * 2)
    tiles = tiles.unflatten(2, (n_tiles, 128)).unflatten(1, (n_tiles, 128))
    visited = mask.to_dense()[:, 0].bool()
    assert torch.equal(visited & tiles.any(4).any(2), tiles.any(4).any(2)), "a tile that is seen is skipped"
    whole = mask.full_kv_num_blocks[:, 0]
    for head in range(2):
        for row in range(n_tiles):
            for column in mask.full_kv_indices[head, 0, row, : int(whole[head, row])].tolist():
                width = min(128, n_tokens - column * 128)
                height = min(128, n_tokens - row * 128)
                assert tiles[head, row, :height, column, :width].all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["sdpa", "flex", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Every form on CUDA against the float64 form on the CPU. 64 channels: smaller heads are no real size there."""
    rng = torch.Generator().manual_seed(0)
    cfg = SparseConfig(topk=6, init_blocks=1, window_size=64, select_blocks=2)
    n_tokens = 1024
    sizes = [(n_tokens, 6, 64), (n_tokens, 2, 64), (n_tokens, 2, 64), (n_tokens, 2)]
    whole = [torch.randn(size, generator=rng).to(dtype).double() for size in sizes]
    ids = picked(whole[0], whole[1], whole[3], cfg, "nosa")
    assert ids is not None
    results = []
    for device in ("cpu", "cuda"):
        kinds = [torch.float64] * 4 if device == "cpu" else [dtype] * 3 + [torch.float32]
        leaves = [x.to(device, kind, copy=True).requires_grad_() for x, kind in zip(whole, kinds, strict=True)]
        way = "sdpa" if device == "cpu" else name
        out = attend(way, *leaves[:3], leaves[3], ids.to(device), 64)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for expected, got in zip(*results, strict=True):
        assert expected is not None
        assert got is not None
        error = (got.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm()
        assert error < tolerance


def test_unknown_names_and_odd_blocks_are_refused() -> None:
    q, k, v, beta = inputs(n_tokens=4)
    with pytest.raises(ConfigError, match="'flash' must be one of sdpa, flex, triton"):
        attend("flash", q, k, v, beta, None, 16)
    with pytest.raises(ConfigError, match="use attention sdpa"):
        flex_mask(torch.ones(1, 4, 1, dtype=torch.bool), 48)
