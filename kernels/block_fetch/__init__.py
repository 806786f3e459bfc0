"""Fetch and write-back of whole KV blocks: the Triton or bulk-copy kernel where the device side is CUDA, else the
reference."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.block_fetch import reference
from nosa_sys.kernels.block_fetch.reference import Part

CopyPath = Literal["uva", "bulk"]
"""Who copies: CTAs that read and write the host pool (uva), or the bulk copy engine, whole blocks only."""


def fetch_blocks(
    host: Tensor,
    slots: Tensor,
    host_rows: Tensor,
    slot_rows: Tensor,
    count: Tensor | None = None,
    *,
    part: Part = "kv",
    path: CopyPath = "uva",
    n_ctas: int | None = None,
) -> None:
    """slots[slot_rows[i]] = host[host_rows[i]] for i < count (int32 [1] on the slots' device; None: the whole list).

    As ``reference.fetch_blocks``; on CUDA ``host`` must be pinned and both lists on the device, and a row outside its
    pool skips its pair. ``n_ctas`` is how many CTAs may copy (None: the path's default). ``path`` chooses the kernel on
    CUDA and means nothing to the reference. Raises ConfigError for an unknown path or part, or half a block by bulk
    copy; HardwareError for a bulk copy where it cannot be built.
    """
    _check_path(path, part)
    if slots.is_cuda:
        _copy(host, slots, host_rows, slot_rows, count, part, path, ("host", "slot"), n_ctas)
    else:
        reference.fetch_blocks(host, slots, _listed(host_rows, count), slot_rows, part)


def write_back(
    slots: Tensor,
    host: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
    count: Tensor | None = None,
    *,
    order: Tensor | None = None,
    path: CopyPath = "uva",
    n_ctas: int | None = None,
) -> None:
    """host[host_rows[i]] = slots[slot_rows[i]] for i < count, or for the first ``count`` entries i of ``order`` (path
    uva only, integer [n]); otherwise as ``fetch_blocks``."""
    _check_path(path, "kv")
    if order is not None and path != "uva":
        raise ConfigError(f"path={path!r} takes a list in its own order; leave order out or use path='uva'")
    if slots.is_cuda:
        _copy(slots, host, slot_rows, host_rows, count, "kv", path, ("slot", "host"), n_ctas, order)
        return
    if order is not None:
        slot_rows, host_rows = slot_rows[order.long()], host_rows[order.long()]
    reference.write_back(slots, host, _listed(slot_rows, count), host_rows)


def _check_path(path: str, part: str) -> None:
    if path not in get_args(CopyPath):
        raise ConfigError(f"path={path!r} is unknown; give one of {', '.join(get_args(CopyPath))}")
    if path == "bulk" and part != "kv":
        raise ConfigError(f"path='bulk' moves whole blocks, not part={part!r}; use path='uva' or part='kv'")


def _copy(
    source: Tensor,
    target: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    count: Tensor | None,
    part: Part,
    path: CopyPath,
    names: tuple[str, str],
    n_ctas: int | None,
    order: Tensor | None = None,
) -> None:
    if path == "bulk":
        from nosa_sys.kernels.block_fetch.bulk import DEFAULT_BULK_CTAS, bulk_copy_runs

        bulk_copy_runs(source, target, source_rows, target_rows, count, n_ctas=n_ctas or DEFAULT_BULK_CTAS)
    else:
        from nosa_sys.kernels.block_fetch.triton import DEFAULT_CTAS, copy_runs

        ctas = n_ctas or DEFAULT_CTAS
        copy_runs(source, target, source_rows, target_rows, count, order=order, part=part, names=names, n_ctas=ctas)


def _listed(rows: Tensor, count: Tensor | None) -> Tensor:
    """Rows past ``count`` become -1, which the reference skips."""
    if count is None:
        return rows
    return torch.where(torch.arange(rows.numel(), device=rows.device) < count, rows, -1)
