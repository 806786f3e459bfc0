"""Eviction head: one score per token and KV head from the un-roped values (arXiv 2510.13602, section 3).

``beta[t, h] = A[h] * softplus(delta[h] . v[t])`` depends on no query and no position, so it is computed once per
token. The exponential-delayed head (``ed_dma``) ranks by beta and exponentiates only inside the softmax; the plain
``dma`` head ranks and biases by ``exp(beta)``; ``none`` switches the head off.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.numerics import acc_dtype
from nosa_sys.methods import HEADS

# Above this input log(1 + e^x) equals x to the last bit of float64, and e^x is still far from overflow in float32.
_SOFTPLUS_LINEAR_FROM = 40.0
# The plain DMA head exponentiates twice (here and in the softmax): an infinite bias would make the softmax NaN. e^88 is
# float32's end; e^80 leaves room for the sum of a window and for attention that scales the bias by sqrt(head_dim).
MAX_EXPONENT = 80.0


def eviction_beta(v: Tensor, A: Tensor, delta: Tensor, head: str = "ed_dma") -> Tensor:
    """Eviction scores of tokens.

    v [tokens, kv_head * head_dim], the un-roped v projections of all KV heads side by side; A [kv_head];
    delta [kv_head, kv_head * head_dim]. Returns beta [tokens, kv_head] in float32 (float64 for float64 inputs),
    differentiable in A and delta, finite for any finite input. Raises ConfigError for an unknown head.
    """
    if head not in HEADS:
        raise ConfigError(f"unknown eviction head {head!r}; known: {', '.join(HEADS)}")
    dtype = acc_dtype(v, A, delta)
    if head == "none":
        return torch.zeros(v.shape[0], A.shape[0], dtype=dtype, device=v.device)
    logits = v.to(dtype) @ delta.to(dtype).T
    beta = A.to(dtype) * functional.softplus(logits, threshold=_SOFTPLUS_LINEAR_FROM)
    return beta if head == "ed_dma" else torch.exp(beta.clamp(max=MAX_EXPONENT))


def split_qkv_and_beta(
    qkv: Tensor, A: Tensor, delta: Tensor, n_q_heads: int, n_kv_heads: int, head_dim: int, head: str = "ed_dma"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split one fused projection and score its values.

    qkv [tokens, (q_head + 2 * kv_head) * head_dim] laid out q, then k, then v. Returns q [tokens, q_head, head_dim],
    k and v [tokens, kv_head, head_dim] (views, not roped) and beta [tokens, kv_head].
    Raises ConfigError when the width does not match the heads.
    """
    width = (n_q_heads + 2 * n_kv_heads) * head_dim
    if qkv.shape[-1] != width:
        raise ConfigError(
            f"fused projection is {qkv.shape[-1]} wide, but {n_q_heads} query and 2 x {n_kv_heads} KV heads of "
            f"{head_dim} need {width}; check the head counts of the model"
        )
    q, k, v = qkv.split([n_q_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim], dim=-1)
    beta = eviction_beta(v, A, delta, head)
    return (
        q.unflatten(-1, (n_q_heads, head_dim)),
        k.unflatten(-1, (n_kv_heads, head_dim)),
        v.unflatten(-1, (n_kv_heads, head_dim)),
        beta,
    )
