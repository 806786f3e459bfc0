"""Weights of the eviction head: out of a checkpoint or an adapter file, or fresh for a dense Llama."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from nosa_sys.errors import CheckpointError
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.safetensors_reader import CheckpointTensors
from nosa_sys.models.weights import head_tensors

DELTA_STD = 0.02


def take_head(tensors: CheckpointTensors, shape: ModelShape) -> dict[str, Tensor]:
    """A and delta of every layer; CheckpointError naming the first that is missing or of another shape."""
    return {name: tensors.take(name, size) for name, size in head_tensors(shape)}


def fresh_head(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """An untrained head (arXiv 2510.13602: A starts at 0): A = 0 and delta ~ N(0, 0.02), seeded.

    With A = 0 every beta is 0: attention is that of the dense model, and the query-agnostic picks tie, so they go
    to the lowest block indices. Training moves A first, since delta's gradient carries A as a factor.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in head_tensors(shape):
        is_bias_scale = name.endswith(".A")
        made[name] = torch.zeros(size) if is_bias_scale else torch.randn(size, generator=generator) * DELTA_STD
    return made


def describe_adapter(path: Path) -> str:
    """One line about an adapter: its file name and the label in the JSON beside it, where there is one."""
    label_file = path.with_suffix(".json")
    if not label_file.exists():
        return f"eviction head from {path.name}"
    try:
        label = json.loads(label_file.read_text(encoding="utf-8"))["label"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise CheckpointError(f"{label_file} must hold a JSON object with a label") from None
    if not isinstance(label, str) or not label.isprintable():
        raise CheckpointError(f"{label_file}: label {label!r} must be one line of text without control characters")
    return f"eviction head from {path.name}: {label}"
