"""Equal GPU bytes: what a method keeps on the GPU for one sequence, and the batch that fits into another's bytes.

FullAttn keeps all KV of a context. A method that keeps R resident tokens of a context of L runs B = E * L / R sequences
in the KV bytes of E FullAttn sequences: the paper's rule, which counts KV of k blocks alone. Here slots beyond k,
compressed keys and betas are paid for out of the same bytes, and both batches are given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nosa_sys.key_means import key_mean_item_bytes
from nosa_sys.methods import Method, get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig

_FP32 = 4  # betas and their means are fp32 whatever the model's dtype


@dataclass(frozen=True)
class KeptBytes:
    """GPU bytes of one sequence, over all layers and KV heads. ``kv_bytes``: its slots, or all its pages;
    ``budget_kv_bytes``: k blocks of it (all of them for dense attention), what the paper's rule counts."""

    kv_bytes: int
    budget_kv_bytes: int
    key_mean_bytes: int
    beta_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.key_mean_bytes + self.beta_bytes


def kept_bytes(
    shape: ModelShape,
    sparse: SparseConfig,
    method: str | Method,
    *,
    slots: int,
    context: int,
    offload: bool,
    key_means_dtype: str = "float32",
) -> KeptBytes:
    """What ``method`` keeps on the GPU for one sequence of ``context`` tokens.

    Without offload, and for dense attention always, that is every block. Compressed keys are kept by methods with a
    query-aware pick, betas (of tokens, of windows and beside each slot) by those that use them.
    """
    method = get_method(method) if isinstance(method, str) else method
    heads = shape.n_layers * shape.n_kv_heads
    n_blocks, n_windows = sparse.n_blocks(context), sparse.n_windows(context)
    block_bytes = heads * shape.kv_block_bytes(sparse.block_size)
    if method.dense:
        return KeptBytes(n_blocks * block_bytes, n_blocks * block_bytes, 0, 0)
    kept_blocks = slots if offload else n_blocks
    item_bytes = key_mean_item_bytes(key_means_dtype, shape.dtype)
    ranks_query = method.query_aware_picks(sparse, sparse.n_forced) > 0
    beta_entries = n_windows + (n_blocks + kept_blocks) * sparse.block_size if method.uses_beta else 0
    return KeptBytes(
        kv_bytes=kept_blocks * block_bytes,
        budget_kv_bytes=min(sparse.topk, n_blocks) * block_bytes if offload else n_blocks * block_bytes,
        key_mean_bytes=heads * n_windows * shape.head_dim * item_bytes if ranks_query else 0,
        beta_bytes=heads * beta_entries * _FP32,
    )


def full_kv_bytes(shape: ModelShape, sparse: SparseConfig, context: int) -> int:
    """KV bytes of one FullAttn sequence."""
    return kept_bytes(shape, sparse, "full", slots=0, context=context, offload=False).kv_bytes


def equivalent_batch(batch: int, kept: KeptBytes, full_bytes: int) -> float:
    """E: the FullAttn batch whose KV bytes equal those that ``batch`` sequences keep, everything paid for."""
    return batch * kept.total_bytes / full_bytes


def equal_batch(full_batch: int, kept: KeptBytes, full_bytes: int) -> int:
    """B: how many sequences fit into the KV bytes of ``full_batch`` FullAttn ones, everything paid for (floor)."""
    return full_batch * full_bytes // kept.total_bytes


def paper_batch(full_batch: int, kept: KeptBytes, full_bytes: int) -> int:
    """B by the paper's rule: KV of k blocks is all that counts (16K, k of 4096 tokens: 16 gives 64)."""
    return full_batch * full_bytes // kept.budget_kv_bytes


def equal_bytes_row(
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    *,
    batch: int,
    slots: int,
    context: int,
    offload: bool,
    key_means_dtype: str = "float32",
) -> dict[str, Any]:
    """The figures of one situation as flat columns."""
    kept = kept_bytes(
        shape, sparse, method, slots=slots, context=context, offload=offload, key_means_dtype=key_means_dtype
    )
    full = full_kv_bytes(shape, sparse, context)
    return {
        **{f"sequence_{name}": value for name, value in dataclasses.asdict(kept).items()},
        "sequence_gpu_bytes": kept.total_bytes,
        "sequence_full_kv_bytes": full,
        "equivalent_batch": equivalent_batch(batch, kept, full),
        "equivalent_batch_paper_rule": batch * kept.budget_kv_bytes / full,
    }


def largest_batch(
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    *,
    slots: int,
    context: int,
    offload: bool,
    gpu_bytes: float,
    host_bytes: float,
    key_means_dtype: str = "float32",
) -> tuple[int, str]:
    """(batch, the memory that limits it) that fits into ``gpu_bytes`` beside the weights and ``host_bytes``."""
    kept = kept_bytes(
        shape, sparse, method, slots=slots, context=context, offload=offload, key_means_dtype=key_means_dtype
    )
    limits = {"GPU memory": int(gpu_bytes // kept.total_bytes)}
    if offload and not get_method(method).dense:
        limits["host memory"] = int(host_bytes // full_kv_bytes(shape, sparse, context))
    name = min(limits, key=limits.__getitem__)
    return limits[name], name
