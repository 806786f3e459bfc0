"""Eviction heads at head inputs from -1000 to 1000: what is finite, what ties, for each type, scale and implementation.

Every number of a row is counted on tensors that the engine's own functions gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.eviction_head import reference
from nosa_sys.kernels.launch import interpreting, use_triton
from nosa_sys.kernels.prefill_attention import prefill_attention
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import attend

HEADS, TYPES = ("ed_dma", "dma"), ("float32", "bfloat16")
SCALES = (-10.0, -1.0, -0.1, -0.01, 0.01, 0.1, 1.0, 10.0)  # A, one KV head each
LIMIT = 1000  # head inputs delta . v go from -LIMIT to LIMIT by ones
_KERNEL_STEP = 40.0  # and by so much for a kernel, which an interpreter may run
POOLED_BLOCKS = 64
CONFIG = SparseConfig()
_HEAD_DIM, _GRADIENT_TOKENS = 64, 128
Beta = Callable[[Tensor, Tensor, Tensor, str], Tensor]


def implementations(device: torch.device) -> dict[str, Beta]:
    """The reference, and the Triton kernel on a GPU or in Triton's interpreter."""
    found: dict[str, Beta] = {"reference": reference.eviction_beta}
    if use_triton(torch.empty(0, device=device)) or interpreting():
        from nosa_sys.kernels.eviction_head.triton import eviction_beta

        found["triton"] = eviction_beta
    return found


def grid_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for every implementation, head, type of the values, and A."""
    for name, beta in implementations(device).items():
        for head in HEADS:
            for dtype in TYPES:
                yield from _rows(name, beta, head, getattr(torch, dtype), device)


def values_of(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """v [token, kv_head * D], A [kv_head] and delta that give every KV head the head inputs [token], one of SCALES
    each: one channel carries the input, exact in ``dtype`` if the input is."""
    n_heads = len(SCALES)
    v = torch.zeros(len(inputs), n_heads * _HEAD_DIM, dtype=dtype, device=inputs.device)
    v[:, 0] = inputs.to(dtype)
    delta = torch.zeros(n_heads, n_heads * _HEAD_DIM, device=inputs.device)
    delta[:, 0] = 1.0
    return v, torch.tensor(SCALES, device=inputs.device), delta


def _rows(name: str, beta: Beta, head: str, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    step = 1.0 if name == "reference" else _KERNEL_STEP
    # what bfloat16 rounds to the same input is one input
    inputs = torch.arange(-LIMIT, LIMIT + 1.0, step, device=device).to(dtype).unique()
    v, A, delta = values_of(inputs.float(), dtype)
    scores = beta(v, A, delta, head)  # [input, scale]
    exact = np.array(SCALES) * np.logaddexp(0.0, inputs.double().cpu().numpy())[:, None]
    means = window_means(scores, CONFIG.kernel_size, CONFIG.kernel_stride)
    exponents = torch.exp(reference.eviction_beta(v, A, delta))  # the plain head without its limit
    more = _reference_columns(head, dtype, device) if name == "reference" else [{}] * len(SCALES)
    for index, scale in enumerate(SCALES):
        own, right = scores[:, index], exact[:, index]
        row = {
            "part": "grid",
            "implementation": name,
            "head": head,
            "dtype": str(dtype).removeprefix("torch."),
            "A": scale,
            "n_inputs": len(inputs),
            "n_not_finite": _not_finite(own),
            "n_means_not_finite": _not_finite(means[:, index]),
            "n_attention_not_finite": _not_finite(_attention(v, own)),
            "smallest": float(own.min()),
            "largest": float(own.max()),
            "n_tied": count_tied(own),
        }
        if head == "ed_dma":
            got = own.double().cpu().numpy()
            row["relative_error"] = float((np.abs(got - right) / np.maximum(np.abs(right), 1e-30)).max())
        else:
            row["n_exp_overflows"] = int(exponents[:, index].isinf().sum())
            row["n_exp_underflows"] = int((exponents[:, index] == 0).sum())
        yield row | more[index]


def _not_finite(x: Tensor) -> int:
    return int((~x.isfinite()).sum())


def count_tied(x: Tensor) -> int:
    """Values of x [n] that some other one equals."""
    counts = x.unique(return_counts=True)[1]
    return int(counts[counts > 1].sum())


def _reference_columns(head: str, dtype: torch.dtype, device: torch.device) -> list[dict[str, int]]:
    """By scale, for tokens whose inputs are drawn evenly from -LIMIT .. LIMIT: pooled scores that tie, and those of
    them that tie whatever the precision, since neighbours share their best window; gradients that are not finite."""
    n_tokens = POOLED_BLOCKS * CONFIG.block_size
    drawn = (torch.rand(n_tokens, generator=torch.Generator().manual_seed(0)) * 2 - 1) * LIMIT
    v, A, delta = values_of(drawn.to(device), dtype)
    rows = []
    for index in range(len(SCALES)):
        tied = []
        for values, kind in ((v, head), (v.double(), "ed_dma")):
            means = window_means(
                reference.eviction_beta(values, A[index : index + 1], delta[index : index + 1], kind),
                CONFIG.kernel_size,
                CONFIG.kernel_stride,
            )
            tied.append(count_tied(pool_windows(means.T, len(means), POOLED_BLOCKS, CONFIG)))
        gradients = _gradients(head, v[:_GRADIENT_TOKENS], A[index : index + 1], delta[index : index + 1])
        rows.append(
            {
                "n_pooled": POOLED_BLOCKS,
                "n_pooled_tied": tied[0],
                "n_pooled_tied_exact": tied[1],
                "n_gradients_not_finite": gradients,
            }
        )
    return rows


def _attention(v: Tensor, scores: Tensor) -> Tensor:
    """The engine's attention of one query, after all inputs, biased by their scores [token]."""
    n_tokens, rng = len(scores), torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, 1, _HEAD_DIM, generator=rng).to(v) for n in (1, n_tokens))
    values = torch.randn(n_tokens, 1, _HEAD_DIM, generator=rng).to(v)
    return prefill_attention(q, k, values, scores.unsqueeze(1), None, n_tokens - 1, CONFIG.block_size)


def _gradients(head: str, v: Tensor, A: Tensor, delta: Tensor) -> int:
    """Gradients of v, A and delta through training's attention that are not finite; every token is a query."""
    leaves = [x.clone().requires_grad_() for x in (v, A, delta)]
    scores = reference.eviction_beta(leaves[0], leaves[1], leaves[2], head)
    n_tokens, rng = len(scores), torch.Generator().manual_seed(2)
    q, k, values = (torch.randn(n_tokens, 1, _HEAD_DIM, generator=rng).to(v) for _ in range(3))
    blocks = torch.arange(CONFIG.n_blocks(n_tokens), dtype=torch.int32, device=v.device).expand(n_tokens, 1, -1)
    attend("sdpa", q, k, values, scores, blocks, CONFIG.block_size).float().square().sum().backward()
    return sum(_not_finite(leaf.grad) for leaf in leaves if leaf.grad is not None)
