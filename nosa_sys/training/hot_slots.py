"""Misses with more slots than k (a hot buffer), least recently used first out, for every step of a document at once.

After a step the residents are the blocks whose last use is latest: as many as there are slots. So the residents before
a step are all blocks of the last few selections, as far back as they fit, and of the selection before those the blocks
that there is room for. How far back is found by doubling for all steps and heads together, without a loop over steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lru_misses(member: Tensor, slots: int, block_size: int) -> Tensor:
    """Blocks that each step loads into ``slots`` LRU slots a head, summed over heads, int64 [step].

    ``member`` bool [head, step, block]: whether the step at position ``step`` selects the block, from position 0 on;
    no step selects more than ``slots``. The block born at a step is never loaded. Blocks last used at one and the same
    step leave lowest id first (the engine: lowest slot first, which no whole document at once can know; the count lies
    between the two bounds of ``traces.reuse.StackDistances``). Takes log2(steps) times the bytes of ``member``.
    """
    n_steps = member.shape[1]
    steps = torch.arange(n_steps, device=member.device)
    recent, first = _recent(member, slots)
    # residents of the selection that fits only in part: the highest ids that there is room for
    tied = _rows(member, first - 1) & ~recent & (first > 0).unsqueeze(-1)
    room = slots - recent.sum(-1, keepdim=True)
    rank_from_end = tied.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    resident = recent | (tied & (rank_from_end <= room))
    born = (steps % block_size == 0) * member.shape[0]
    return (member & ~resident).sum((0, 2)) - born


def _recent(member: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Before each step: the blocks of as many of the last selections as fit into ``slots`` together, bool like
    ``member``, and the first of those steps, int64 [head, step]."""
    n_heads, n_steps, _ = member.shape
    unions = [member]  # unions[j][:, t]: blocks of the 2^j steps that end at t
    while 2 ** len(unions) < n_steps:
        half, span = unions[-1], 2 ** (len(unions) - 1)
        longer = half.clone()
        longer[:, span:] |= half[:, :-span]
        unions.append(longer)
    recent = torch.zeros_like(member)
    first = torch.arange(n_steps, device=member.device).expand(n_heads, -1)
    for power in reversed(range(len(unions))):
        candidate = recent | (_rows(unions[power], first - 1) & (first > 0).unsqueeze(-1))
        fits = candidate.sum(-1) <= slots
        recent = torch.where(fits.unsqueeze(-1), candidate, recent)
        first = torch.where(fits, (first - 2**power).clamp(min=0), first)
    return recent, first


def _rows(values: Tensor, steps: Tensor) -> Tensor:
    """values [head, step, block] at steps [head, row] of each head; any row for a step below 0."""
    heads = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    return values[heads, steps.clamp(min=0)]
