"""Random models of any shape, for tests and for timing sizes whose weights are not at hand."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.weights import EMBEDDING, base_tensors, head_tensors


def random_tensors(shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    """A full checkpoint of float32 tensors: matrices N(0, 1/fan_in), norm gains near 1, A and delta not zero.

    |A| lies in [0.5, 1.5] with both signs, so that no two betas tie and their spread shows in the selection.
    """
    tensors: dict[str, Tensor] = {}
    for name, size in [*base_tensors(shape), *head_tensors(shape)]:
        noise = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * noise
        elif name.endswith("self_attn.A"):
            tensors[name] = noise.sign() * (0.5 + torch.rand(size, generator=generator))
        elif name == EMBEDDING:
            tensors[name] = noise
        else:
            tensors[name] = noise * size[-1] ** -0.5
    return tensors


def random_model(
    shape: ModelShape,
    seed: int = 0,
    dtype: str | None = None,
    *,
    head: str = "ed_dma",
    device: str = "cpu",
    config: LlamaConfig | None = None,
) -> LlamaModel:
    """A seeded random model; ``dtype`` (default: the shape's) names its torch dtype.

    ``config`` sets the rotary and norm settings, its shape is replaced by ``shape``.

    >>> shape = ModelShape("tiny", 2, 4, 2, 16, 32, 64, 100, dtype="float32")
    >>> random_model(shape, seed=1).dense_logits(torch.tensor([1, 2, 3])).shape
    torch.Size([3, 100])
    """
    shape = dataclasses.replace(shape, dtype=dtype or shape.dtype)
    config = dataclasses.replace(config, shape=shape) if config else LlamaConfig(shape)
    return LlamaModel(config, random_tensors(shape, torch.Generator().manual_seed(seed)), head=head, device=device)
