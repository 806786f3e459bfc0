"""Fetch and write-back of whole KV blocks: the Triton kernels where the device side is CUDA, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.kernels.block_fetch import reference


def fetch_blocks(
    host: Tensor,
    slots: Tensor,
    host_rows: Tensor,
    slot_rows: Tensor,
    count: Tensor | None = None,
    *,
    n_ctas: int | None = None,
) -> None:
    """slots[slot_rows[i]] = host[host_rows[i]] for i < count (int32 [1] on the slots' device; None: the whole list).

    As ``reference.fetch_blocks``; on CUDA ``host`` must be pinned and both lists on the device, and a row outside its
    pool skips its pair. ``n_ctas`` is how many CTAs may copy (None: the kernel's default).
    """
    if slots.is_cuda:
        from nosa_sys.kernels.block_fetch.triton import DEFAULT_CTAS, copy_runs

        copy_runs(host, slots, host_rows, slot_rows, count, names=("host", "slot"), n_ctas=n_ctas or DEFAULT_CTAS)
    else:
        reference.fetch_blocks(host, slots, _listed(host_rows, count), slot_rows)


def write_back(
    slots: Tensor,
    host: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
    count: Tensor | None = None,
    *,
    n_ctas: int | None = None,
) -> None:
    """host[host_rows[i]] = slots[slot_rows[i]] for i < count; otherwise as ``fetch_blocks``."""
    if slots.is_cuda:
        from nosa_sys.kernels.block_fetch.triton import DEFAULT_CTAS, copy_runs

        copy_runs(slots, host, slot_rows, host_rows, count, names=("slot", "host"), n_ctas=n_ctas or DEFAULT_CTAS)
    else:
        reference.write_back(slots, host, _listed(slot_rows, count), host_rows)


def _listed(rows: Tensor, count: Tensor | None) -> Tensor:
    """Rows past ``count`` become -1, which the reference skips."""
    if count is None:
        return rows
    return torch.where(torch.arange(rows.numel(), device=rows.device) < count, rows, -1)
