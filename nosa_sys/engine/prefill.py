"""Chunked prefill: every query selects for itself, as if the context ended at its own position.

A chunk gathers its layer's earlier K and V into a transient buffer (whole finished blocks from the host pool), and
stores its own blocks back: finished ones to the host, the unfinished one to a slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nosa_sys.engine.memory import Memory
from nosa_sys.errors import NumericsError
from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.prefill_attention.reference import prefill_attention, prefill_selection
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig


@dataclass
class PrefillCost:
    """Bytes and time of one sequence's prefill, one entry a layer; h2d are earlier blocks read back by later chunks."""

    n_tokens: int
    h2d_bytes: list[int]
    d2h_bytes: list[int]
    time_us: list[float]


class PrefillOutput:
    """What a prefill gave from position ``first`` on: ``logits`` [tokens, vocab], and per layer ``block_ids`` int32
    [tokens, kv_head, k], -1 padded (no layers for a dense method)."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.logits = torch.empty(0)
        self.block_ids: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._ids: dict[int, list[Tensor]] = {}

    def keep_selection(self, layer: int, chunk_first: int, block_ids: Tensor) -> None:
        self._ids.setdefault(layer, []).append(block_ids[max(0, self.first - chunk_first) :])

    def keep_hidden(self, chunk_first: int, x: Tensor) -> None:
        self._hidden.append(x[max(0, self.first - chunk_first) :])

    def finish(self, model: LlamaModel) -> None:
        self.logits = model.logits(torch.cat(self._hidden))
        self.block_ids = [torch.cat(chunks) for chunks in self._ids.values()]
        self._hidden, self._ids = [], {}


class PrefillRunner:
    """Prefills sequences of one engine, ``chunk`` tokens at a time."""

    def __init__(
        self, model: LlamaModel, memory: Memory, chunk: int, on_chunk: Callable[[int], None] | None = None
    ) -> None:
        """``on_chunk`` is called with the number of tokens of each finished chunk."""
        self.model, self.memory, self.chunk = model, memory, chunk
        self.cfg, self.method = memory.cfg, memory.method
        self._on_chunk = on_chunk

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], lane: int, pages: list[int], output: PrefillOutput | None = None
    ) -> PrefillCost:
        """Fill ``lane`` with the KV of ``tokens``; ``pages`` are the host pages of its finished blocks.

        With ``output`` the logits and selections from position ``output.first`` on are kept there. Raises
        NumericsError for NaN scores, naming layer, head, position and block.
        """
        n_layers = self.model.n_layers
        cost = PrefillCost(len(tokens), [0] * n_layers, [0] * n_layers, [0.0] * n_layers)
        for first in range(0, len(tokens), self.chunk):
            chunk = tokens[first : first + self.chunk]
            self._run_chunk(chunk, first, lane, pages, cost, output)
            if self._on_chunk is not None:
                self._on_chunk(len(chunk))
        if output is not None:
            output.finish(self.model)
        return cost

    def _run_chunk(
        self,
        tokens: Sequence[int],
        first: int,
        lane: int,
        pages: list[int],
        cost: PrefillCost,
        output: PrefillOutput | None,
    ) -> None:
        model, memory = self.model, self.memory
        end = first + len(tokens)
        x = model.embed(torch.tensor(tokens, device=model.device))
        positions = torch.arange(first, end, device=model.device)
        read, written = self._finished_blocks(first), self._finished_blocks(end) - self._finished_blocks(first)
        for layer in range(model.n_layers):
            start = time.perf_counter()
            q, k, v, beta = model.attention_inputs(layer, x)
            q, k = model.rope(q, k, positions)
            earlier = memory.read_context(layer, lane, pages, first)
            kv = torch.cat([earlier, torch.stack((k, v)).transpose(1, 2)], dim=2)
            betas = memory.context.append_chunk(layer, lane, first, kv[0].transpose(0, 1), beta)
            memory.store_chunk(layer, lane, pages, first, kv, betas)
            if layer < model.n_layers - 1 or output is not None:
                # the last layer's output is of no use but for logits: the last prompt token runs as a decode step
                selection = self._select(layer, lane, q, first)
                attention = prefill_attention(
                    q,
                    kv[0].transpose(0, 1),
                    kv[1].transpose(0, 1),
                    betas if self.method.uses_beta else None,
                    None if selection is None else selection.block_ids,
                    first,
                    self.cfg.block_size,
                )
                x = model.attention_output(layer, x, attention)
                if output is not None and selection is not None:
                    output.keep_selection(layer, first, selection.block_ids)
            cost.h2d_bytes[layer] += read * memory.n_kv_heads * memory.block_bytes
            cost.d2h_bytes[layer] += written * memory.n_kv_heads * memory.block_bytes
            cost.time_us[layer] += (time.perf_counter() - start) * 1e6
        if output is not None:
            output.keep_hidden(first, x)

    def _finished_blocks(self, n_tokens: int) -> int:
        return 0 if self.method.dense else n_tokens // self.cfg.block_size

    def _select(self, layer: int, lane: int, q: Tensor, first: int) -> Selection | None:
        if self.method.dense:
            return None
        n_windows = self.cfg.n_windows(first + q.shape[0])
        context = self.memory.context
        try:
            return prefill_selection(
                q,
                context.key_means[layer][lane, :, :n_windows],
                context.beta_means[layer][lane, :, :n_windows],
                first,
                self.cfg,
                self.method,
            )
        except NumericsError as error:
            raise NumericsError(f"layer {layer}, prefill, row = position: {error}") from None


def prefill_logits(
    model: LlamaModel,
    tokens: Sequence[int],
    sparse: SparseConfig,
    *,
    method: str = "nosa",
    first: int = 0,
    chunk: int = 512,
    poison: float | None = None,
) -> PrefillOutput:
    """Logits and selections of positions ``first`` .. of ``tokens`` by the prefill path alone, in storage of its own.

    The comparison that holds decode and prefill to one another.
    """
    rule = get_method(method)
    memory = Memory(model, sparse, rule, n_slots=sparse.topk, offload=not rule.dense, poison=poison)
    memory.ensure(1, len(tokens))
    memory.clear_lane(0, [])
    pages = memory.pool.allocate(memory.pages_for(len(tokens)))
    output = PrefillOutput(first)
    PrefillRunner(model, memory, chunk).run(tokens, 0, pages, output)
    return output
