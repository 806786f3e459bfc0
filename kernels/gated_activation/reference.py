"""Gated activation of a decoder layer's MLP: silu(gate) * up, the halves of one projection's output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [row, 2 * inner], the gates first -> silu(gate) * up [row, inner] in the input's type."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
