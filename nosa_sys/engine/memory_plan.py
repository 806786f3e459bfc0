"""What an engine's memory will take, from the shapes alone: asked before any weight is loaded."""

from __future__ import annotations

import torch

from nosa_sys.engine.pinned import refuse_unless_free
from nosa_sys.engine.tensors import free_bytes
from nosa_sys.key_means import key_mean_item_bytes
from nosa_sys.methods import Method
from nosa_sys.model_shape import DTYPE_BYTES, ModelShape
from nosa_sys.sparse_config import SparseConfig

_INT32, _INT64 = 4, 8


def n_pages(cfg: SparseConfig, n_tokens: int, *, offload: bool) -> int:
    """Pages of a context: its finished blocks in a host pool, all of its blocks on the device."""
    return n_tokens // cfg.block_size if offload else cfg.n_blocks(n_tokens)


def required_bytes(
    shape: ModelShape,
    cfg: SparseConfig,
    method: Method,
    *,
    n_slots: int,
    offload: bool,
    lanes: int,
    tokens_a_lane: int,
    key_means_dtype: str = "float32",
    keep_context: bool | None = None,
) -> dict[str, int]:
    """Bytes over all layers for ``lanes`` sequences of ``tokens_a_lane`` stored tokens each, as ``Memory`` takes them
    when it is given exactly that (``Memory.preallocate``).

    ``device_slot_bytes``: K and V of the slots; ``device_map_bytes``: betas, block map and last uses beside them, and
    the page table; ``device_context_bytes``: key means, beta means, betas by token and the ring of last keys
    (a dense method keeps none of them, but to record scores: ``keep_context``);
    ``device_pool_bytes`` and ``host_pool_bytes``: pages, with their betas where attention reads them on the device.
    """
    accumulated = 8 if shape.dtype == "float64" else 4  # bytes of a beta or a mean of them
    lane_heads = shape.n_layers * lanes * shape.n_kv_heads
    block, dim = cfg.block_size, shape.head_dim
    blocks, windows = cfg.n_blocks(tokens_a_lane), cfg.n_windows(tokens_a_lane)
    run_bytes = shape.kv_block_bytes(block)
    pages = lane_heads * n_pages(cfg, tokens_a_lane, offload=offload)
    page_betas = 0 if offload or not method.uses_beta else block * accumulated
    slots = lane_heads * n_slots if offload else 0
    slot_maps = slots * (block * accumulated + _INT32 + _INT64) + (lane_heads * _INT64 if offload else 0)
    kept = not method.dense if keep_context is None else keep_context
    means = windows * (dim * key_mean_item_bytes(key_means_dtype, shape.dtype) + accumulated)
    ring = cfg.kernel_size * dim * DTYPE_BYTES[shape.dtype]
    return {
        "device_slot_bytes": slots * run_bytes,
        "device_map_bytes": slot_maps + lanes * blocks * _INT64,
        "device_context_bytes": lane_heads * (means + blocks * block * accumulated + ring) if kept else 0,
        "device_pool_bytes": 0 if offload else pages * (run_bytes + page_betas),
        "host_pool_bytes": pages * run_bytes if offload else 0,
    }


def device_bytes(required: dict[str, int]) -> int:
    """Sum of what lies on the device."""
    return sum(value for name, value in required.items() if name.startswith("device_"))


def refuse_unless_fits(required: dict[str, int], weight_bytes: int, device: torch.device, what: str) -> None:
    """CapacityError where weights and ``required`` exceed what is free, on the device or in host memory. ``what`` says
    whose KV it is. On a CPU both are host memory."""
    on_device, on_host = weight_bytes + device_bytes(required), required["host_pool_bytes"]
    remedy = "take fewer or shorter sequences (--max-prompt-tokens, --context, --batch), or fewer slots"
    if device.type != "cuda":
        on_host, on_device = on_host + on_device, 0
    refuse_unless_free(on_host, free_bytes(torch.device("cpu")), f"host memory for {what}", remedy)
    if on_device:
        refuse_unless_free(on_device, free_bytes(device), f"device memory for weights and {what}", remedy)


def prefill_buffer_bytes(shape: ModelShape, n_tokens: int) -> int:
    """Device bytes that hold one prompt's K and V of all layers while it is prefilled on a GPU."""
    return shape.n_layers * 2 * n_tokens * shape.n_kv_heads * shape.head_dim * DTYPE_BYTES[shape.dtype]
