"""Names and shapes of a checkpoint: Llama's, plus A and delta of the eviction head (arXiv 2510.13602)."""

from __future__ import annotations

from collections.abc import Iterator

from nosa_sys.model_shape import ModelShape

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64")


def layer_name(layer: int, part: str) -> str:
    """Full tensor name of one part of one layer.

    >>> layer_name(3, "self_attn.A")
    'model.layers.3.self_attn.A'
    """
    return f"model.layers.{layer}.{part}"


def base_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of the Llama model without the eviction head; lm_head only when untied.

    An iterator, so that a config with an absurd layer count fails at its first missing tensor.
    """
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.n_q_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield EMBEDDING, (shape.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not shape.tied_embedding:
        yield LM_HEAD, (shape.vocab_size, hidden)
    for layer in range(shape.n_layers):
        yield layer_name(layer, "input_layernorm.weight"), (hidden,)
        yield layer_name(layer, "post_attention_layernorm.weight"), (hidden,)
        yield layer_name(layer, "self_attn.q_proj.weight"), (q_rows, hidden)
        yield layer_name(layer, "self_attn.k_proj.weight"), (kv_rows, hidden)
        yield layer_name(layer, "self_attn.v_proj.weight"), (kv_rows, hidden)
        yield layer_name(layer, "self_attn.o_proj.weight"), (hidden, q_rows)
        yield layer_name(layer, "mlp.gate_proj.weight"), (ffn, hidden)
        yield layer_name(layer, "mlp.up_proj.weight"), (ffn, hidden)
        yield layer_name(layer, "mlp.down_proj.weight"), (hidden, ffn)


def head_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the eviction head: ``self_attn.A`` [Hkv] and ``self_attn.delta.weight`` [Hkv, Hkv*D]."""
    for layer in range(shape.n_layers):
        yield layer_name(layer, "self_attn.A"), (shape.n_kv_heads,)
        yield layer_name(layer, "self_attn.delta.weight"), (shape.n_kv_heads, shape.n_kv_heads * shape.head_dim)
