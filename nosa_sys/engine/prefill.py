"""Chunked prefill: every query selects for itself, as if the context ended at its own position.

A chunk reads its layer's earlier K and V back from memory, or on a GPU keeps them on the device while the prompt lasts,
and stores its own blocks: finished ones in the pool, with offload the unfinished one in a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nosa_sys.engine.memory import Memory
from nosa_sys.engine.prefill_context import ChunkReports, KeptContext, LayerClock, PoolContext, PromptContext
from nosa_sys.engine.setup import default_prefill_chunk
from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.prefill_attention import prefill_attention, queue_selection
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
    """Prefills sequences of one engine, ``chunk`` tokens at a time (None: the device's default).

    ``keep_context``: the prompt's K and V of all layers stay on the device until its prefill ends, and no chunk reads
    earlier blocks back; default on a GPU. ``on_chunk`` is called with the number of tokens of each chunk, on a GPU when
    the chunk before it is done. ``store`` False: no block is stored, so that the lane cannot decode; needs
    ``keep_context``.
    """

    def __init__(
        self,
        model: LlamaModel,
        memory: Memory,
        chunk: int | None = None,
        on_chunk: Callable[[int], None] | None = None,
        *,
        keep_context: bool | None = None,
        store: bool = True,
    ) -> None:
        self.model, self.memory, self._store = model, memory, store
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk={chunk} must be >= 1 token, or None for the device's default")
        self.chunk = chunk or default_prefill_chunk(model.device.type)
        self.cfg, self.method = memory.cfg, memory.method
        self._keep_context = model.device.type == "cuda" if keep_context is None else keep_context
        self._on_chunk = on_chunk

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], lane: int, pages: list[int], output: PrefillOutput | None = None
    ) -> PrefillCost:
        """Fill ``lane`` with the KV of ``tokens``; ``pages`` are the pages of its blocks.

        With ``output`` the logits and selections from position ``output.first`` on are kept there. Raises
        NumericsError for NaN scores, naming layer, head, position and block, and CapacityError when the prompt's K and
        V are to be kept on the device and do not fit.
        """
        n_layers, n_tokens = self.model.n_layers, len(tokens)
        context: PromptContext = PoolContext(self.memory, lane, pages)
        if self._keep_context:
            context = KeptContext(self.model, n_tokens)
        clock = LayerClock(n_layers, self.model.device)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        n_read, before = 0, None
        for first in range(0, n_tokens, self.chunk):
            chunk = ids[first : first + self.chunk]
            reports = self._run_chunk(chunk, first, lane, pages, context, clock, output)
            n_read += self._finished_blocks(first) if context.reads_pool else 0
            if before is not None:
                before.check()
            before = reports
            if self._on_chunk is not None:
                self._on_chunk(len(chunk))
        if before is not None:
            before.check()
        self.memory.settle()
        if output is not None:
            output.finish(self.model)
        block_bytes = self.memory.n_kv_heads * self.memory.block_bytes
        n_written = self._finished_blocks(n_tokens)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return PrefillCost(
            n_tokens, [n_read * block_bytes] * n_layers, [n_written * block_bytes] * n_layers, clock.collect()
        )

    def _run_chunk(
        self,
        tokens: Tensor,
        first: int,
        lane: int,
        pages: list[int],
        context: PromptContext,
        clock: LayerClock,
        output: PrefillOutput | None,
    ) -> ChunkReports:
        model, memory = self.model, self.memory
        end = first + len(tokens)
        x = model.embed(tokens)
        positions = torch.arange(first, end, device=model.device)
        errors: list[Tensor] = []
        clock.begin_chunk()
        for layer in range(model.n_layers):
            q, k, v, beta = model.attention_inputs(layer, x)
            q, k = model.rope(q, k, positions)
            kv = context.extend(layer, first, k, v)
            keys, values = kv[0].transpose(0, 1), kv[1].transpose(0, 1)
            betas = memory.context.append_chunk(layer, lane, first, keys, beta)
            if self._store:
                memory.store_chunk(layer, lane, pages, first, kv, betas)
            if layer < model.n_layers - 1 or output is not None:
                # the last layer's output is of no use but for logits: the last prompt token runs as a decode step
                selection = self._select(layer, lane, q, first, errors)
                block_ids = None if selection is None else selection.block_ids
                bias = betas if self.method.uses_beta else None
                attention = prefill_attention(q, keys, values, bias, block_ids, first, self.cfg.block_size)
                x = model.attention_output(layer, x, attention)
                if output is not None and block_ids is not None:
                    output.keep_selection(layer, first, block_ids)
            clock.end_layer(layer)
        if output is not None:
            output.keep_hidden(first, x)
        return ChunkReports(errors, end, model.device)

    def _finished_blocks(self, n_tokens: int) -> int:
        """Blocks of a context that cross into the host pool."""
        return n_tokens // self.cfg.block_size if self.memory.offload else 0

    def _select(self, layer: int, lane: int, q: Tensor, first: int, errors: list[Tensor]) -> Selection | None:
        """None for a dense method. A GPU's NaN reports go to ``errors``, one entry a layer, unseen."""
        if self.method.dense:
            return None
        n_windows = self.cfg.n_windows(first + q.shape[0])
        context = self.memory.context
        try:
            selection, reports = queue_selection(
                q,
                context.key_means[layer][lane, :, :n_windows],
                context.beta_means[layer][lane, :, :n_windows],
                first,
                self.cfg,
                self.method,
            )
        except NumericsError as error:
            raise NumericsError(f"layer {layer}, prefill, row = position: {error}") from None
        if reports is not None:
            errors.append(reports)
        return selection


def prefill_logits(
    model: LlamaModel,
    tokens: Sequence[int],
    sparse: SparseConfig,
    *,
    method: str = "nosa",
    first: int = 0,
    chunk: int = 512,
    poison: float | None = None,
    offload: bool | None = None,
    keep_context: bool | None = None,
) -> PrefillOutput:
    """Logits and selections of positions ``first`` .. of ``tokens`` by the prefill path alone, in storage of its own.

    The comparison that holds decode and prefill to one another. ``offload`` and ``keep_context`` as of ``Memory`` and
    ``PrefillRunner``.
    """
    rule = get_method(method)
    offload = not rule.dense if offload is None else offload
    memory = Memory(model, sparse, rule, n_slots=sparse.topk, offload=offload, poison=poison)
    memory.ensure(1, len(tokens))
    memory.clear_lane(0, [])
    pages = memory.pool.allocate(memory.pages_for(len(tokens)))
    output = PrefillOutput(first)
    PrefillRunner(model, memory, chunk, keep_context=keep_context).run(tokens, 0, pages, output)
    return output


def prefill_only(
    model: LlamaModel,
    tokens: Sequence[int],
    sparse: SparseConfig,
    output: PrefillOutput,
    *,
    method: str,
    chunk: int | None = None,
) -> PrefillCost:
    """Run ``tokens`` through prefill for what ``output`` takes: no block is stored, nothing crosses to the host."""
    memory = Memory(model, sparse, get_method(method), n_slots=sparse.topk, offload=False)
    memory.ensure(1, len(tokens))
    memory.clear_lane(0, [])
    return PrefillRunner(model, memory, chunk, keep_context=True, store=False).run(tokens, 0, [], output)
