"""Bytes that a situation keeps on the device and on the host, as the engine plans them, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nosa_sys.key_means import key_mean_item_bytes
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.sparse_config import SparseConfig

_SLOT_MAP_BYTES = 12  # a slot's block id (int32) and last use (int64)
_POINTER_BYTES = 8  # entries of page tables (int64)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by use; all but the weights grow in proportion with the batch.

    ``beta_bytes``: means of windows and betas of the slots; ``context_bytes``: betas by token and the ring of the last
    keys; ``map_bytes``: block maps and page tables. Sums of them are what ``engine.memory_plan`` asks for.
    """

    weight_bytes: int
    slot_bytes: int
    key_mean_bytes: int
    beta_bytes: int
    host_pool_bytes: int
    batch: int
    context_bytes: int = 0
    map_bytes: int = 0

    @property
    def gpu_bytes(self) -> int:
        cache = self.slot_bytes + self.key_mean_bytes + self.beta_bytes + self.context_bytes + self.map_bytes
        return self.weight_bytes + cache

    def batch_that_fits(self, hardware: HardwareProfile) -> int | None:
        """The largest batch of such sequences that both memories hold, 0 for none; None without a limit."""
        found = []
        for used, fixed, limit in (
            (self.gpu_bytes, self.weight_bytes, hardware.gpu_memory_bytes),
            (self.host_pool_bytes, 0, hardware.host_memory_bytes),
        ):
            if used > fixed and math.isfinite(limit):
                found.append(max(0, math.floor((limit - fixed) * self.batch / (used - fixed))))
        return min(found, default=None)

    def to_dict(self) -> dict[str, int]:
        return {
            "weight_bytes": self.weight_bytes,
            "slot_bytes": self.slot_bytes,
            "key_mean_bytes": self.key_mean_bytes,
            "beta_bytes": self.beta_bytes,
            "context_bytes": self.context_bytes,
            "map_bytes": self.map_bytes,
            "gpu_bytes": self.gpu_bytes,
            "host_pool_bytes": self.host_pool_bytes,
        }

    def limits(self, hardware: HardwareProfile) -> list[str]:
        """One sentence for each memory that the situation exceeds, with the batch that would fit."""
        found = []
        for where, used, fixed, limit in (
            ("device", self.gpu_bytes, self.weight_bytes, hardware.gpu_memory_bytes),
            ("host", self.host_pool_bytes, 0, hardware.host_memory_bytes),
        ):
            if used <= limit:
                continue
            per_sequence = (used - fixed) / self.batch
            fits = max(0, math.floor((limit - fixed) / per_sequence)) if per_sequence else 0
            remedy = f"a batch of {fits} fits" if fits else "not even one sequence fits"
            found.append(
                f"exceeds {where} memory: {used / 2**30:.1f} GiB at batch {self.batch}, {hardware.name} has "
                f"{limit / 2**30:.1f} GiB; {remedy}"
            )
        return found


def memory_use(
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    *,
    slots: int,
    batch: int,
    context_tokens: int,
    host_block_bytes: int,
    device_block_bytes: int,
    key_means_dtype: str = "float32",
) -> MemoryUse:
    """Bytes of ``batch`` sequences of ``context_tokens`` each. Dense attention keeps every block on the device.

    The host holds finished blocks alone: a sequence's last, partial block is on the device. ``key_means_dtype``: see
    key_means.py.
    """
    heads = shape.n_layers * shape.n_kv_heads * batch
    n_blocks, n_windows = sparse.n_blocks(context_tokens), sparse.n_windows(context_tokens)
    page_table = batch * n_blocks * _POINTER_BYTES
    if get_method(method).dense:
        slot_bytes = heads * n_blocks * device_block_bytes
        return MemoryUse(shape.weight_bytes, slot_bytes, 0, 0, 0, batch, map_bytes=page_table)
    beta = 8 if shape.dtype == "float64" else 4  # betas and their means are fp32 for every narrower model
    ring = sparse.kernel_size * shape.head_dim * shape.dtype_bytes
    return MemoryUse(
        weight_bytes=shape.weight_bytes,
        slot_bytes=heads * slots * device_block_bytes,
        key_mean_bytes=heads * n_windows * shape.head_dim * key_mean_item_bytes(key_means_dtype, shape.dtype),
        beta_bytes=heads * (n_windows + slots * sparse.block_size) * beta,
        host_pool_bytes=heads * (context_tokens // sparse.block_size) * host_block_bytes,
        batch=batch,
        context_bytes=heads * (n_blocks * sparse.block_size * beta + ring),
        map_bytes=heads * (slots * _SLOT_MAP_BYTES + _POINTER_BYTES) + page_table,
    )
