"""LlamaModel: plain Llama layers with the eviction head, as functions of tensors; it holds no cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.eviction_head.reference import split_qkv_and_beta
from nosa_sys.methods import HEADS
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.rope import inverse_frequencies, rotate
from nosa_sys.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, TORCH_DTYPES, layer_name


@dataclass
class LlamaLayer:
    """Weights of one layer: q, k, v fused into one matrix and gate, up into another (fewer, larger products)."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    A: Tensor
    delta: Tensor


class LlamaModel:
    """A Llama model whose layers also give beta per token and KV head (arXiv 2510.13602).

    The caller owns the KV cache and the attention: a layer is ``attention_inputs`` -> ``rope`` -> attention over
    whatever was selected -> ``attention_output``. Attributes: ``config``, ``shape``, ``dtype``, ``device``, ``layers``,
    ``embedding`` and ``lm_head`` [vocab, hidden], ``final_norm`` [hidden], ``rope_frequencies`` [head_dim / 2],
    ``head`` (ed_dma | dma | none), ``n_layers``. A and delta stay fp32 (fp64 in an fp64 model) in every dtype.

    ``tensors`` are named as in a checkpoint (see ``weights.py``); with head none, A and delta are not needed.
    Raises ConfigError for an unknown head or dtype.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        *,
        head: str = "ed_dma",
        device: torch.device | str = "cpu",
    ) -> None:
        if head not in HEADS:
            raise ConfigError(f"head={head!r} must be one of {', '.join(HEADS)}")
        if config.shape.dtype not in TORCH_DTYPES:
            raise ConfigError(f"dtype={config.shape.dtype!r} must be one of {', '.join(TORCH_DTYPES)}")
        self.config = config
        self.shape = config.shape
        self.head = head
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, config.shape.dtype)
        self.acc_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.n_layers = config.shape.n_layers
        self.rope_frequencies = inverse_frequencies(config, self.acc_dtype, self.device)
        self.embedding = self._take(tensors[EMBEDDING])
        self.final_norm = self._take(tensors[FINAL_NORM])
        self.lm_head = self.embedding if config.shape.tied_embedding else self._take(tensors[LM_HEAD])
        self.layers = [self._layer(layer, tensors) for layer in range(self.n_layers)]

    def _take(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)

    def _layer(self, layer: int, tensors: Mapping[str, Tensor]) -> LlamaLayer:
        def weight(part: str) -> Tensor:
            return self._take(tensors[layer_name(layer, f"{part}.weight")])

        if self.head == "none":
            kv_heads, values = self.shape.n_kv_heads, self.shape.n_kv_heads * self.shape.head_dim
            A, delta = torch.zeros(kv_heads), torch.zeros(kv_heads, values)
        else:
            A = tensors[layer_name(layer, "self_attn.A")]
            delta = tensors[layer_name(layer, "self_attn.delta.weight")]
        return LlamaLayer(
            qkv=torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"]),
            o=weight("self_attn.o_proj"),
            gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            down=weight("mlp.down_proj"),
            attention_norm=weight("input_layernorm"),
            mlp_norm=weight("post_attention_layernorm"),
            A=A.to(self.device, self.acc_dtype),
            delta=delta.to(self.device, self.acc_dtype),
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden_size,), weight, self.config.rms_norm_eps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding: tokens [T] integer -> [T, hidden]. Ids must lie in [0, vocab)."""
        return F.embedding(tokens.to(self.device), self.embedding)

    def attention_inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], beta [T, Hkv] (acc dtype).

        q and k are not rotated yet. beta = A * softplus(delta . v), from v as projected: it depends on no query
        and no position.
        """
        weights, shape = self.layers[layer], self.shape
        qkv = F.linear(self._norm(x, weights.attention_norm), weights.qkv)
        return split_qkv_and_beta(
            qkv, weights.A, weights.delta, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, self.head
        )

    def rope(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] to their absolute positions [T] (tokens from the start, 0-based)."""
        cos, sin = self.rotation(positions)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, D/2] of every position's angles, in the accumulation type: the same in all layers."""
        angles = positions.to(self.device, self.acc_dtype)[:, None, None] * self.rope_frequencies
        return angles.cos(), angles.sin()

    def attention_output(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """Finish a layer: x [T, hidden] and attention [T, Hq, D] -> [T, hidden] (o_proj, MLP, both residuals)."""
        weights = self.layers[layer]
        x = x + F.linear(attention.reshape(x.shape[0], -1).to(self.dtype), weights.o)
        gate, up = F.linear(self._norm(x, weights.mlp_norm), weights.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, weights.down)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output matrix: x [T, hidden] -> [T, vocab] in the model's dtype."""
        return F.linear(self._norm(x, self.final_norm), self.lm_head)

    def dense_logits(self, tokens: Tensor) -> Tensor:
        """Plain causal attention over the whole of tokens [T], beta ignored: [T, vocab].

        For perplexity and as an oracle. It holds T x vocab logits at once: keep T to a few thousand.
        """
        positions = torch.arange(len(tokens), device=self.device)
        x = self.embed(tokens)
        for layer in range(self.n_layers):
            q, k, v, _ = self.attention_inputs(layer, x)
            q, k = self.rope(q, k, positions)
            attention = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
            )
            x = self.attention_output(layer, x, attention[0].transpose(0, 1))
        return self.logits(x)
