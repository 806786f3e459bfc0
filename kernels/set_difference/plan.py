"""A whole step's slot bookkeeping in one launch, in place: what a captured decode step runs instead of the reference.

Beside the slot update it leaves out the block that is born at the step, appends all loads to one list on the device
(what ``block_fetch`` reads), copies the betas of loaded blocks beside their slots and notes the last use of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.set_difference.triton import launch_update


@dataclass(frozen=True)
class LoadList:
    """The loads of all rows side by side, in any order of rows: host_rows and slot_rows int64 [capacity], count
    int32 [1]. Loads are appended at ``count``, which the caller sets to 0 once a step (one fill for all layers)."""

    host_rows: Tensor
    slot_rows: Tensor
    count: Tensor


@dataclass(frozen=True)
class SlotPlan:
    """What attention and the recorder need of one step: slots int32 and slot_rows int64 [row, k] of every wanted
    block (-1 padding), n_loads int32 [row], current_rows int64 [row]: where each row's current block is (-1:
    there is none, or it is not wanted)."""

    wanted_slots: Tensor
    slot_rows: Tensor
    n_loads: Tensor
    current_rows: Tensor


def plan_slots(
    slot_blocks: Tensor,
    wanted: Tensor,
    eviction_rank: Tensor,
    keep_unwanted: bool,
    loads: LoadList,
    *,
    row_heads: Tensor | None = None,
    current_blocks: Tensor | None = None,
    page_table: Tensor | None = None,
    n_kv_heads: int = 1,
    host_row_base: Tensor | None = None,
    use_step: Tensor | None = None,
    token_betas: Tensor | None = None,
    slot_betas: Tensor | None = None,
    num_warps: int = 8,
    tile_elements: int = 16384,
) -> SlotPlan:
    """A whole step's slot bookkeeping in one launch, in place; a graph can hold it.

    slot_blocks int32 [lane_head, slot] is updated; wanted int32 [row, k]; row_heads int64 [row] gives each row's
    lane_head = lane * n_kv_heads + head (None: the row itself), -1 marks a row of padding that changes nothing.
    current_blocks [row] gets its slot but no load. Every other miss is appended to ``loads``: slot_row = lane_head *
    slots + slot, host_row = page_table[lane, block] * n_kv_heads + head (page_table [lane, block]), or
    host_row_base[row] + block (int64 [row]). eviction_rank [lane_head, >= slot] as in ``update_slots``; with use_step
    [1] the slots of the wanted blocks get that rank (last use). With token_betas [lane_head, block, token] and
    slot_betas [slot_row, token] the betas of loaded blocks are copied beside their slots.

    Raises CapacityError when slots < k or the list could overflow, ConfigError when the host rows or the ranks that
    ``use_step`` touches are not given.
    """
    n_rows, k = wanted.shape
    if loads.host_rows.numel() < n_rows * k:
        raise CapacityError(f"a list of {loads.host_rows.numel()} cannot hold {n_rows} x {k} loads; enlarge it")
    if (page_table is None) == (host_row_base is None):
        raise ConfigError("give either page_table or host_row_base: one of them says where a block lies on the host")
    if use_step is not None and not keep_unwanted:
        raise ConfigError("use_step ranks slots that keep_unwanted=False would empty at once; leave it out")
    plan = SlotPlan(
        torch.empty_like(wanted),
        wanted.new_empty((n_rows, k), dtype=torch.int64),
        wanted.new_empty(n_rows),
        wanted.new_empty(n_rows, dtype=torch.int64),
    )
    named: dict[str, Tensor | None] = {
        "updated_blocks": slot_blocks,
        "wanted_slots": plan.wanted_slots,
        "slot_rows": plan.slot_rows,
        "load_blocks": None,
        "load_slots": None,
        "n_loads": plan.n_loads,
        "current_rows": plan.current_rows,
    }
    given: dict[str, Any] = {
        "row_heads": row_heads,
        "current_blocks": current_blocks,
        "list_host_rows": loads.host_rows,
        "list_slot_rows": loads.slot_rows,
        "list_count": loads.count,
        "page_table": page_table,
        "host_row_base": host_row_base,
        "use_step": use_step,
        "token_betas": token_betas,
        "slot_betas": slot_betas,
    }
    launch_update(slot_blocks, wanted, eviction_rank, keep_unwanted, named, given, n_kv_heads, num_warps, tile_elements)
    return plan
