"""Both tiers of one engine: the host pool, the device slots, and the device-side context of every lane."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.block_pool import BlockPool
from nosa_sys.engine.context_store import ContextStore
from nosa_sys.engine.sequence import SavedKV
from nosa_sys.engine.slot_cache import SlotCache
from nosa_sys.engine.tensors import doubled, grown
from nosa_sys.methods import Method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig


class Memory:
    """Storage of all lanes. For a dense method (full) all KV stays in slots, slot b being block b, and the host
    pool stays empty; for the others finished blocks live in the pool and the unfinished one in a slot.

    ``page_table`` int64 [lane, block]: host page of a finished block, -1 while it is not on the host.
    """

    def __init__(
        self,
        model: LlamaModel,
        cfg: SparseConfig,
        method: Method,
        *,
        n_slots: int,
        offload: bool,
        host_memory_bytes: int | None = None,
        poison: float | None = None,
    ) -> None:
        shape, dtype, device = model.shape, model.dtype, model.device
        self.cfg, self.method, self.device, self.n_layers = cfg, method, device, model.n_layers
        self.n_kv_heads, self.offload = shape.n_kv_heads, offload
        on_gpu = device.type == "cuda"
        self.slots = SlotCache(shape, cfg.block_size, n_slots, dtype, model.acc_dtype, device, poison)
        self.context = ContextStore(shape, cfg, dtype, model.acc_dtype, device, poison)
        self.pool = BlockPool(shape, cfg.block_size, dtype, pin=on_gpu, limit_bytes=host_memory_bytes, poison=poison)
        self.block_bytes = shape.kv_block_bytes(cfg.block_size)
        self.page_table = torch.empty((0, 0), dtype=torch.int64, device=device)
        self.longest_tokens = 0

    @property
    def n_slots(self) -> int:
        """Blocks that a head may hold on the device."""
        return self.slots.n_slots

    @property
    def device_kv_bytes(self) -> int:
        """Bytes of K and V on the device over all layers."""
        return self.slots.allocated_bytes

    @property
    def host_pool_bytes(self) -> int:
        """True bytes of the host pool."""
        return self.pool.allocated_bytes

    def pages_for(self, n_tokens: int) -> int:
        """Host pages of a context: its finished blocks, none for a dense method."""
        return 0 if self.method.dense else n_tokens // self.cfg.block_size

    def ensure(self, n_lanes: int, n_tokens: int) -> None:
        """Room for ``n_lanes`` lanes of ``n_tokens`` tokens each."""
        self.longest_tokens = max(self.longest_tokens, n_tokens)
        self.slots.ensure_lanes(n_lanes)
        if self.method.dense:
            self.slots.ensure_slots(self.cfg.n_blocks(n_tokens))
        self.context.ensure(n_lanes, n_tokens)
        lanes, blocks = self.page_table.shape
        wanted = (doubled(lanes, n_lanes), doubled(blocks, self.cfg.n_blocks(n_tokens), 4))
        if wanted != (lanes, blocks):
            self.page_table = grown(self.page_table, wanted, -1)

    def clear_lane(self, lane: int, pages: list[int]) -> None:
        """Forget a sequence: its slots, context and host pages."""
        self.slots.clear_lane(lane)
        self.context.clear_lane(lane)
        self.page_table[lane] = -1
        self.pool.release(pages)

    def add_pages(self, lane: int, first_block: int, pages: list[int]) -> None:
        """Enter host pages of consecutive finished blocks."""
        self.page_table[lane, first_block : first_block + len(pages)] = torch.tensor(pages, device=self.device)

    def current_rows(self, layer: int, lane: int, block: int) -> Tensor:
        """Slot rows int64 [kv_head] of a resident block."""
        if self.method.dense:
            return self.slots.lane_rows(lane)[:, block]
        return self.slots.find(layer, lane, block)

    def read_context(self, layer: int, lane: int, pages: list[int], n_tokens: int) -> Tensor:
        """Copy of the K and V of a lane's first ``n_tokens`` tokens, [2, kv_head, n_tokens, D], on the device.

        Finished blocks come from the host pool (from slots for a dense method), the unfinished one from its slot.
        """
        size = self.cfg.block_size
        n_finished, n_partial = divmod(n_tokens, size)
        parts = []
        if n_finished:
            if self.method.dense:
                blocks = self.slots.kv[layer][self.slots.lane_rows(lane)[:, :n_finished]].transpose(0, 1)
            else:
                blocks = self.pool.read(layer, pages[:n_finished]).to(self.device)
            parts.append(blocks.permute(2, 1, 0, 3, 4).flatten(2, 3))
        if n_partial:
            rows = self.current_rows(layer, lane, n_finished)
            parts.append(self.slots.kv[layer][rows, :, :n_partial].transpose(0, 1))
        if not parts:
            slots = self.slots.kv[layer]
            return slots.new_empty((2, self.n_kv_heads, 0, slots.shape[-1]))
        return torch.cat(parts, dim=2)

    def store_chunk(self, layer: int, lane: int, pages: list[int], first: int, kv: Tensor, betas: Tensor) -> None:
        """Store tokens ``first`` .. L-1 after their prefill: whole blocks to the host pool, the rest to slot 0.

        kv [2, kv_head, L, D] and betas [L, kv_head] hold the context so far; ``pages`` has the pages of all its
        finished blocks.
        """
        size, n_tokens = self.cfg.block_size, kv.shape[2]
        start, n_finished = first // size, n_tokens // size
        if self.method.dense:
            for block in range(start, self.cfg.n_blocks(n_tokens)):
                rows = slice(block * size, min((block + 1) * size, n_tokens))
                self.slots.place(layer, lane, block, block, kv[:, :, rows].transpose(0, 1), betas[rows].T)
            return
        whole = kv[:, :, start * size : n_finished * size]
        blocks = whole.unflatten(2, (n_finished - start, size)) if n_finished > start else None
        if blocks is not None:
            self.pool.write(layer, pages[start:n_finished], blocks.permute(2, 1, 0, 3, 4))
        old = self.slots.lane_rows(lane)[:, 0]
        self.slots.poison_rows(layer, old)
        self.slots.blocks[layer][lane, :, 0] = -1
        if n_tokens > n_finished * size:
            tail = slice(n_finished * size, n_tokens)
            self.slots.place(layer, lane, 0, n_finished, kv[:, :, tail].transpose(0, 1), betas[tail].T)

    def save(self, lane: int, pages: list[int], n_tokens: int) -> SavedKV:
        """Copy a lane to the host: finished blocks, the written rows of the unfinished one, betas and means."""
        size = self.cfg.block_size
        n_windows = self.cfg.n_windows(n_tokens)
        n_whole = n_tokens // size * size
        kv = [self.read_context(layer, lane, pages, n_tokens).to("cpu") for layer in range(self.n_layers)]
        context = self.context
        return SavedKV(
            n_tokens=n_tokens,
            blocks=tuple(t[:, :, :n_whole].unflatten(2, (-1, size)).permute(2, 1, 0, 3, 4).clone() for t in kv),
            partial=tuple(t[:, :, n_whole:].transpose(0, 1).clone() for t in kv),
            betas=tuple(t[lane].flatten(1)[:, :n_tokens].to("cpu", copy=True) for t in context.token_betas),
            key_means=tuple(t[lane, :, :n_windows].to("cpu", copy=True) for t in context.key_means),
            beta_means=tuple(t[lane, :, :n_windows].to("cpu", copy=True) for t in context.beta_means),
        )

    def restore(self, lane: int, pages: list[int], saved: SavedKV) -> None:
        """Fill a fresh lane from a saved one, resident state as after a prefill: the unfinished block alone."""
        for layer in range(self.n_layers):
            whole = saved.blocks[layer].permute(2, 1, 0, 3, 4).flatten(2, 3)
            kv = torch.cat([whole, saved.partial[layer].transpose(0, 1)], dim=2).to(self.device)
            betas = saved.betas[layer].T.to(self.device)
            self.context.append_chunk(layer, lane, 0, kv[0].transpose(0, 1), betas)
            n_windows = saved.key_means[layer].shape[1]
            # the saved means, not recomputed ones: a resumed run repeats the unbroken one bit for bit
            self.context.key_means[layer][lane, :, :n_windows] = saved.key_means[layer].to(self.device)
            self.context.beta_means[layer][lane, :, :n_windows] = saved.beta_means[layer].to(self.device)
            self.store_chunk(layer, lane, pages, 0, kv, betas)
