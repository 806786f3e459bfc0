"""Independent oracle: the whole model over the whole context in plain numpy float64 loops, one query at a time.

Shares no code with the engine or the kernels: own norm, rotary, eviction head, compressed keys, pooling, selection
and attention (dense softmax over exactly the selected rows), and a dictionary model of what is resident.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig


@dataclass
class OracleRun:
    """logits [tokens, vocab]; ``selected[p][layer][head]`` the ascending block ids of the query at position p;
    ``pooled_betas[p][layer][head]`` per block; ``window_scores`` likewise per window."""

    logits: np.ndarray
    selected: list[list[list[list[int]]]]
    pooled_betas: list[list[list[list[float]]]]
    window_scores: list[list[list[np.ndarray]]]


def run_oracle(
    model: LlamaModel, cfg: SparseConfig, method: str, tokens: list[int], positions: Collection[int] | None = None
) -> OracleRun:
    """Every position of ``tokens`` as a query of its own.

    ``positions``: these queries alone, the rest of the result is empty or meaningless; for a model of one layer, whose
    keys and values depend on no attention.
    """
    shape = model.shape
    assert positions is None or shape.n_layers == 1
    weights = [
        {name: getattr(layer, name).double().numpy() for name in ("qkv", "o", "gate_up", "down", "A", "delta")}
        | {"n1": layer.attention_norm.double().numpy(), "n2": layer.mlp_norm.double().numpy()}
        for layer in model.layers
    ]
    embedding = model.embed(np_tokens(range(shape.vocab_size))).double().numpy()
    x = embedding[tokens]
    n, hq, hkv, dim = len(tokens), shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    selected: list[list[list[list[int]]]] = [[] for _ in tokens]
    pooled: list[list[list[list[float]]]] = [[] for _ in tokens]
    scores_of: list[list[list[np.ndarray]]] = [[] for _ in tokens]
    for w in weights:
        qkv = rms_norm(x, w["n1"], model.config.rms_norm_eps) @ w["qkv"].T
        q = rotary(qkv[:, : hq * dim].reshape(n, hq, dim), model.config.rope_theta)
        k = rotary(qkv[:, hq * dim : (hq + hkv) * dim].reshape(n, hkv, dim), model.config.rope_theta)
        v = qkv[:, (hq + hkv) * dim :].reshape(n, hkv, dim)
        beta = eviction(v.reshape(n, hkv * dim), w["A"], w["delta"], model.head)
        out = np.zeros((n, hq, dim))
        for p in range(n) if positions is None else positions:
            per_head, betas_head, scores_head = [], [], []
            for h in range(hkv):
                group = range(h * hq // hkv, (h + 1) * hq // hkv)
                ids, block_betas, window_scores = choose(
                    q[p, list(group)], k[: p + 1, h], beta[: p + 1, h], cfg, method
                )
                rows = [t for j in ids for t in range(j * cfg.block_size, min((j + 1) * cfg.block_size, p + 1))]
                bias = beta[rows, h] if method in ("nosa", "dma") else 0.0
                for head in group:
                    logit = k[rows, h] @ q[p, head] / math.sqrt(dim) + bias
                    weight = np.exp(logit - logit.max())
                    out[p, head] = weight @ v[rows, h] / weight.sum()
                per_head.append(ids)
                betas_head.append(block_betas)
                scores_head.append(window_scores)
            selected[p].append(per_head)
            pooled[p].append(betas_head)
            scores_of[p].append(scores_head)
        x = x + out.reshape(n, hq * dim) @ w["o"].T
        gate_up = rms_norm(x, w["n2"], model.config.rms_norm_eps) @ w["gate_up"].T
        gate, up = np.split(gate_up, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    head = model.lm_head.double().numpy()
    logits = rms_norm(x, model.final_norm.double().numpy(), model.config.rms_norm_eps) @ head.T
    return OracleRun(logits, selected, pooled, scores_of)


def np_tokens(values):  # the model embeds torch tensors only
    import torch

    return torch.tensor(list(values))


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rotary(x: np.ndarray, theta: float) -> np.ndarray:
    """x [token, head, dim]: pairs (i, i + dim/2) turn by position * theta^(-2i/dim)."""
    n, _, dim = x.shape
    angle = np.arange(n)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def eviction(v: np.ndarray, a: np.ndarray, delta: np.ndarray, head: str) -> np.ndarray:
    """beta [token, kv_head]."""
    if head == "none":
        return np.zeros((len(v), len(a)))
    value = a * np.logaddexp(0, v @ delta.T)
    return np.exp(value) if head == "dma" else value


def choose(
    q: np.ndarray, k: np.ndarray, beta: np.ndarray, cfg: SparseConfig, method: str, stored=np.asarray
) -> tuple[list[int], list[float], np.ndarray]:
    """Block ids for one query whose context is exactly ``k`` [token, dim]; q [group, dim], beta [token].

    Also returns the pooled betas per block and the stage-1 scores per window. ``stored`` rounds a mean as it is kept.
    """
    length, dim = k.shape
    n_blocks = math.ceil(length / cfg.block_size)
    starts = range(0, length - cfg.kernel_size + 1, cfg.kernel_stride)
    key_means = [stored(k[s : s + cfg.kernel_size].mean(0)) for s in starts]
    beta_means = [float(beta[s : s + cfg.kernel_size].mean()) for s in starts]
    scores = np.zeros(len(key_means))
    if key_means:
        for row in q:
            logit = np.array(key_means) @ row / math.sqrt(dim)
            weight = np.exp(logit - logit.max())
            scores += weight / weight.sum()

    def pooled(values: list[float] | np.ndarray) -> list[float]:
        best = []
        for j in range(n_blocks):
            first, last = j * cfg.block_size, (j + 1) * cfg.block_size  # windows that overlap the block
            inside = [float(values[i]) for i, s in enumerate(starts) if s + cfg.kernel_size > first and s < last]
            best.append(max(inside, default=-math.inf))
        return best

    block_scores, block_betas = pooled(scores), pooled(beta_means)
    current = n_blocks - 1
    if method == "full" or n_blocks <= cfg.topk:
        return list(range(n_blocks)), block_betas, scores
    local = cfg.window_size // cfg.block_size
    forced = {j for j in range(n_blocks) if j < cfg.init_blocks or j >= current - local}
    free = [j for j in range(n_blocks) if j not in forced]
    query_budget = cfg.init_blocks + local + cfg.select_blocks
    picks = {"nosa": max(0, query_budget - len(forced)), "infllmv2": cfg.topk - len(forced), "dma": 0}[method]
    aware = sorted(free, key=lambda j: (-block_scores[j], j))[:picks]
    rest = sorted((j for j in free if j not in aware), key=lambda j: (-block_betas[j], j))
    fill = rest[: cfg.topk - len(forced) - len(aware)]
    return sorted(forced | set(aware) | set(fill)), block_betas, scores


@dataclass
class ResidencyOracle:
    """Dictionary model of one (sequence, layer, KV head): slot number -> block, by the counting rules."""

    n_slots: int
    policy: str
    blocks: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)

    def start(self, n_prefilled: int, block_size: int) -> None:
        """After prefill or resume: the unfinished block alone is resident, in slot 0."""
        self.blocks = {0: n_prefilled // block_size} if n_prefilled % block_size else {}

    def step(self, selected: list[int], current: int, step: int, betas: list[float]) -> int:
        """Apply one selection; returns the misses. Blocks of the selection are never victims."""
        resident = set(self.blocks.values())
        missing = [j for j in selected if j not in resident]
        if self.policy == "exact":
            self.blocks = {s: j for s, j in self.blocks.items() if j in selected}
        for block in missing:
            empty = [s for s in range(self.n_slots) if s not in self.blocks]
            if empty:
                slot = empty[0]
            else:
                victims = [s for s, j in self.blocks.items() if j not in selected]
                if self.policy == "lru":
                    slot = min(victims, key=lambda s: (self.last_use.get(self.blocks[s], -1), s))
                else:
                    slot = min(victims, key=lambda s: (betas[self.blocks[s]], s))
            self.blocks[slot] = block
        for block in selected:
            self.last_use[block] = step
        assert len(set(self.blocks.values())) == len(self.blocks) <= self.n_slots
        return len([j for j in missing if j != current])
