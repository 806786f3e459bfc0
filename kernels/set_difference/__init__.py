"""Set difference and slot assignment: the Triton kernel on CUDA tensors, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.set_difference import reference
from nosa_sys.kernels.set_difference.reference import SlotUpdate


def update_slots(slot_blocks: Tensor, wanted: Tensor, eviction_rank: Tensor, keep_unwanted: bool) -> SlotUpdate:
    """As ``reference.update_slots``; on CUDA the slots must hold k blocks whatever the lists say, since nothing is
    read back."""
    if use_triton(slot_blocks, wanted, eviction_rank):
        from nosa_sys.kernels.set_difference.triton import update_slots as fast

        return fast(slot_blocks, wanted, eviction_rank, keep_unwanted)
    return reference.update_slots(slot_blocks, wanted, eviction_rank, keep_unwanted)
