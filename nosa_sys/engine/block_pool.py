"""Pages of KV blocks, one contiguous K+V run for each (sequence, head, block), in host memory or on the device.

The same page numbers serve all layers: page p of a layer holds that layer's block for all KV heads, head h in
row p * n_kv_heads + h. In host memory it is the slow tier, which decode reaches through block_fetch and write_back
alone; on the device it is all the KV there is, the unfinished block included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.engine.block_stream import BlockStream, consecutive_runs
from nosa_sys.engine.pinned import PinnedArena, PinnedBuffer, memory_available_bytes, refuse_unless_free
from nosa_sys.engine.tensors import free_bytes, grown
from nosa_sys.errors import CapacityError
from nosa_sys.model_shape import ModelShape


class BlockPool:
    """Growing pool of pages. ``layers[l]`` is [n_rows, 2, block, head_dim]; ``betas[l]`` [n_rows, block] beside it
    where ``beta_dtype`` is given, else None.

    Without ``device`` the pool is host memory, registered with CUDA when ``register``. With ``arena`` it takes all that
    this has left, and grows in place there.
    Pages are reserved at admission, so that a sequence that was let in never meets ``limit_bytes`` (all layers, K and
    V) in the middle of its generation. The pool grows to what is reserved or needed and never beyond; outside an arena
    growing copies it, so ask for a whole batch at once with ``preallocate``. ``generation`` counts growths.
    """

    def __init__(
        self,
        shape: ModelShape,
        block_size: int,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        beta_dtype: torch.dtype | None = None,
        register: bool = False,
        arena: PinnedArena | None = None,
        limit_bytes: int | None = None,
        poison: float | None = None,
    ) -> None:
        self.on_host = device is None
        self.device = torch.device("cpu") if device is None else device
        self._register, self._arena, self._poison = register, arena, poison
        self.n_kv_heads = shape.n_kv_heads
        self.layers = [
            torch.empty((0, 2, block_size, shape.head_dim), dtype=dtype, device=self.device)
            for _ in range(shape.n_layers)
        ]
        self.betas = [
            None if beta_dtype is None else torch.empty((0, block_size), dtype=beta_dtype, device=self.device)
            for _ in range(shape.n_layers)
        ]
        self._buffers: list[PinnedBuffer | None] = [None] * shape.n_layers
        row_bytes = 2 * block_size * shape.head_dim * dtype.itemsize
        row_bytes += 0 if beta_dtype is None else block_size * beta_dtype.itemsize
        self.page_bytes = shape.n_layers * shape.n_kv_heads * row_bytes
        self.limit_pages = None if limit_bytes is None else limit_bytes // self.page_bytes
        self._limit_bytes = limit_bytes
        self._free: list[int] = []
        self._n_pages = self._reserved = self.generation = 0
        self._claims: list[Tensor] | None = None
        self._stream = BlockStream() if register else None

    @property
    def allocated_bytes(self) -> int:
        """True bytes of the pool's pages, used or not; the memory behind them is so much, to a page a layer."""
        return self._n_pages * self.page_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with CUDA: those of the pool, or of its whole arena; 0 on the device and without CUDA."""
        if self._arena is not None:
            return self._arena.pinned_bytes
        return sum(buffer.pinned_bytes for buffer in self._buffers if buffer is not None)

    @property
    def n_pages(self) -> int:
        return self._n_pages

    @property
    def pages_in_use(self) -> int:
        return self._n_pages - len(self._free)

    def refuse_oversized(self, n_pages: int) -> None:
        """CapacityError when one sequence alone can never fit."""
        if self.limit_pages is not None and n_pages > self.limit_pages:
            raise CapacityError(
                f"the sequence needs {n_pages * self.page_bytes} bytes of host KV memory ({n_pages} blocks over all "
                f"layers), more than host_memory_bytes={self._limit_bytes}; raise it or ask for fewer tokens"
            )

    def reserve(self, n_pages: int) -> bool:
        """Set pages aside for a sequence's whole life; False when it has to wait for others to leave."""
        if self.limit_pages is not None and self._reserved + n_pages > self.limit_pages:
            return False
        self._reserved += n_pages
        return True

    def unreserve(self, n_pages: int) -> None:
        self._reserved -= n_pages

    def preallocate(self, n_pages: int) -> None:
        """Grow to ``n_pages`` pages, used ones included. CapacityError, before anything is allocated, when they exceed
        the limit or the memory that is free."""
        if n_pages > self._n_pages:
            self._grow(n_pages)

    def allocate(self, n_pages: int) -> list[int]:
        """Take pages, ascending where they are fresh; grows to what is reserved, or needed if that is more."""
        if n_pages > len(self._free):
            needed = self.pages_in_use + n_pages
            reserved = self._reserved if self.limit_pages is None else min(self._reserved, self.limit_pages)
            self._grow(max(needed, reserved))
        return [self._free.pop() for _ in range(n_pages)]

    def release(self, pages: list[int]) -> None:
        """Give pages back; with poison their rows can no longer be read by mistake."""
        if self._poison is not None and pages:
            rows = self.rows_of(pages)
            for layer, betas in zip(self.layers, self.betas, strict=True):
                layer[rows] = self._poison
                if betas is not None:
                    betas[rows] = self._poison
        self._free.extend(sorted(pages, reverse=True))

    def rows_of(self, pages: list[int]) -> Tensor:
        """Rows int64 [n_pages * n_kv_heads], page-major, on the pool's device."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.n_kv_heads
        return (first + torch.arange(self.n_kv_heads)).flatten().to(self.device)

    def read(self, layer: int, pages: list[int]) -> Tensor:
        """Copy of whole pages, [n_pages, kv_head, 2, block, head_dim], on the pool's device; waits for whatever a GPU
        still has to write to a host pool."""
        if self._register:
            torch.cuda.synchronize()
        data = self.layers[layer]
        return data[self.rows_of(pages)].view(len(pages), self.n_kv_heads, *data.shape[1:])

    def write(self, layer: int, pages: list[int], blocks: Tensor, betas: Tensor | None) -> None:
        """Store ``blocks`` [n_pages, kv_head, 2, block, head_dim] from any device, and beside them where the pool has
        betas ``betas`` [n_pages, kv_head, block] (else they may be None).

        Blocks on a GPU go to a registered host pool beside whatever runs: ``settle`` before they are read."""
        by_page = self.layers[layer].unflatten(0, (-1, self.n_kv_heads))
        if self._stream is not None and blocks.is_cuda:
            self._stream.write(by_page, pages, blocks)
            return
        page_betas = self.betas[layer]
        for page, start, length in consecutive_runs(pages):  # slices: page numbers would have to be copied to a GPU
            by_page[page : page + length] = blocks[start : start + length]
            if page_betas is not None and betas is not None:
                betas_by_page = page_betas.unflatten(0, (-1, self.n_kv_heads))
                betas_by_page[page : page + length] = betas[start : start + length]

    def write_partial(self, layer: int, page: int, kv: Tensor, betas: Tensor | None) -> None:
        """Store the first tokens of an unfinished block: kv [kv_head, 2, n, head_dim], betas [kv_head, n]."""
        rows, n = slice(page * self.n_kv_heads, (page + 1) * self.n_kv_heads), kv.shape[2]
        self.layers[layer][rows, :, :n] = kv
        page_betas = self.betas[layer]
        if page_betas is not None and betas is not None:
            page_betas[rows, :n] = betas

    def settle(self) -> None:
        """Wait until all writes so far have arrived."""
        if self._stream is not None:
            self._stream.settle()

    def _grow(self, n_pages: int) -> None:
        """Grow to exactly ``n_pages``, layer by layer: one layer's old pages live beside its new ones at a time."""
        if self.limit_pages is not None and n_pages > self.limit_pages:
            raise CapacityError(
                f"host KV pool is full: {n_pages} blocks of {self.page_bytes} bytes exceed "
                f"host_memory_bytes={self._limit_bytes}; raise it"
            )
        self._refuse_unless_free(n_pages)
        if self._register or self.device.type == "cuda":
            torch.cuda.synchronize()  # no copy may be in flight into what is given back
        self.generation += 1
        n_rows = n_pages * self.n_kv_heads
        for index, (layer, betas) in enumerate(zip(self.layers, self.betas, strict=True)):
            if self._arena is None:
                self._grow_layer(index, (n_rows, *layer.shape[1:]))
            else:
                self.layers[index] = self._claimed(self._arena)[index][:n_rows]
                if self._poison is not None:
                    self.layers[index][layer.shape[0] :] = self._poison
            if betas is not None:
                self.betas[index] = grown(betas, (n_rows, betas.shape[1]), self._poison)
        self._free = list(range(n_pages - 1, self._n_pages - 1, -1)) + self._free
        self._n_pages = n_pages

    def _grow_layer(self, index: int, shape: tuple[int, ...]) -> None:
        layer, old, fresh = self.layers[index], self._buffers[index], None
        if self.on_host:
            buffer = PinnedBuffer(math.prod(shape) * layer.element_size(), register=self._register)
            self._buffers[index], fresh = buffer, buffer.tensor(shape, layer.dtype)
        self.layers[index] = grown(layer, shape, self._poison, into=fresh)
        if old is not None:
            old.release()

    def _claimed(self, arena: PinnedArena) -> list[Tensor]:
        """All that the arena has left, in equal parts for the layers: growing there is a longer view, not a copy."""
        if self._claims is None:
            rows = self._claimable_pages(arena) * self.n_kv_heads
            self._claims = [arena.take((rows, *layer.shape[1:]), layer.dtype) for layer in self.layers]
        return self._claims

    def _claimable_pages(self, arena: PinnedArena) -> int:
        n_layers = len(self.layers)
        return arena.aligned_down(arena.free_bytes // n_layers) // (self.page_bytes // n_layers)

    def _refuse_unless_free(self, n_pages: int) -> None:
        remedy = "ask for fewer or shorter sequences"
        if self._arena is not None:
            n_claimed = self._claims[0].shape[0] // self.n_kv_heads if self._claims else None
            room = (self._claimable_pages(self._arena) if n_claimed is None else n_claimed) * self.page_bytes
            remedy += ", make the arena larger, or reset it when the pool before is done with"
            refuse_unless_free(n_pages * self.page_bytes, room, "the arena for the KV pool", remedy)
            return
        more = (n_pages - self._n_pages) * self.page_bytes + self.allocated_bytes // len(self.layers)
        free, where = (memory_available_bytes(), "host") if self.on_host else (free_bytes(self.device), "device")
        refuse_unless_free(more, free, f"{where} memory for the KV pool", remedy)
