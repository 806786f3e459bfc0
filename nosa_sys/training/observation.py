"""What a prefill computes on its way, layer by layer: queries, keys, values, betas, and plain attention over them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.numerics import acc_dtype
from nosa_sys.models.llama import LlamaModel

OnLayer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


def observed(model: LlamaModel, on_layer: OnLayer) -> LlamaModel:
    """A copy of ``model``, weights shared, that calls on_layer(layer, q, k, v, beta) as a prefill comes to a layer.

    q [tokens, q_head, head_dim] and k [tokens, kv_head, head_dim] roped, v un-roped, beta [tokens, kv_head], all of the
    chunk at hand.
    """
    seen = copy.copy(model)
    plain_inputs, plain_rope = model.attention_inputs, model.rope
    passing: dict[str, Any] = {}

    def attention_inputs(layer: int, x: Tensor) -> Any:
        inputs = plain_inputs(layer, x)
        passing.update(layer=layer, v=inputs[2], beta=inputs[3])
        return inputs

    def rope(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = plain_rope(q, k, positions)
        on_layer(passing["layer"], q, k, passing["v"], passing["beta"])
        return q, k

    seen.attention_inputs, seen.rope = attention_inputs, rope  # type: ignore[method-assign]
    return seen


def token_shares(q: Tensor, k: Tensor, positions: Tensor, beta: Tensor | None = None) -> Tensor:
    """Softmax attention of single queries over every token at or before them, no block left out.

    q [query, q_head, head_dim] roped, at ``positions`` [query]; k [token, kv_head, head_dim] roped, to the last
    position at least; beta [token, kv_head] is added to the scaled scores, None for plain attention. Returns
    [kv_head, query, group, token] in float32 (float64 for float64).
    """
    dtype = acc_dtype(q, k)
    keys = k.to(dtype).transpose(0, 1)  # [kv_head, token, head_dim]
    queries = q.to(dtype).unflatten(1, (keys.shape[0], -1)).transpose(0, 1)
    scores = queries.flatten(1, 2) @ keys.transpose(1, 2) / math.sqrt(keys.shape[2])
    scores = scores.unflatten(1, (len(positions), -1))
    if beta is not None:
        scores = scores + beta.to(dtype).T[:, None, None]
    future = (torch.arange(keys.shape[1], device=keys.device) > positions.unsqueeze(1)).unsqueeze(1)
    return scores.masked_fill_(future, -math.inf).softmax(-1)
