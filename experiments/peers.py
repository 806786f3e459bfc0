"""Decode steps of transformers' Llama with its own caches, random weights of the same shape: the peers of a bench.

The KV cache is filled with random values instead of a prefill, which would take minutes; a decode step costs the same
whatever the values are. 32 timed steps are enough for a step without any state but a growing cache.
"""

from __future__ import annotations

import gc
import time
from typing import Any, Literal

import numpy as np
import torch

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.machine import version_of
from nosa_sys.model_shape import ModelShape

PeerCache = Literal["dynamic", "offloaded"]
PEER_STEPS = 32


def transformers_model(shape: ModelShape, device: torch.device | str, seed: int = 0) -> Any:
    """A LlamaForCausalLM of random weights, made on ``device`` in the shape's dtype, sdpa attention.

    ConfigError where transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        raise ConfigError("the peer needs the package transformers; install it, or leave --peer out") from None
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_q_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied_embedding,
        max_position_embeddings=2**20,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype), attn_implementation="sdpa")
    return model.eval()


def _filled_cache(model: Any, shape: ModelShape, batch: int, context: int, cache: PeerCache) -> Any:
    from transformers import DynamicCache

    filled = DynamicCache(config=model.config, offloading=cache == "offloaded")
    size = (batch, shape.n_kv_heads, context, shape.head_dim)
    for layer in range(shape.n_layers):
        keys, values = (torch.randn(size, dtype=model.dtype, device=model.device) for _ in range(2))
        filled.update(keys, values, layer)
    return filled


@torch.inference_mode()
def peer_row(
    model: Any,
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    cache: PeerCache,
    steps: int = PEER_STEPS,
    warmup: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """Time ``steps`` greedy decode steps of ``batch`` sequences of ``context`` tokens.

    The device is synchronised after every step. CapacityError where the device runs out of memory, ConfigError for
    the offloaded cache without a GPU (it copies on CUDA streams).
    """
    on_gpu = model.device.type == "cuda"
    if cache == "offloaded" and not on_gpu:
        raise ConfigError("transformers' offloaded cache needs an NVIDIA GPU; take the dynamic cache on a CPU")

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize(model.device)

    torch.manual_seed(seed)
    try:
        filled = _filled_cache(model, shape, batch, context, cache)
        tokens = torch.randint(0, shape.vocab_size, (batch, 1), device=model.device)
        times_s = []
        for _ in range(warmup + steps):
            synchronise()
            start = time.perf_counter()
            logits = model(input_ids=tokens, past_key_values=filled, use_cache=True).logits
            tokens = logits[:, -1:].argmax(dim=-1)
            synchronise()
            times_s.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        raise CapacityError(
            f"transformers' {cache} cache at batch {batch}, {context} tokens does not fit the device; lower the batch"
        ) from None
    finally:
        filled = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    step_ms = np.array(times_s[warmup:]) * 1e3
    return {
        "what": f"transformers-{cache}",
        "model_shape": shape.name,
        "batch": batch,
        "context": context,
        "steps": steps,
        "warmup": warmup,
        "tokens_per_s": batch * 1e3 / float(step_ms.mean()),
        "tokens_per_s_per_sequence": 1e3 / float(step_ms.mean()),
        "step_ms_median": float(np.median(step_ms)),
        "step_ms_p10": float(np.percentile(step_ms, 10)),
        "step_ms_p90": float(np.percentile(step_ms, 90)),
        "seed": seed,
        "transformers": version_of("transformers"),
        "skipped": None,
        "status": "measured: random weights, KV cache filled with random values",
    }
