"""Bytes that a run will ask for: rows of its banner, a refusal where they are not free, and what it took in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nosa_sys.cli import console as out
from nosa_sys.cli.settings import Settings
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class MemoryNeed:
    """What ``batch`` sequences of ``tokens`` stored tokens ask for, under the names of memory_plan.required_bytes."""

    required: dict[str, int]
    weight_bytes: int
    batch: int
    tokens: int
    device: str

    def refuse_unless_fits(self) -> None:
        """CapacityError where it exceeds what is free; to be asked before any weight is loaded."""
        import torch

        from nosa_sys.engine.memory_plan import refuse_unless_fits

        device = torch.device(self.device if self.device.startswith("cuda") else "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            return  # loading the model says so
        what = f"KV of {self.batch} sequences of about {self.tokens:,} tokens"
        refuse_unless_fits(self.required, self.weight_bytes, device, what)


def note_memory(
    settings: Settings,
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    *,
    n_slots: int,
    offload: bool | None,
    batch: int,
    tokens: int,
    device: str,
    key_means_dtype: str = "float32",
    keep_context: bool | None = None,
) -> MemoryNeed:
    """Note bytes per block, of KV and context on the device, and of the host pool; ``shape`` has the run's dtype."""
    from nosa_sys.engine.memory_plan import required_bytes  # torch takes its time

    variant = get_method(method)
    offloads = not variant.dense if offload is None else offload
    required = required_bytes(
        shape, sparse, variant, n_slots=n_slots, offload=offloads, lanes=batch, tokens_a_lane=tokens,
        key_means_dtype=key_means_dtype, keep_context=keep_context,
    )  # fmt: skip
    device_kv = required["device_slot_bytes"] + required["device_map_bytes"] + required["device_pool_bytes"]
    place = "GPU" if device.startswith("cuda") else "device"
    for name, value in (
        ("block (K+V, one head)", shape.kv_block_bytes(sparse.block_size)),
        (f"{place} KV, asked", device_kv),
        (f"{place} context, asked", required["device_context_bytes"]),
        ("host pool, asked", required["host_pool_bytes"]),
    ):
        settings.note(name, in_bytes(value), "derived")
    return MemoryNeed(required, shape.weight_bytes, batch, tokens, device)


def in_bytes(value: int) -> str:
    """
    >>> in_bytes(2048)
    '2 KiB (2,048 bytes)'
    """
    return f"{out.size(value)} ({value:,} bytes)"


def allocated_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What an engine's summary says was allocated and page-locked."""
    return [
        (
            "device KV / context, allocated",
            f"{in_bytes(summary['device_slot_bytes'])} / {in_bytes(summary['device_context_bytes'])}",
        ),
        (
            "host pool, allocated / pinned",
            f"{in_bytes(summary['host_pool_bytes'])} / {in_bytes(summary['host_pinned_bytes'])}",
        ),
    ]
