"""Device tier: block slots of every (layer, lane, KV head), the block map, and the betas beside each slot.

A lane is a sequence's place in the batch. Slot s of head h in lane b is row (b * n_kv_heads + h) * n_slots + s of
the layer's tensor; decode attention reads these rows and nothing else. Freed slots are poisoned when asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.tensors import doubled, grown, n_bytes
from nosa_sys.model_shape import ModelShape

EMPTY = -1


class SlotCache:
    """Slots of all layers. ``kv[l]`` [n_rows, 2, block, head_dim], ``betas[l]`` [n_rows, block] (fp32 or fp64),
    ``blocks[l]`` int32 [lane, kv_head, slot] (block id or -1), ``last_use[l]`` int64 [lane, kv_head, slot + 1]:
    the step of a slot's last selection, its last column takes the writes of padding. ``generation`` counts growths.
    """

    def __init__(
        self,
        shape: ModelShape,
        block_size: int,
        n_slots: int,
        dtype: torch.dtype,
        beta_dtype: torch.dtype,
        device: torch.device,
        poison: float | None = None,
    ) -> None:
        self.n_slots = n_slots
        self.n_lanes = self.generation = 0
        self.n_kv_heads, self._poison = shape.n_kv_heads, poison
        layers = range(shape.n_layers)
        kv_shape = (0, 2, block_size, shape.head_dim)
        map_shape = (0, shape.n_kv_heads, n_slots)
        self.kv = [torch.empty(kv_shape, dtype=dtype, device=device) for _ in layers]
        self.betas = [torch.empty((0, block_size), dtype=beta_dtype, device=device) for _ in layers]
        self.blocks = [torch.empty(map_shape, dtype=torch.int32, device=device) for _ in layers]
        self.last_use = [
            torch.empty((0, shape.n_kv_heads, n_slots + 1), dtype=torch.int64, device=device) for _ in layers
        ]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of K and V slots over all layers."""
        return n_bytes(*self.kv)

    @property
    def map_bytes(self) -> int:
        """Bytes of what lies beside the slots: betas, block map and last uses."""
        return n_bytes(*self.betas, *self.blocks, *self.last_use)

    def ensure_lanes(self, n_lanes: int, *, exact: bool = False) -> None:
        """Room for lanes 0 .. n_lanes - 1; old lanes keep their contents. Doubles where it grows, unless ``exact``."""
        total = doubled(self.n_lanes, n_lanes, exact=exact)
        if total == self.n_lanes:
            return
        self.generation += 1
        rows = total * self.n_kv_heads * self.n_slots
        for index, layer in enumerate(self.kv):
            self.kv[index] = grown(layer, (rows, *layer.shape[1:]), self._poison)
            self.betas[index] = grown(self.betas[index], (rows, layer.shape[2]), self._poison)
            old_map, old_use = self.blocks[index], self.last_use[index]
            self.blocks[index] = grown(old_map, (total, *old_map.shape[1:]), EMPTY)
            self.last_use[index] = grown(old_use, (total, *old_use.shape[1:]), EMPTY)
        self.n_lanes = total

    def lane_rows(self, lane: int) -> Tensor:
        """Rows int64 [kv_head, slot] of one lane."""
        first = lane * self.n_kv_heads * self.n_slots
        rows = torch.arange(first, first + self.n_kv_heads * self.n_slots, device=self.blocks[0].device)
        return rows.view(self.n_kv_heads, self.n_slots)

    def clear_lane(self, lane: int) -> None:
        """Forget every resident block of a lane, as a sequence joins or leaves."""
        first = lane * self.n_kv_heads * self.n_slots
        rows = slice(first, first + self.n_kv_heads * self.n_slots)
        for index in range(len(self.kv)):
            self.blocks[index][lane] = EMPTY
            self.last_use[index][lane] = EMPTY
            if self._poison is not None:
                self.kv[index][rows] = self._poison
                self.betas[index][rows] = self._poison

    def find(self, layer: int, lane: int, block: int) -> Tensor:
        """Row int64 [kv_head] that holds ``block`` in each head (0-based rows of the layer); it must be resident."""
        slot = (self.blocks[layer][lane] == block).int().argmax(dim=-1)
        return self.lane_rows(lane).gather(-1, slot[:, None])[:, 0]

    def place(self, layer: int, lane: int, slot: int, block: int, kv: Tensor, betas: Tensor) -> None:
        """Put rows of one block into ``slot`` of every head: kv [kv_head, 2, rows, D], betas [kv_head, rows]."""
        rows = self.lane_rows(lane)[:, slot]
        n_rows = kv.shape[2]
        self.kv[layer][rows, :, :n_rows] = kv
        self.betas[layer][rows, :n_rows] = betas
        self.blocks[layer][lane, :, slot] = block

    def poison_rows(self, layer: int, rows: Tensor) -> None:
        """Overwrite freed rows int64 [n]; nothing happens without poison."""
        if self._poison is not None and rows.numel():
            self.kv[layer][rows] = self._poison
            self.betas[layer][rows] = self._poison

    @property
    def poisons(self) -> bool:
        return self._poison is not None
