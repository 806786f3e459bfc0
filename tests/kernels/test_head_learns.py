"""The eviction head learns through the attention bias, on the reference operations as a training step chains them."""

import torch

from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.eviction_head.reference import eviction_beta
from nosa_sys.kernels.prefill_attention.reference import prefill_attention, prefill_selection
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig


def test_case_29_only_the_eviction_head_learns() -> None:
    """256 tokens, base frozen, A = 0 at first: A learns at once and delta from the second step on, the selection
    follows the head, and the loss falls over 20 steps."""
    cfg = SparseConfig(32, 32, 16, topk=4, init_blocks=1, window_size=32, select_blocks=1)
    rng = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(256, heads, 8, generator=rng, dtype=torch.float64) for heads in (2, 1, 1))
    frozen = [x.clone() for x in (q, k, v)]
    means = window_means(k, 32, 16).transpose(0, 1)

    def attend(A: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        beta = eviction_beta(v.flatten(1), A, delta)
        beta_means = window_means(beta.detach(), 32, 16).T
        ids = prefill_selection(q, means, beta_means, 0, cfg, get_method("nosa")).block_ids
        return prefill_attention(q, k, v, beta, ids, 0, 32)

    delta = torch.randn(1, 8, generator=rng, dtype=torch.float64)
    target = attend(torch.tensor([1.5], dtype=torch.float64), delta)
    A = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    learned = (0.3 * torch.randn(1, 8, generator=rng, dtype=torch.float64)).requires_grad_()
    optimizer = torch.optim.Adam([A, learned], lr=0.05)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = (attend(A, learned) - target).square().mean()
        loss.backward()
        assert A.grad is not None
        assert learned.grad is not None
        assert torch.isfinite(A.grad).all()
        assert torch.isfinite(learned.grad).all()
        assert A.grad.abs().max() > 0
        assert (learned.grad.abs().max() > 0) == (step > 0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(before, after) for before, after in zip(frozen, (q, k, v), strict=True))
    assert not any(x.requires_grad for x in (q, k, v))
