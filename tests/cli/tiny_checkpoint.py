"""A tiny Llama checkpoint with eviction head and byte tokenizer, so that the CLI runs end to end in a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.weights import base_tensors, head_tensors

SHAPE = ModelShape("tiny", 2, 4, 2, 16, 32, 64, 260, dtype="float32")


def write_checkpoint(directory: Path) -> Path:
    """config.json, model.safetensors and tokenizer.json; weights are seeded noise."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size,
        "num_hidden_layers": SHAPE.n_layers,
        "num_attention_heads": SHAPE.n_q_heads,
        "num_key_value_heads": SHAPE.n_kv_heads,
        "head_dim": SHAPE.head_dim,
        "vocab_size": SHAPE.vocab_size,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 259,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
        for name, shape in (*base_tensors(SHAPE), *head_tensors(SHAPE))
    }
    save_file(tensors, directory / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
