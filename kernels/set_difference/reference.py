"""Set difference between the resident blocks and the wanted ones: which to load, and into which slots.

Paper section 4 (the NOSI engine): only the blocks that the last step did not have cross the link.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError


class SlotUpdate(NamedTuple):
    """What one step changes, all int32; a row is one (sequence, KV head).

    slot_blocks [row, slot]: the block in each slot after the step, -1 empty; wanted_slots [row, k]: the slot of each
    wanted block, -1 for padding; load_blocks and load_slots [row, k]: the loads in ascending block id, -1 padded at
    the end; n_loads [row].
    """

    slot_blocks: Tensor
    wanted_slots: Tensor
    load_blocks: Tensor
    load_slots: Tensor
    n_loads: Tensor


@torch.no_grad()
def update_slots(slot_blocks: Tensor, wanted: Tensor, eviction_rank: Tensor, keep_unwanted: bool) -> SlotUpdate:
    """Place the wanted blocks.

    slot_blocks int32 [row, slot] (-1 empty); wanted int32 [row, k], any order, duplicates count once, -1 is padding:
    neither loaded nor ever a hit. eviction_rank [row, slot]: among the unwanted residents the lowest leaves first,
    ties to the lower slot. A resident that is wanted keeps its slot. Loads take empty slots first in ascending order,
    then victims; the r-th load in ascending block id goes to the r-th of these. With keep_unwanted false every
    unwanted resident is dropped at once and its slot counts as empty. Raises CapacityError when the distinct wanted
    blocks of a row exceed the slots.
    """
    n_slots, n_wanted = slot_blocks.shape[1], wanted.shape[1]
    matches = (wanted.unsqueeze(2) == slot_blocks.unsqueeze(1)) & (wanted >= 0).unsqueeze(2)
    kept = matches.any(1)

    nothing = torch.iinfo(wanted.dtype).max
    missing = torch.where(matches.any(2) | (wanted < 0), nothing, wanted).sort(-1).values
    distinct = missing < nothing
    distinct[:, 1:] &= missing[:, 1:] != missing[:, :-1]
    n_loads = distinct.sum(-1, keepdim=True)
    _check_capacity(n_loads.squeeze(1), kept, n_slots)
    # Distinct misses move to the front; duplicates and hits to one spare column that is cut off.
    target = torch.where(distinct, distinct.cumsum(-1) - 1, n_wanted)
    load_blocks = _padded(wanted, n_wanted + 1).scatter_(-1, target, missing)[:, :n_wanted]

    resident = slot_blocks >= 0
    if keep_unwanted:
        # Two stable sorts: by rank (empty slots all alike, so by slot), then empty before unwanted before kept.
        by_rank = eviction_rank.masked_fill(~resident, 0).argsort(dim=-1, stable=True)
        place = kept.int() + resident.int()
        free_slots = by_rank.gather(1, place.gather(1, by_rank).argsort(dim=-1, stable=True))
        remaining = slot_blocks
    else:
        free_slots = kept.int().argsort(dim=-1, stable=True)
        remaining = torch.where(kept, slot_blocks, -1)

    taken = min(n_slots, n_wanted)
    load_slots = _padded(wanted, n_wanted)
    load_slots[:, :taken] = free_slots[:, :taken].to(load_slots.dtype)
    load_slots = torch.where(load_blocks >= 0, load_slots, -1)
    landing = torch.where(load_slots >= 0, load_slots, n_slots).long()
    updated = torch.cat([remaining, _padded(wanted, 1)], dim=1).scatter_(1, landing, load_blocks)[:, :n_slots]

    found = (wanted.unsqueeze(2) == updated.unsqueeze(1)).byte().argmax(-1)
    wanted_slots = torch.where(wanted >= 0, found, -1).int()
    return SlotUpdate(updated, wanted_slots, load_blocks, load_slots, n_loads.squeeze(1).int())


def _padded(like: Tensor, width: int) -> Tensor:
    return like.new_full((like.shape[0], width), -1)


def _check_capacity(n_loads: Tensor, kept: Tensor, n_slots: int) -> None:
    needed = n_loads + kept.sum(-1)
    if (needed > n_slots).any():
        row = int(needed.argmax())
        minimum = int(needed[row])
        raise CapacityError(
            f"{n_slots} slots cannot hold the {minimum} blocks that row {row} attends to; give at least {minimum} slots"
        )
