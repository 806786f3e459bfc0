"""Copies of whole KV blocks between the host pool and the device slots (paper section 4).

A row of either pool is one block of one (layer, sequence, KV head), K and V adjacent: [2, block, head_dim].
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError

Part = Literal["kv", "k", "v"]
"""What of each block is moved: all of it, its keys or its values."""

_HALVES = {"kv": slice(0, 2), "k": slice(0, 1), "v": slice(1, 2)}


def check_part(part: str) -> None:
    """ConfigError unless ``part`` is one of kv, k, v."""
    if part not in get_args(Part):
        raise ConfigError(f"part={part!r} is unknown; give one of {', '.join(get_args(Part))}")


def fetch_blocks(host: Tensor, slots: Tensor, host_rows: Tensor, slot_rows: Tensor, part: Part = "kv") -> None:
    """Load blocks: slots[slot_rows[i]] = host[host_rows[i]], in place; with part k or v only that half of each.

    host [host_row, 2, block, head_dim]; slots [slot_row, 2, block, head_dim]; host_rows and slot_rows int64 [n].
    A pair with -1 on either side is skipped. Raises ConfigError when the pools differ in type or block shape or the
    part is unknown, CapacityError for a row outside its pool.
    """
    check_part(part)
    half = _HALVES[part]
    _copy_rows(host[:, half], host_rows, "host", slots[:, half], slot_rows, "slot")


def write_back(slots: Tensor, host: Tensor, slot_rows: Tensor, host_rows: Tensor) -> None:
    """Save blocks: host[host_rows[i]] = slots[slot_rows[i]], in place; shapes and errors as ``fetch_blocks``."""
    _copy_rows(slots, slot_rows, "slot", host, host_rows, "host")


@torch.no_grad()
def _copy_rows(
    source: Tensor, source_rows: Tensor, source_name: str, target: Tensor, target_rows: Tensor, target_name: str
) -> None:
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ConfigError(
            f"{source_name} blocks are {source.dtype} {tuple(source.shape[1:])}, {target_name} blocks "
            f"{target.dtype} {tuple(target.shape[1:])}; both pools must be of one type and block shape"
        )
    wanted = (source_rows != -1) & (target_rows.to(source_rows.device) != -1)
    source_rows, target_rows = source_rows[wanted], target_rows[wanted.to(target_rows.device)]
    if source_rows.numel() == 0:
        return
    _check_rows(source_rows, source.shape[0], source_name)
    _check_rows(target_rows, target.shape[0], target_name)
    blocks = source.index_select(0, source_rows.to(source.device)).to(target.device)
    target.index_copy_(0, target_rows.to(target.device), blocks)


def _check_rows(rows: Tensor, n_rows: int, name: str) -> None:
    low, high = torch.aminmax(rows)
    if low < 0 or high >= n_rows:
        bad = int(low) if low < 0 else int(high)
        raise CapacityError(
            f"{name} row {bad} is outside the pool of {n_rows} rows; allowed: 0..{n_rows - 1}, -1 skips"
        )
