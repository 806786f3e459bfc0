"""Bytes that a situation keeps on the device and on the host, and which of them do not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.cost_model import KEY_MEAN_BYTES
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.sparse_config import SparseConfig

_BETA_BYTES = 4  # betas and their window means are fp32 whatever the model's dtype


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by use; all but the weights grow with the batch."""

    weight_bytes: int
    slot_bytes: int
    key_mean_bytes: int
    beta_bytes: int
    host_pool_bytes: int
    batch: int

    @property
    def gpu_bytes(self) -> int:
        return self.weight_bytes + self.slot_bytes + self.key_mean_bytes + self.beta_bytes

    def to_dict(self) -> dict[str, int]:
        return {
            "weight_bytes": self.weight_bytes,
            "slot_bytes": self.slot_bytes,
            "key_mean_bytes": self.key_mean_bytes,
            "beta_bytes": self.beta_bytes,
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
) -> MemoryUse:
    """Bytes of ``batch`` sequences of ``context_tokens`` each. Dense attention keeps every block on the device."""
    heads = shape.n_layers * shape.n_kv_heads * batch
    n_blocks, n_windows = sparse.n_blocks(context_tokens), sparse.n_windows(context_tokens)
    variant = get_method(method)
    if variant.dense:
        return MemoryUse(shape.weight_bytes, heads * n_blocks * device_block_bytes, 0, 0, 0, batch)
    beta_entries = n_windows + slots * sparse.block_size if variant.uses_beta else 0
    return MemoryUse(
        weight_bytes=shape.weight_bytes,
        slot_bytes=heads * slots * device_block_bytes,
        key_mean_bytes=heads * n_windows * shape.head_dim * KEY_MEAN_BYTES,
        beta_bytes=heads * beta_entries * _BETA_BYTES,
        host_pool_bytes=heads * n_blocks * host_block_bytes,
        batch=batch,
    )
