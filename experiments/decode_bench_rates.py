"""What a decode step must read, and the rates of this machine that it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nosa_sys.key_means import key_mean_item_bytes
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig

_FP32 = 4


def step_bytes(
    shape: ModelShape, sparse: SparseConfig, method: str, contexts: Sequence[int], key_means_dtype: str = "float32"
) -> int:
    """Device bytes that one step has to read at least: matrices once, attended KV, compressed keys and their betas.

    The embedding counts as the output matrix (once when tied): a step gathers only a row a sequence from it.
    """
    variant = get_method(method)
    heads = shape.n_layers * shape.n_kv_heads
    weights = (shape.n_layers * shape.layer_params + shape.vocab_size * shape.hidden_size) * shape.dtype_bytes
    blocks = [sparse.n_blocks(c) for c in contexts]
    attended = sum(blocks) if variant.dense else sum(min(sparse.topk, n) for n in blocks)
    means = 0
    if not variant.dense:
        a = variant.query_aware_picks(sparse, sparse.n_forced)
        mean_bytes = shape.head_dim * key_mean_item_bytes(key_means_dtype, shape.dtype) if a else 0
        mean_bytes += _FP32 if variant.uses_beta else 0
        means = sum(sparse.n_windows(c) for c in contexts) * mean_bytes
    return weights + heads * (attended * shape.kv_block_bytes(sparse.block_size) + means)


@dataclass(frozen=True)
class Rates:
    """Ceilings measured in this process, GB/s: device copies (bytes read plus written) and the SMs' reads of pinned
    memory. None where there is no GPU."""

    device_copy_gbps: float | None = None
    link_gbps: float | None = None

    @classmethod
    def measure(cls, device: torch.device) -> Rates:
        """Measure now, some seconds on a GPU; nothing on a CPU."""
        if device.type != "cuda":
            return cls()
        from nosa_sys.kernels.bench import ceilings

        found = ceilings()
        return cls(found["device_copy_gbps"], found["sm_read_gbps"])

    def utilisation(self, step_s: float, h2d_bytes: float, needed_bytes: float) -> dict[str, float | None]:
        """Shares of both ceilings over a step, and the time that the needed bytes alone take at the copy rate."""
        link_gbps = h2d_bytes / step_s / 1e9
        floor_ms = needed_bytes / self.device_copy_gbps / 1e6 if self.device_copy_gbps else None
        return {
            "link_gbps": link_gbps,
            "link_utilisation": link_gbps / self.link_gbps if self.link_gbps else None,
            "needed_bytes_per_step": needed_bytes,
            "hbm_utilisation": floor_ms / (step_s * 1e3) if floor_ms else None,
            "floor_ms": floor_ms,
            "step_over_floor": step_s * 1e3 / floor_ms if floor_ms else None,
        }
