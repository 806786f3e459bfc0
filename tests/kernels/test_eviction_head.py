"""Eviction head against plain Python, and its behaviour at extreme inputs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.eviction_head.reference import eviction_beta, split_qkv_and_beta


def softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


@given(
    n_tokens=st.integers(0, 5),
    n_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 3, 64, 80]),
    head=st.sampled_from(["ed_dma", "dma", "none"]),
    seed=st.integers(0, 999),
)
def test_beta_equals_the_definition(n_tokens: int, n_heads: int, head_dim: int, head: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(n_tokens, n_heads * head_dim, generator=rng, dtype=torch.float64)
    A = torch.randn(n_heads, generator=rng, dtype=torch.float64)
    delta = torch.randn(n_heads, n_heads * head_dim, generator=rng, dtype=torch.float64)
    beta = eviction_beta(v, A, delta, head)
    assert beta.shape == (n_tokens, n_heads)
    for t in range(n_tokens):
        for h in range(n_heads):
            x = math.fsum(a * b for a, b in zip(v[t].tolist(), delta[h].tolist(), strict=True))
            expected = {"none": 0.0, "ed_dma": A[h].item() * softplus(x)}.get(head)
            if expected is None:
                expected = math.exp(min(80.0, A[h].item() * softplus(x)))
            assert beta[t, h].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_13_softplus_does_not_overflow_and_gradients_stay_finite(dtype: torch.dtype) -> None:
    """Case 13: -100, 0, 89 and 1000 give ~0, 0.6931, 89 and 1000; slopes 1 at +1000 and ~0 at -100."""
    v = torch.tensor([[-100.0], [0.0], [89.0], [1000.0]], dtype=dtype, requires_grad=True)
    beta = eviction_beta(v, torch.ones(1, dtype=dtype), torch.ones(1, 1, dtype=dtype))
    assert beta.dtype == torch.float32
    assert beta[:, 0].tolist() == pytest.approx([0.0, math.log(2), 89.0, 1000.0], rel=1e-6, abs=1e-6)
    beta.sum().backward()
    assert v.grad is not None
    assert v.grad[:, 0].tolist() == pytest.approx([0.0, 0.5, 1.0, 1.0], abs=1e-6)


def test_case_13_plain_dma_head_stays_finite() -> None:
    """Its window means and its products with sqrt(D) too: attention may carry it as a key channel."""
    v = torch.tensor([[1000.0], [50.0]], requires_grad=True)
    beta = eviction_beta(v, torch.tensor([3.0]), torch.ones(1, 1), "dma")
    assert torch.isfinite(beta).all()
    assert torch.isfinite(window_means(beta.detach()[:1].expand(32, 1), 32, 16)).all()
    assert torch.isfinite(beta.detach() * 256**0.5).all()
    beta.sum().backward()
    assert v.grad is not None
    assert torch.isfinite(v.grad).all()


def test_beta_of_half_precision_values_is_not_rounded_to_half_precision() -> None:
    rng = torch.Generator().manual_seed(1)
    v, delta = torch.randn(200, 8, generator=rng).bfloat16(), torch.randn(2, 8, generator=rng).bfloat16()
    beta = eviction_beta(v, torch.ones(2).bfloat16(), delta)
    assert not torch.equal(beta, beta.bfloat16().float())


@pytest.mark.parametrize(("n_q", "n_kv", "dim"), [(8, 2, 16), (6, 2, 80), (4, 4, 3), (8, 1, 96)])
def test_split_gives_every_head_its_own_columns(n_q: int, n_kv: int, dim: int) -> None:
    """Case 15: columns are laid out q, k, v and head by head; no width is special."""
    width = (n_q + 2 * n_kv) * dim
    qkv = torch.arange(2.0 * width).view(2, width) / width
    rng = torch.Generator().manual_seed(0)
    A, delta = torch.randn(n_kv, generator=rng), torch.randn(n_kv, n_kv * dim, generator=rng)
    q, k, v, beta = split_qkv_and_beta(qkv, A, delta, n_q, n_kv, dim, "ed_dma")
    for head in range(n_q):
        assert torch.equal(q[:, head], qkv[:, head * dim : (head + 1) * dim])
    for head in range(n_kv):
        start = (n_q + head) * dim
        assert torch.equal(k[:, head], qkv[:, start : start + dim])
        assert torch.equal(v[:, head], qkv[:, start + n_kv * dim : start + n_kv * dim + dim])
    x = (v.double().flatten(1) @ delta.double().T).tolist()
    expected = [[A[h].item() * softplus(x[t][h]) for h in range(n_kv)] for t in range(2)]
    torch.testing.assert_close(beta, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_width_that_does_not_fit_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="64"):
        split_qkv_and_beta(torch.zeros(1, 63), torch.zeros(2), torch.zeros(2, 16), 4, 2, 8, "ed_dma")


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: ed_dma, dma, none"):
        eviction_beta(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 2), "edma")
