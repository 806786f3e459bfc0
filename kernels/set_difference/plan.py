"""A whole step's slot bookkeeping in one launch, in place: what a captured decode step runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.set_difference.plan_reference import LoadList, SlotPlan, TokenRows, Touch, check_plan
from nosa_sys.kernels.set_difference.triton import launch_update


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
    touch: Touch = "wanted",
    token_betas: Tensor | None = None,
    slot_betas: Tensor | None = None,
    split: int | None = None,
    count_wasted: bool = False,
    token: TokenRows | None = None,
    num_warps: int = 8,
    tile_elements: int = 16384,
) -> SlotPlan:
    """As ``plan_reference.plan_slots`` in one launch that reads nothing back; the loads come in any order."""
    check_plan(
        slot_blocks,
        wanted,
        eviction_rank,
        keep_unwanted,
        loads,
        page_table=page_table,
        host_row_base=host_row_base,
        use_step=use_step,
        touch=touch,
        split=split,
        count_wasted=count_wasted,
        token=token,
        n_kv_heads=n_kv_heads,
    )
    n_rows, k = wanted.shape

    def rows_of(width: int) -> Tensor:
        return wanted.new_empty((n_rows, width), dtype=torch.int64)

    plan = SlotPlan(
        torch.empty_like(wanted),
        rows_of(k),
        wanted.new_empty(n_rows),
        wanted.new_empty(n_rows, dtype=torch.int64),
        None if split is None else rows_of(k),
        None if split is None else rows_of(split),
        None if split is None else wanted.new_empty((n_rows, split)),
        wanted.new_empty(n_rows) if count_wasted else None,
    )
    outputs: dict[str, Tensor | None] = vars(plan) | {
        "updated_blocks": slot_blocks,
        "load_blocks": None,
        "load_slots": None,
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
    launch_update(
        slot_blocks,
        wanted,
        eviction_rank,
        keep_unwanted,
        outputs,
        given,
        n_kv_heads,
        num_warps,
        tile_elements,
        touch_loads=touch == "loads",
        token=token,
    )
    return plan
