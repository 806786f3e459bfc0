"""silu(gate) * up: the Triton kernel on CUDA, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.gated_activation import reference
from nosa_sys.kernels.launch import use_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """As ``reference.silu_mul``; the kernel has no gradient and rounds once, after the product."""
    if use_triton(gate_up):
        from nosa_sys.kernels.gated_activation import triton

        return triton.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
