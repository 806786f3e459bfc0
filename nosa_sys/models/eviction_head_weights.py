"""Weights of the eviction head: out of a checkpoint or an adapter file, or fresh for a dense Llama."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def adapter_record(path: Path) -> dict[str, Any] | None:
    """The JSON object beside an adapter: its label and what it was trained with; None where there is none."""
    file = path.with_suffix(".json")
    try:
        if not file.exists():
            return None
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or "label" not in record:
        raise CheckpointError(f"{file} must hold a JSON object with a label")
    return record


def describe_adapter(path: Path) -> str:
    """One line about an adapter: its file name and the label of its record, where there is one."""
    record = adapter_record(path)
    if record is None:
        return f"eviction head from {path.name}"
    label = record["label"]
    if not isinstance(label, str) or not label.isprintable():
        raise CheckpointError(
            f"{path.with_suffix('.json')}: label {label!r} must be one line of text without control characters"
        )
    return f"eviction head from {path.name}: {label}"


def recorded_rope_theta(path: Path) -> float | None:
    """The rotary base that an adapter was trained under, as its record has it (``settings.rope_theta``); None where it
    names none, and then it is the model's own."""
    settings = (adapter_record(path) or {}).get("settings")
    theta = settings.get("rope_theta") if isinstance(settings, dict) else None
    if theta is None:
        return None
    is_number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
    if not is_number or not 0 < theta <= sys.float_info.max:
        raise CheckpointError(
            f"{path.with_suffix('.json')}: settings.rope_theta {repr(theta)[:40]} must be a finite number > 0; "
            "mend the record, or remove it and give rope_theta"
        )
    return float(theta)
