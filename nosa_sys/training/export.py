"""What training leaves: an adapter for load_model(adapter=...), or a whole checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.low_rank import FUSED, fused_sizes
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, head_tensors, layer_name
from nosa_sys.training.model import TrainableModel

ADAPTER, ADAPTER_LABEL, MODEL = "adapter.safetensors", "adapter.json", "model"
MAX_ADAPTER_BYTES = 16 * 2**20
_FACTOR_BYTES = 2  # low-rank factors are saved in bfloat16


def check_rank(shape: ModelShape, rank: int) -> None:
    """ConfigError when an adapter of that rank would pass 16 MiB, naming the largest rank that fits."""
    head_bytes = 4 * sum(size[0] * (size[1] if len(size) > 1 else 1) for _, size in head_tensors(shape))
    per_rank = shape.n_layers * sum(rows + columns for rows, columns in fused_sizes(shape).values()) * _FACTOR_BYTES
    largest = (MAX_ADAPTER_BYTES - head_bytes - 2**20) // per_rank
    if rank > largest:
        raise ConfigError(f"rank={rank} makes an adapter of more than 16 MiB; the largest that fits is {largest}")


def write_adapter(directory: Path, model: TrainableModel, record: dict[str, Any]) -> Path | None:
    """adapter.safetensors with A and delta in fp32 and low-rank factors in bfloat16, and adapter.json: ``record`` with
    its label. None, nothing written, when neither a head nor a low-rank change was trained."""
    tensors = dict(model.head_parameters)
    tensors |= {name: factor.to(torch.bfloat16) for name, factor in model.factors.items()}
    if not tensors:
        return None
    path = directory / ADAPTER
    save_file({name: _plain(tensor) for name, tensor in tensors.items()}, path)
    (directory / ADAPTER_LABEL).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def write_checkpoint(directory: Path, model: LlamaModel, tokenizer: Tokenizer | None) -> None:
    """A directory that load_model opens: config.json, model.safetensors in the model's dtype (A and delta in fp32, left
    out with head none) and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_hf_config(model), indent=1) + "\n", encoding="utf-8")
    save_file({name: _plain(tensor) for name, tensor in _named(model).items()}, directory / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save(directory)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _named(model: LlamaModel) -> dict[str, Tensor]:
    shape = model.shape
    q_rows, kv_rows = shape.n_q_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    rows = {"qkv": [q_rows, kv_rows, kv_rows], "gate_up": [shape.intermediate_size] * 2}
    tensors = {EMBEDDING: model.embedding, FINAL_NORM: model.final_norm}
    if not shape.tied_embedding:
        tensors[LM_HEAD] = model.lm_head
    for index, layer in enumerate(model.layers):
        tensors[layer_name(index, "input_layernorm.weight")] = layer.attention_norm
        tensors[layer_name(index, "post_attention_layernorm.weight")] = layer.mlp_norm
        for product, parts in FUSED.items():
            matrix: Tensor = getattr(layer, product)
            for part, piece in zip(parts, matrix.split(rows.get(product, len(matrix))), strict=True):
                tensors[layer_name(index, f"{part}.weight")] = piece
        if model.head != "none":
            tensors[layer_name(index, "self_attn.A")] = layer.A
            tensors[layer_name(index, "self_attn.delta.weight")] = layer.delta
    return tensors


def _hf_config(model: LlamaModel) -> dict[str, Any]:
    config, shape = model.config, model.shape
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_q_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling.kind == "default" else {"rope_type": scaling.kind, **scaling.factors},
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": shape.tied_embedding,
        "torch_dtype": shape.dtype,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_ids) or None,
    }
