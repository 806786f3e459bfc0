"""Rotary position embedding of Llama, with the llama3 and linear scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.models.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair of channels, [head_dim / 2], scaled as the configuration says.

    ``linear`` divides every frequency by the factor. ``llama3`` keeps wavelengths below
    original/high_freq_factor, divides those above original/low_freq_factor, and blends in between.
    """
    dim = config.shape.head_dim
    exponents = torch.arange(0, dim, 2, device=device).to(dtype) / dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    factors = config.rope_scaling.factors
    if config.rope_scaling.kind == "linear":
        return frequencies / factors["factor"]
    if config.rope_scaling.kind == "llama3":
        original = factors["original_max_position_embeddings"]
        low, high = factors["low_freq_factor"], factors["high_freq_factor"]
        turns = original / (2 * math.pi / frequencies)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1.0 - smooth) * frequencies / factors["factor"] + smooth * frequencies
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) of x [T, heads, D]; cos and sin are [T, 1, D/2] in the accumulation dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
