"""Random models of any shape, for tests and for timing sizes whose weights are not at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

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
    return {
        name: _drawn(name, size, generator, torch.float32)
        for name, size in [*base_tensors(shape), *head_tensors(shape)]
    }


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """One tensor of a random checkpoint, on the generator's device."""
    device = generator.device
    noise = torch.randn(size, generator=generator, dtype=dtype, device=device)
    if name.endswith("norm.weight"):
        return noise.mul_(0.1).add_(1.0)
    if name.endswith("self_attn.A"):
        return noise.sign_() * (0.5 + torch.rand(size, generator=generator, dtype=dtype, device=device))
    if name == EMBEDDING:
        return noise
    return noise.mul_(size[-1] ** -0.5)


class DeviceTensors(Mapping[str, Tensor]):
    """A random checkpoint that holds nothing: each tensor is drawn on ``device`` in ``dtype`` when it is asked for.

    A model built from it peaks at its own size and one layer's matrices. Every tensor has its own seed, so the order
    of asking does not matter; the values are not those of ``random_tensors``. A and delta are float32 (float64 in a
    float64 model).
    """

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = [*base_tensors(shape), *head_tensors(shape)]
        self._sizes = {name: (index, size) for index, (name, size) in enumerate(sizes)}
        self._seed, self._dtype, self._device = seed, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        index, size = self._sizes[name]
        generator = torch.Generator(self._device).manual_seed(self._seed * len(self._sizes) + index)
        of_head = name.endswith(("self_attn.A", "self_attn.delta.weight"))
        dtype = torch.promote_types(self._dtype, torch.float32) if of_head else self._dtype
        return _drawn(name, size, generator, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


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

    On the CPU the weights are those of ``random_tensors``. On another device they are drawn there, in that dtype and
    layer by layer (other values), so that no copy of a large model is ever on the host.

    ``config`` sets the rotary and norm settings, its shape is replaced by ``shape``.

    >>> shape = ModelShape("tiny", 2, 4, 2, 16, 32, 64, 100, dtype="float32")
    >>> random_model(shape, seed=1).dense_logits(torch.tensor([1, 2, 3])).shape
    torch.Size([3, 100])
    """
    shape = dataclasses.replace(shape, dtype=dtype or shape.dtype)
    config = dataclasses.replace(config, shape=shape) if config else LlamaConfig(shape)
    where = torch.device(device)
    tensors: Mapping[str, Tensor]
    if where.type == "cpu":
        tensors = random_tensors(shape, torch.Generator().manual_seed(seed))
    else:
        tensors = DeviceTensors(shape, seed, getattr(torch, shape.dtype), where)
    return LlamaModel(config, tensors, head=head, device=device)
