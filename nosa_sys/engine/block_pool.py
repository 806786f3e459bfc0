"""Host tier: every finished KV block of every sequence, one contiguous K+V run for each (sequence, head, block).

The same page numbers serve all layers: page p of a layer holds that layer's block for all KV heads, head h in
row p * n_kv_heads + h. Decode reaches this memory through block_fetch and write_back alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.tensors import grown
from nosa_sys.errors import CapacityError
from nosa_sys.model_shape import ModelShape


class BlockPool:
    """Growing pool of pages. ``layers[l]`` is [n_rows, 2, block, head_dim]; pinned where the device is a GPU.

    ``limit_bytes`` bounds the pool over all layers, K and V together; pages are reserved at admission, so that a
    sequence that was let in never meets the limit in the middle of its generation.
    """

    def __init__(
        self,
        shape: ModelShape,
        block_size: int,
        dtype: torch.dtype,
        *,
        pin: bool = False,
        limit_bytes: int | None = None,
        poison: float | None = None,
    ) -> None:
        self._shape, self._pin, self._poison = shape, pin, poison
        self.n_kv_heads = shape.n_kv_heads
        run_bytes = 2 * block_size * shape.head_dim * torch.empty(0, dtype=dtype).element_size()
        self.page_bytes = shape.n_layers * shape.n_kv_heads * run_bytes
        self.limit_pages = None if limit_bytes is None else limit_bytes // self.page_bytes
        self._limit_bytes = limit_bytes
        self.layers = [torch.empty((0, 2, block_size, shape.head_dim), dtype=dtype) for _ in range(shape.n_layers)]
        self._free: list[int] = []
        self._n_pages = 0
        self._reserved = 0

    @property
    def allocated_bytes(self) -> int:
        """True bytes of the pool's memory, used or not."""
        return self._n_pages * self.page_bytes

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

    def allocate(self, n_pages: int) -> list[int]:
        """Take pages, growing the pool by doubling where it is short."""
        if n_pages > len(self._free):
            self._grow(n_pages - len(self._free))
        return [self._free.pop() for _ in range(n_pages)]

    def release(self, pages: list[int]) -> None:
        """Give pages back; with poison their rows can no longer be read by mistake."""
        if self._poison is not None and pages:
            rows = self.rows_of(pages)
            for layer in self.layers:
                layer[rows] = self._poison
        self._free.extend(sorted(pages, reverse=True))

    def rows_of(self, pages: list[int]) -> Tensor:
        """Rows int64 [n_pages * n_kv_heads], page-major."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.n_kv_heads
        return (first + torch.arange(self.n_kv_heads)).flatten()

    def read(self, layer: int, pages: list[int]) -> Tensor:
        """Copy of whole pages, [n_pages, kv_head, 2, block, head_dim], on the host."""
        data = self.layers[layer]
        return data[self.rows_of(pages)].view(len(pages), self.n_kv_heads, *data.shape[1:])

    def write(self, layer: int, pages: list[int], blocks: Tensor) -> None:
        """Store ``blocks`` [n_pages, kv_head, 2, block, head_dim] from any device."""
        if pages:
            self.layers[layer][self.rows_of(pages)] = blocks.flatten(0, 1).to("cpu")

    def _grow(self, n_missing: int) -> None:
        total = max(self._n_pages + n_missing, 2 * self._n_pages)
        if self.limit_pages is not None:
            if self._n_pages + n_missing > self.limit_pages:
                raise CapacityError(
                    f"host KV pool is full: {self._n_pages + n_missing} blocks of {self.page_bytes} bytes exceed "
                    f"host_memory_bytes={self._limit_bytes}; raise it"
                )
            total = min(total, self.limit_pages)
        for index, layer in enumerate(self.layers):
            fresh = grown(layer, (total * self.n_kv_heads, *layer.shape[1:]), self._poison)
            self.layers[index] = fresh.pin_memory() if self._pin else fresh
        self._free = list(range(total - 1, self._n_pages - 1, -1)) + self._free
        self._n_pages = total
