"""Scores of a trained eviction head on one document: what short types and the exponential do to ranking and attention.

ED-DMA ranks by means of beta, DMA by means of exp(beta) (arXiv 2510.13602, section 3). Both are made from the values of
one prefill, kept in a type, and compared with the same head in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.experiments.head_grid import HEADS, count_tied
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import QUERY_AGNOSTIC, select_blocks
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.eviction_head.reference import eviction_beta
from nosa_sys.kernels.prefill_attention import prefill_selection
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import membership
from nosa_sys.training.observation import observed, token_shares

KEPT_TYPES = ("float32", "bfloat16", "float16")


@dataclass
class SeenLayer:
    """One layer's prefill: k and v [token, kv_head, D], and q [drawn query, q_head, D]."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)


def see_document(
    model: LlamaModel, tokens: Sequence[int], sparse: SparseConfig, positions: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q [position, q_head, D], k and v [token, kv_head, D] of every layer of a prefill of ``tokens`` under NOSA."""
    layers = [SeenLayer() for _ in range(model.n_layers)]

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
        seen = layers[layer]
        first = sum(len(part) for part in seen.k)
        seen.k.append(k)
        seen.v.append(v)
        seen.q.append(q[[p - first for p in positions if first <= p < first + len(q)]])

    prefill_logits(observed(model, keep), tokens, sparse, first=len(tokens) - 1)
    return [(torch.cat(seen.q), torch.cat(seen.k), torch.cat(seen.v)) for seen in layers]


# ---- ranking
def kept_means(scores: Tensor, kept: torch.dtype, sparse: SparseConfig) -> Tensor:
    """Window means [window, kv_head] of scores [token, kv_head] where scores and means are kept in a type."""
    means = window_means(scores.to(kept).to(scores.dtype), sparse.kernel_size, sparse.kernel_stride)
    return means.to(kept).to(scores.dtype)


def pooled_ranking(means: Tensor, n_tokens: int, sparse: SparseConfig) -> Tensor:
    """Pooled scores [kv_head, block] of window means [window, kv_head]."""
    return pool_windows(means.T, means.shape[0], sparse.n_blocks(n_tokens), sparse)


def cores(pooled: Tensor, n_blocks: Sequence[int], sparse: SparseConfig) -> Tensor:
    """The query-agnostic core, the top m by pooled score as the engine orders them: pooled [kv_head, block] -> bool
    [context, kv_head, block], for contexts of ``n_blocks`` blocks, all more than k."""
    narrow = dataclasses.replace(sparse, topk=sparse.n_forced + core_blocks(sparse), select_blocks=0)
    scores = pooled.expand(len(n_blocks), -1, -1)
    counts = torch.tensor(n_blocks, device=pooled.device)
    chosen = select_blocks(torch.zeros_like(scores), scores, counts, narrow, get_method("dma"))
    ids = torch.where(chosen.origins == QUERY_AGNOSTIC, chosen.block_ids, -1)
    return membership(ids, pooled.shape[1]).transpose(0, 1)


def core_blocks(sparse: SparseConfig) -> int:
    """m: blocks of the core."""
    return get_method("nosa").fill(sparse, sparse.n_forced)


def candidates(n_blocks: int, sparse: SparseConfig) -> slice:
    """Blocks that the window has left, sinks apart, of a context of ``n_blocks`` blocks."""
    return slice(sparse.init_blocks, n_blocks - 1 - sparse.local_blocks)


def precision_rows(
    model: LlamaModel, layers: list[tuple[Tensor, Tensor, Tensor]], sparse: SparseConfig
) -> Iterator[dict[str, Any]]:
    """A row for either head and every type that its scores and means may be kept in, float64 first."""
    n_tokens = len(layers[0][1])
    contexts = [*range(sparse.topk + 1, sparse.n_blocks(n_tokens) + 1)]
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for weights, (_, _, v) in zip(model.layers, layers, strict=True):
        values = v.flatten(1)
        exact = eviction_beta(values.double(), weights.A.double(), weights.delta.double())
        for head in HEADS:
            right = exact if head == "ed_dma" else exact.exp()
            best = cores(pooled_ranking(kept_means(right, torch.float64, sparse), n_tokens, sparse), contexts, sparse)
            for name in ("float64", *KEPT_TYPES):
                kept = getattr(torch, name)
                scores = right if name == "float64" else eviction_beta(values, weights.A, weights.delta, head)
                means = kept_means(scores, kept, sparse)
                pooled = pooled_ranking(means, n_tokens, sparse)
                changed = (cores(pooled, contexts, sparse) != best).any(-1)  # [context, kv_head]
                total = totals.setdefault((head, name), {})
                for key, count in {
                    "n_heads": len(pooled),
                    "n_pooled": pooled[:, candidates(contexts[-1], sparse)].numel(),
                    "n_pooled_tied": sum(count_tied(row[candidates(contexts[-1], sparse)]) for row in pooled),
                    "n_infinite": int(scores.to(kept).isinf().sum()),
                    "n_zero": int((scores.to(kept) == 0).sum()),
                    "n_cores_changed": int(changed[-1].sum()),
                    "n_contexts_changed": int(changed.sum()),
                    "n_contexts": changed.numel(),
                }.items():
                    total[key] = total.get(key, 0) + count
    for (head, name), total in totals.items():
        yield {"part": "precision", "head": head, "kept": name, **total}


def head_range(model: LlamaModel, layers: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """Smallest and largest A, head input, beta, spread of beta and bias exp(beta) over tokens, layers and heads."""
    found: dict[str, list[float]] = {}
    for weights, (_, _, v) in zip(model.layers, layers, strict=True):
        A, delta = weights.A.double(), weights.delta.double()
        beta = eviction_beta(v.flatten(1).double(), A, delta)
        inputs = v.flatten(1).double() @ delta.T
        spread = beta.amax(0) - beta.amin(0)
        for name, x in {"A": A, "input": inputs, "beta": beta, "beta_spread": spread, "bias": beta.exp()}.items():
            found.setdefault(name, []).extend((float(x.min()), float(x.max())))
    return {"part": "range", **{name: [min(x), max(x)] for name, x in found.items()}}


# ---- attention
def attention_rows(
    model: LlamaModel,
    layers: list[tuple[Tensor, Tensor, Tensor]],
    positions: Sequence[int],
    sparse: SparseConfig,
) -> Iterator[dict[str, Any]]:
    """Attention of drawn queries under no bias, ED-DMA's and DMA's: means over queries, layers and query heads."""
    totals: dict[str, dict[str, list[float]]] = {}
    at = torch.tensor(positions, device=model.device)
    for weights, (q, k, v) in zip(model.layers, layers, strict=True):
        plain = token_shares(q, k, at).double()
        key_means = window_means(k, sparse.kernel_size, sparse.kernel_stride).transpose(0, 1).contiguous()
        for head in ("none", *HEADS):
            beta = eviction_beta(v.flatten(1), weights.A, weights.delta, head)
            shares = token_shares(q, k, at, beta).double()
            total = totals.setdefault(head, {})
            figures = {
                "entropy_nats": torch.special.entr(shares).sum(-1),
                "shared_with_plain": torch.minimum(shares, plain).sum(-1),
                "largest_share": shares.amax(-1),
            }
            if head != "none":
                inside = _selected(q, key_means, beta, positions, sparse)
                figures["plain_mass_kept"] = (plain * inside).sum(-1)
                figures["own_mass_kept"] = (shares * inside).sum(-1)
            for name, x in figures.items():
                total.setdefault(name, []).extend(x.flatten().tolist())
    for head, total in totals.items():
        means = {name: float(np.mean(x)) for name, x in total.items()}
        n_one = int(np.sum(np.array(total["largest_share"]) > 0.99))
        yield {
            "part": "attention",
            "head": head,
            "n_queries": len(total["entropy_nats"]),
            **means,
            "n_one_token": n_one,
        }


def _selected(q: Tensor, key_means: Tensor, beta: Tensor, positions: Sequence[int], sparse: SparseConfig) -> Tensor:
    """Tokens in the blocks that NOSA selects, ranked by ``beta`` [token, kv_head]: bool [kv_head, query, 1, token]."""
    n_tokens = len(beta)
    beta_means = window_means(beta, sparse.kernel_size, sparse.kernel_stride).T.contiguous()
    chosen = [
        prefill_selection(q[i : i + 1], key_means, beta_means, position, sparse, get_method("nosa")).block_ids
        for i, position in enumerate(positions)
    ]
    member = membership(torch.cat(chosen), sparse.n_blocks(n_tokens))
    return member.repeat_interleave(sparse.block_size, 2)[..., :n_tokens].unsqueeze(2)
