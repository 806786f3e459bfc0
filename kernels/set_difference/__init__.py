"""Set difference, slot assignment and a whole step's plan: the Triton kernel on CUDA tensors, else the reference."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.set_difference import plan_reference, reference
from nosa_sys.kernels.set_difference.plan_reference import LoadList, SlotPlan, TokenRows, Touch
from nosa_sys.kernels.set_difference.reference import SlotUpdate


def update_slots(slot_blocks: Tensor, wanted: Tensor, eviction_rank: Tensor, keep_unwanted: bool) -> SlotUpdate:
    """As ``reference.update_slots``; on CUDA the slots must hold k blocks whatever the lists say, since nothing is
    read back."""
    if use_triton(slot_blocks, wanted, eviction_rank):
        from nosa_sys.kernels.set_difference.triton import update_slots as fast

        return fast(slot_blocks, wanted, eviction_rank, keep_unwanted)
    return reference.update_slots(slot_blocks, wanted, eviction_rank, keep_unwanted)


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
) -> SlotPlan:
    """As ``plan_reference.plan_slots``; on CUDA one launch that a graph can hold."""
    run: Callable[..., SlotPlan] = plan_reference.plan_slots
    if use_triton(slot_blocks, wanted, eviction_rank):
        from nosa_sys.kernels.set_difference import plan

        run = plan.plan_slots
    return run(
        slot_blocks,
        wanted,
        eviction_rank,
        keep_unwanted,
        loads,
        row_heads=row_heads,
        current_blocks=current_blocks,
        page_table=page_table,
        n_kv_heads=n_kv_heads,
        host_row_base=host_row_base,
        use_step=use_step,
        touch=touch,
        token_betas=token_betas,
        slot_betas=slot_betas,
        split=split,
        count_wasted=count_wasted,
        token=token,
    )
