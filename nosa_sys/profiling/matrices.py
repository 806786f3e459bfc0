"""GEMMs, norms and activations of one decode step of a model shape, timed on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nosa_sys.model_shape import ModelShape

BATCHES = (1, 8, 16, 32, 64, 128, 256)


def matrix_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(output features, input features) of each matrix of a layer, q, k, v and gate, up fused, and of the LM head."""
    attention = shape.n_q_heads * shape.head_dim
    return {
        "qkv": (attention + 2 * shape.n_kv_heads * shape.head_dim, shape.hidden_size),
        "o_proj": (shape.hidden_size, attention),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
    }


def gemm_points(
    shape: ModelShape,
    time: Callable[[Callable[[], object]], Any],
    device: torch.device,
    dtype: torch.dtype,
    batches: tuple[int, ...] = BATCHES,
) -> Iterator[dict[str, Any]]:
    """One row per matrix and batch; bytes are weights plus activations, FLOPs 2 * m * n * k."""
    item = torch.empty(0, dtype=dtype).element_size()
    for name, (n, k) in matrix_shapes(shape).items():
        weight = torch.randn(n, k, device=device).to(dtype)
        for m in batches:
            x = torch.randn(m, k, device=device).to(dtype)
            out = torch.empty(m, n, dtype=dtype, device=device)

            def product(x: Tensor = x, weight: Tensor = weight, out: Tensor = out) -> object:
                return torch.mm(x, weight.T, out=out)

            yield {
                "model_shape": shape.name,
                "matrix": name,
                "m": m,
                "n": n,
                "k": k,
                "bytes": (m * k + n * k + m * n) * item,
                "flops": 2 * m * n * k,
                **time(product),
            }


def elementwise_points(
    shape: ModelShape,
    time: Callable[[Callable[[], object]], Any],
    device: torch.device,
    dtype: torch.dtype,
    batches: tuple[int, ...] = BATCHES,
) -> Iterator[dict[str, Any]]:
    """RMSNorm and the gated activation of a layer at every batch."""
    item = torch.empty(0, dtype=dtype).element_size()
    weight = torch.ones(shape.hidden_size, device=device, dtype=dtype)
    for m in batches:
        x = torch.randn(m, shape.hidden_size, device=device).to(dtype)
        gate, up = (torch.randn(m, shape.intermediate_size, device=device).to(dtype) for _ in range(2))

        def norm(x: Tensor = x) -> object:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)

        def gated(gate: Tensor = gate, up: Tensor = up) -> object:
            return torch.nn.functional.silu(gate) * up

        base = {"model_shape": shape.name, "m": m}
        yield {**base, "kernel": "rms_norm", "bytes": 2 * x.numel() * item, **time(norm)}
        yield {**base, "kernel": "silu_mul", "bytes": 3 * gate.numel() * item, **time(gated)}
