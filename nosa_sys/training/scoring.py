"""Scores of one document on the engine's prefill: loss by position, what decode would move, dense mass and recall."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nosa_sys.engine.prefill import PrefillOutput, prefill_only
from nosa_sys.errors import ConfigError
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import membership
from nosa_sys.training.hot_slots import lru_misses
from nosa_sys.training.observation import observed, token_shares

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class DocumentScore:
    """Entry p of each array belongs to the decode step at position p, which predicts token p + 1.

    ``loss`` nats [T - 1] and ``matches`` whether the best guess was right; ``misses``, ``kept`` (blocks shared with the
    step before) and ``selected`` [T - 1], summed over layers and KV heads, with slots = k: what the engine loads when
    it decodes here. ``hot_misses`` [T - 1]: misses with ``hot_slots`` LRU slots instead (``lru_misses``), None where
    nobody asked.
    ``dense_mass``: share of plain softmax attention, without beta, that lies inside the selection, over
    ``mass_positions`` drawn positions, all layers and query heads. ``recall``: share of the k blocks with the most of
    that attention, summed over a KV head's group, that were selected, over the same positions. Both None where nothing
    was sparse.
    """

    loss: Floats
    matches: NDArray[np.bool_]
    misses: Counts
    kept: Counts
    selected: Counts
    hot_misses: Counts | None
    dense_mass: float | None
    recall: float | None


@torch.no_grad()
def score_document(
    model: LlamaModel,
    tokens: Sequence[int],
    sparse: SparseConfig,
    *,
    method: str = "nosa",
    mass_positions: int = 0,
    hot_slots: int = 0,
    seed: int = 0,
    chunk: int | None = None,
) -> DocumentScore:
    """Run ``tokens`` (at least 2) through chunked prefill, the path that fills a sequence before it decodes; no block
    is stored, as nothing decodes here.

    ``mass_positions`` positions of more than k blocks are drawn for dense mass and recall (0: not measured).
    ``hot_slots`` >= k LRU slots are counted too (0: not measured): all selections then stay on the device to the end,
    layers * KV heads * tokens * blocks bytes.
    """
    if len(tokens) < 2:
        raise ConfigError(f"a document of {len(tokens)} tokens has nothing to predict; give at least 2")
    if hot_slots != 0 and hot_slots < sparse.topk:
        raise ConfigError(f"hot_slots={hot_slots} cannot hold the {sparse.topk} blocks of a step; give at least those")
    rule = get_method(method)
    drawn = _draw(len(tokens), sparse, mass_positions, seed, rule.dense)
    watch = _Watch(model, tokens, sparse, drawn, hot_slots)
    prefill_only(watch.observed(), tokens, sparse, watch, method=method, chunk=chunk)
    return watch.score(rule.dense)


def _draw(n_tokens: int, sparse: SparseConfig, n: int, seed: int, dense: bool) -> list[int]:
    """Ascending positions of sparse queries."""
    first = sparse.topk_tokens
    if n == 0 or dense or first >= n_tokens:
        return []
    chosen = np.random.default_rng(seed).choice(np.arange(first, n_tokens), min(n, n_tokens - first), replace=False)
    return sorted(chosen.tolist())


class _Watch(PrefillOutput):
    """Takes each chunk's hidden states and selections, and reduces them at once."""

    def __init__(
        self, model: LlamaModel, tokens: Sequence[int], sparse: SparseConfig, drawn: list[int], hot_slots: int
    ) -> None:
        super().__init__(0)
        device, n_tokens = model.device, len(tokens)
        self._model, self._sparse = model, sparse
        self._tokens = torch.tensor(tokens, device=device)
        self._loss = torch.zeros(n_tokens, dtype=torch.float64, device=device)
        self._matches = torch.zeros(n_tokens, dtype=torch.bool, device=device)
        self._counts = torch.zeros(3, n_tokens, dtype=torch.int64, device=device)  # misses, kept, selected
        self._last: dict[int, Tensor] = {}
        self._drawn_list, self._drawn = drawn, torch.tensor(drawn, dtype=torch.int64, device=device)
        self._queries: dict[int, Tensor] = {}
        self._keys: dict[int, list[Tensor]] = {}
        self._mass: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._hot_slots = hot_slots
        self._members: dict[int, list[Tensor]] = {}
        self._hot_misses = torch.zeros(n_tokens, dtype=torch.int64, device=device)

    def observed(self) -> LlamaModel:
        """The model, whose queries and keys are seen as they pass, for the positions that were drawn."""
        return observed(self._model, self._keep_inputs) if len(self._drawn) else self._model

    def _keep_inputs(self, layer: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
        self._queries[layer] = q
        self._keys.setdefault(layer, []).append(k)

    def keep_selection(self, layer: int, chunk_first: int, block_ids: Tensor) -> None:
        n, size = len(block_ids), self._sparse.block_size
        positions = torch.arange(chunk_first, chunk_first + n, device=block_ids.device)
        member = membership(block_ids, self._sparse.n_blocks(len(self._tokens)))  # [kv_head, n, block]
        before = torch.cat([self._last.get(layer, torch.zeros_like(member[:, :1])), member[:, :-1]], dim=1)
        self._last[layer] = member[:, -1:].clone()
        kept = (member & before).sum((0, 2))
        selected = member.sum((0, 2))
        born = (positions % size == 0) * member.shape[0]  # the current block of each head, never loaded
        part = slice(chunk_first, chunk_first + n)
        self._counts[:, part] += torch.stack([selected - kept - born, kept, selected])
        if self._hot_slots:
            self._members.setdefault(layer, []).append(member)
        self._add_mass(layer, chunk_first, member)

    def _add_mass(self, layer: int, chunk_first: int, member: Tensor) -> None:
        """Dense attention of this chunk's drawn queries: mass inside their blocks, recall of the heaviest ones."""
        first, last = (bisect_left(self._drawn_list, edge) for edge in (chunk_first, chunk_first + member.shape[1]))
        drawn, size = self._drawn[first:last], self._sparse.block_size
        if not len(drawn):
            return
        shares = token_shares(self._queries[layer][drawn - chunk_first], torch.cat(self._keys[layer]), drawn)
        by_block = F.pad(shares, (0, -shares.shape[3] % size)).unflatten(3, (-1, size)).sum(-1)
        chosen = member[:, drawn - chunk_first, : by_block.shape[3]]  # [kv_head, drawn, block]
        self._mass.append((by_block * chosen.unsqueeze(2)).sum(-1).flatten().double())
        heaviest = by_block.sum(2).sort(dim=-1, descending=True, stable=True).indices[..., : self._sparse.topk]
        self._recall.append(chosen.gather(2, heaviest).double().mean(-1).flatten())

    def keep_hidden(self, chunk_first: int, x: Tensor) -> None:
        n = min(len(x), len(self._tokens) - 1 - chunk_first)
        if n < 1:
            return
        logits = self._model.logits(x[:n]).to(self._model.acc_dtype)
        targets = self._tokens[chunk_first + 1 : chunk_first + 1 + n]
        part = slice(chunk_first, chunk_first + n)
        self._loss[part] = F.cross_entropy(logits, targets, reduction="none").double()
        self._matches[part] = logits.argmax(-1) == targets

    def finish(self, model: LlamaModel) -> None:
        """All but the hot buffer, which needs the whole document, is reduced already."""
        for chunks in self._members.values():
            self._hot_misses += lru_misses(torch.cat(chunks, dim=1), self._hot_slots, self._sparse.block_size)
        self._members = {}

    def score(self, dense: bool) -> DocumentScore:
        last = len(self._tokens) - 1
        counts = self._counts[:, :last].cpu().numpy()
        if dense:  # nothing is selected and nothing crosses
            counts = np.zeros_like(counts)
        hot = self._hot_misses[:last].cpu().numpy() if self._hot_slots else None
        mass, recall = (float(torch.cat(parts).mean()) if parts else None for parts in (self._mass, self._recall))
        loss, matches = self._loss[:last].cpu().numpy(), self._matches[:last].cpu().numpy()
        return DocumentScore(loss, matches, counts[0], counts[1], counts[2], hot, mass, recall)
