"""All storage of one engine: the block pool, the device slots, and the device-side context of every lane."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nosa_sys.engine.block_pool import BlockPool
from nosa_sys.engine.context_store import ContextStore
from nosa_sys.engine.memory_plan import device_bytes, n_pages, required_bytes
from nosa_sys.engine.pinned import PinnedArena, refuse_unless_free
from nosa_sys.engine.sequence import SavedKV
from nosa_sys.engine.slot_cache import SlotCache
from nosa_sys.engine.tensors import free_bytes, grown, n_bytes, stepped
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.key_means import stored_key_means_dtype
from nosa_sys.methods import Method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig

# Memory of whole lives grows by so many blocks a lane, and by so many pages or this share of the pool.
_BLOCK_STEP = _PAGE_STEP = 32
_POOL_STEP_SHARE = 16


class Memory:
    """Storage of all lanes.

    With ``offload`` finished blocks live in the host pool, and the device has ``n_slots`` slots a head, the unfinished
    block in one of them. Without it (always so for a dense method) all KV lives in pages on the device, the unfinished
    block included, nothing ever crosses, and ``slots`` is None.

    ``page_table`` int64 [lane, block]: the pool's page of a block, -1 where it has none. ``arena``: where the host
    pool's memory comes from, for several engines in turn. ``longest_tokens``: the longest context that room was asked
    for. ``key_means_dtype``: see key_means.py. ``keep_context``: whether there are compressed keys and betas; default:
    unless the method is dense. Raises ConfigError for a dense method with offload.
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
        arena: PinnedArena | None = None,
        key_means_dtype: str = "float32",
        keep_context: bool | None = None,
        poison: float | None = None,
    ) -> None:
        if offload and method.dense:
            raise ConfigError(
                f"method {method.name} attends to every block, so its KV stays on the device: offload=off"
            )
        shape, dtype, device = model.shape, model.dtype, model.device
        self.cfg, self.method, self.device, self.n_layers = cfg, method, device, model.n_layers
        self.n_kv_heads, self.offload, self._shape = shape.n_kv_heads, offload, shape
        self.key_means_dtype = key_means_dtype
        means_dtype = getattr(torch, stored_key_means_dtype(key_means_dtype, shape.dtype))
        kept = not method.dense if keep_context is None else keep_context
        self.context = ContextStore(shape, cfg, dtype, model.acc_dtype, means_dtype, device, poison, kept=kept)
        self.slots = None
        if offload:
            self.slots = SlotCache(shape, cfg.block_size, n_slots, dtype, model.acc_dtype, device, poison)
            register = device.type == "cuda"
            self.pool = BlockPool(
                shape,
                cfg.block_size,
                dtype,
                register=register,
                arena=arena,
                limit_bytes=host_memory_bytes,
                poison=poison,
            )
        else:
            beta_dtype = model.acc_dtype if method.uses_beta else None
            self.pool = BlockPool(shape, cfg.block_size, dtype, device=device, beta_dtype=beta_dtype, poison=poison)
        self.block_bytes = shape.kv_block_bytes(cfg.block_size)
        self.page_table = torch.empty((0, 0), dtype=torch.int64, device=device)
        self.longest_tokens = 0

    # ---- sizes
    @property
    def n_slots(self) -> int:
        """Blocks that a head may hold on the device: its slots, or without offload all of the longest context."""
        return self.cfg.n_blocks(self.longest_tokens) if self.slots is None else self.slots.n_slots

    @property
    def generation(self) -> int:
        """Goes up whenever a tensor of the pool or the device moved: addresses taken before are stale."""
        # page table and context grow together
        n_slot_growths = 0 if self.slots is None else self.slots.generation
        return n_slot_growths + self.context.generation + self.pool.generation

    @property
    def device_kv_bytes(self) -> int:
        """Bytes of K and V (and of betas beside pages) on the device over all layers."""
        return self.pool.allocated_bytes if self.slots is None else self.slots.allocated_bytes

    @property
    def host_pool_bytes(self) -> int:
        """True bytes of the host pool."""
        return self.pool.allocated_bytes if self.offload else 0

    def allocated_bytes(self) -> dict[str, int]:
        """True bytes now, under the names of ``memory_plan.required_bytes``."""
        return {
            "device_slot_bytes": 0 if self.slots is None else self.slots.allocated_bytes,
            "device_map_bytes": (0 if self.slots is None else self.slots.map_bytes) + n_bytes(self.page_table),
            "device_context_bytes": self.context.allocated_bytes,
            "device_pool_bytes": 0 if self.offload else self.pool.allocated_bytes,
            "host_pool_bytes": self.host_pool_bytes,
        }

    def pages_for(self, n_tokens: int) -> int:
        """Pages of a context: its finished blocks with offload, else all of its blocks."""
        return n_pages(self.cfg, n_tokens, offload=self.offload)

    def ensure(self, n_lanes: int, n_tokens: int, *, exact: bool = False) -> None:
        """Room for ``n_lanes`` lanes of ``n_tokens`` tokens each, pages apart; grows by doubling unless ``exact``.

        CapacityError, before anything is allocated, when the device has too little memory left."""
        self.longest_tokens = max(self.longest_tokens, n_tokens)
        context, cfg = self.context, self.cfg
        has = (context.n_lanes, context.n_blocks, context.n_windows)
        wanted = (n_lanes, cfg.n_blocks(n_tokens), cfg.n_windows(n_tokens))
        if all(a >= b for a, b in zip(has, wanted, strict=True)):
            return
        lanes, tokens = max(n_lanes, context.n_lanes), max(n_tokens, context.n_blocks * cfg.block_size)
        self._refuse_unless_free(lanes, tokens, with_pages=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # other streams may still read what is given back
        if self.slots is not None:
            self.slots.ensure_lanes(n_lanes, exact=exact)
        context.ensure(n_lanes, n_tokens, exact=exact)
        self.page_table = grown(self.page_table, (context.n_lanes, context.n_blocks), -1)

    def preallocate(self, n_lanes: int, n_tokens: int) -> None:
        """Take exactly what ``n_lanes`` sequences of ``n_tokens`` stored tokens need, pages included, so that nothing
        grows before they are exceeded. CapacityError, before anything is allocated, when it does not fit."""
        self._refuse_unless_free(n_lanes, n_tokens, with_pages=not self.offload)
        self.pool.preallocate(n_lanes * self.pages_for(n_tokens))
        self.ensure(n_lanes, n_tokens, exact=True)

    def make_room(self, n_lanes: int, n_tokens: int, n_pages: int) -> None:
        """Room for whole lives, ``n_pages`` pages in all: exactly that the first time, then in steps, so that
        addresses, and graphs that hold them, do not move for each longer sequence; where a step does not fit, exactly
        what is needed. CapacityError when that does not fit either."""
        pool, context, cfg = self.pool, self.context, self.cfg
        pages = stepped(pool.n_pages, n_pages, max(_PAGE_STEP, pool.n_pages // _POOL_STEP_SHARE))
        if pool.limit_pages is not None:
            pages, n_pages = min(pages, pool.limit_pages), min(n_pages, pool.limit_pages)
        _roomy_or_exact(pool.preallocate, pages, n_pages)
        tokens = n_tokens
        if context.n_blocks < cfg.n_blocks(n_tokens) or context.n_windows < cfg.n_windows(n_tokens):
            blocks = stepped(context.n_blocks, cfg.n_blocks(n_tokens), _BLOCK_STEP)
            tokens = blocks * cfg.block_size if context.n_blocks else n_tokens
        _roomy_or_exact(lambda room: self.ensure(n_lanes, room, exact=True), tokens, n_tokens)

    def _refuse_unless_free(self, n_lanes: int, n_tokens: int, *, with_pages: bool) -> None:
        needed = required_bytes(
            self._shape,
            self.cfg,
            self.method,
            n_slots=self.n_slots,
            offload=self.offload,
            lanes=n_lanes,
            tokens_a_lane=n_tokens,
            key_means_dtype=self.key_means_dtype,
            keep_context=self.context.kept,
        )
        taken = self.allocated_bytes()
        if not with_pages:
            needed["device_pool_bytes"] = taken["device_pool_bytes"]
        refuse_unless_free(
            device_bytes(needed) - device_bytes(taken),
            free_bytes(self.device),
            f"{self.device.type} memory for {n_lanes} sequences of {n_tokens} tokens",
            "ask for fewer or shorter sequences, or fewer slots",
        )

    # ---- lanes
    def clear_lane(self, lane: int, pages: list[int]) -> None:
        """Forget a sequence: its slots, context and pages."""
        if self.slots is not None:
            self.slots.clear_lane(lane)
        self.context.clear_lane(lane)
        self.page_table[lane] = -1
        self.pool.release(pages)

    def add_pages(self, lane: int, first_block: int, pages: list[int]) -> None:
        """Enter the pages of consecutive blocks."""
        self.page_table[lane, first_block : first_block + len(pages)] = torch.tensor(
            pages, dtype=torch.int64, device=self.device
        )

    def attended(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """What decode attention reads by row number: K and V [row, 2, block, D] and betas [row, block] (None where the
        method has none), of the slots or of the pages on the device."""
        if self.slots is None:
            return self.pool.layers[layer], self.pool.betas[layer]
        return self.slots.kv[layer], self.slots.betas[layer] if self.method.uses_beta else None

    def read_context(self, layer: int, lane: int, pages: list[int], n_tokens: int) -> Tensor:
        """Copy of the K and V of a lane's first ``n_tokens`` tokens, [2, kv_head, n_tokens, D], on the device.

        They come from the pool, but with offload the unfinished block comes from its slot.
        """
        size = self.cfg.block_size
        n_stored = self.pages_for(n_tokens)
        blocks = self.pool.read(layer, pages[:n_stored]).to(self.device)
        kv = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :n_tokens]
        n_partial = n_tokens - kv.shape[2]
        if self.slots is None or n_partial == 0:
            return kv
        rows = self.slots.find(layer, lane, n_tokens // size)
        return torch.cat([kv, self.slots.kv[layer][rows, :, :n_partial].transpose(0, 1)], dim=2)

    def store_chunk(
        self, layer: int, lane: int, pages: list[int], first: int, kv: Tensor, betas: Tensor | None
    ) -> None:
        """Store tokens ``first`` .. L-1 after their prefill: in pages, but with offload an unfinished block in slot 0.

        kv [2, kv_head, L, D] and betas [L, kv_head] (None: nothing keeps them) hold the context so far; ``pages`` has
        the pages of all its blocks that get one. Copies to the host may still be under way: ``settle``.
        """
        size, n_tokens = self.cfg.block_size, kv.shape[2]
        start, n_finished = first // size, n_tokens // size
        if n_finished > start:
            whole = slice(start * size, n_finished * size)
            blocks = kv[:, :, whole].unflatten(2, (-1, size)).permute(2, 1, 0, 3, 4)
            block_betas = None if betas is None else betas[whole].unflatten(0, (-1, size)).transpose(1, 2)
            self.pool.write(layer, pages[start:n_finished], blocks, block_betas)
        tail = slice(n_finished * size, n_tokens)
        kv_tail, beta_tail = kv[:, :, tail].transpose(0, 1), None if betas is None else betas[tail].T
        if self.slots is None:
            if n_tokens > n_finished * size:
                self.pool.write_partial(layer, pages[n_finished], kv_tail, beta_tail)
            return
        if self.slots.poisons:
            self.slots.poison_rows(layer, self.slots.lane_rows(lane)[:, 0])
        self.slots.blocks[layer][lane, :, 0] = -1
        if n_tokens > n_finished * size:
            assert beta_tail is not None  # a method with slots selects, so its context is kept
            self.slots.place(layer, lane, 0, n_finished, kv_tail, beta_tail)

    def settle(self) -> None:
        """Wait until all copies into the pool have arrived."""
        self.pool.settle()

    def fill_synthetic(self, lane: int, pages: list[int], n_tokens: int, seed: int) -> None:
        """Fill a fresh lane as if ``n_tokens`` tokens had been prefilled: random K, V (the same in all layers) and
        betas, and their window means. For timing contexts whose prefill would take hours."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (2, self.n_kv_heads, n_tokens, self._shape.head_dim)
        kv = torch.randn(size, generator=generator, dtype=self.pool.layers[0].dtype, device=self.device)
        for layer, means in enumerate(self.context.beta_means):
            noise = torch.randn((n_tokens, self.n_kv_heads), generator=generator, dtype=means.dtype, device=self.device)
            betas = self.context.append_chunk(layer, lane, 0, kv[0].transpose(0, 1), noise)
            self.store_chunk(layer, lane, pages, 0, kv, betas)
        self.settle()

    def save(self, lane: int, pages: list[int], n_tokens: int) -> SavedKV:
        """Copy a lane to the host: finished blocks, the written rows of the unfinished one, betas and means."""
        size = self.cfg.block_size
        n_windows = self.cfg.n_windows(n_tokens)
        n_whole = n_tokens // size * size
        kv = [self.read_context(layer, lane, pages, n_tokens).to("cpu") for layer in range(self.n_layers)]
        context = self.context

        def kept(tensors: list[Tensor]) -> list[Tensor]:
            return tensors if context.kept else []

        return SavedKV(
            n_tokens=n_tokens,
            blocks=tuple(t[:, :, :n_whole].unflatten(2, (-1, size)).permute(2, 1, 0, 3, 4).clone() for t in kv),
            partial=tuple(t[:, :, n_whole:].transpose(0, 1).clone() for t in kv),
            betas=tuple(t[lane].flatten(1)[:, :n_tokens].to("cpu", copy=True) for t in kept(context.token_betas)),
            key_means=tuple(t[lane, :, :n_windows].to("cpu", copy=True) for t in kept(context.key_means)),
            beta_means=tuple(t[lane, :, :n_windows].to("cpu", copy=True) for t in kept(context.beta_means)),
        )

    def restore(self, lane: int, pages: list[int], saved: SavedKV) -> None:
        """Fill a fresh lane from a saved one, resident state as after a prefill."""
        for layer in range(self.n_layers):
            whole = saved.blocks[layer].permute(2, 1, 0, 3, 4).flatten(2, 3)
            kv = torch.cat([whole, saved.partial[layer].transpose(0, 1)], dim=2).to(self.device)
            betas = None
            if self.context.kept:
                betas = saved.betas[layer].T.to(self.device)
                self.context.append_chunk(layer, lane, 0, kv[0].transpose(0, 1), betas)
                n_windows = saved.key_means[layer].shape[1]
                # the saved means, not recomputed ones: a resumed run repeats the unbroken one bit for bit
                self.context.key_means[layer][lane, :, :n_windows] = saved.key_means[layer].to(self.device)
                self.context.beta_means[layer][lane, :, :n_windows] = saved.beta_means[layer].to(self.device)
            self.store_chunk(layer, lane, pages, 0, kv, betas)
        self.settle()


def _roomy_or_exact(take: Callable[[int], None], roomy: int, needed: int) -> None:
    """Take ``roomy``, or where that does not fit ``needed``."""
    try:
        take(roomy)
    except CapacityError:
        if roomy == needed:
            raise
        take(needed)
