"""Slot eviction policies: who leaves when a missed block needs a slot and no slot is empty.

A block of the current selection is never the victim; among the others the lowest rank leaves first,
ties to the lower slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError


class Policy(ABC):
    """``keep_unwanted``: whether blocks outside the selection may stay resident.

    ``ranks_by_beta`` and ``ranks_by_use`` say which inputs ``rank`` reads, so that the others need not be kept.
    """

    name: str
    keep_unwanted = True
    ranks_by_beta = False
    ranks_by_use = False

    @abstractmethod
    def rank(self, slot_blocks: Tensor, last_use: Tensor, pooled_betas: Tensor | None) -> Tensor:
        """Eviction ranks [batch, kv_head, slot]; lower leaves first.

        ``slot_blocks`` int32 [batch, kv_head, slot] (-1 empty), ``last_use`` int64 of the same shape (step of the
        last selection), ``pooled_betas`` [batch, kv_head, block] or None while every row selects everything.
        """


class ExactPolicy(Policy):
    """The selection and nothing else is resident: unwanted blocks go at once, so the rank decides nothing."""

    name = "exact"
    keep_unwanted = False

    def rank(self, slot_blocks: Tensor, last_use: Tensor, pooled_betas: Tensor | None) -> Tensor:
        return slot_blocks


class LruPolicy(Policy):
    """The block selected longest ago leaves first."""

    name = "lru"
    ranks_by_use = True

    def rank(self, slot_blocks: Tensor, last_use: Tensor, pooled_betas: Tensor | None) -> Tensor:
        return last_use


class BetaPolicy(Policy):
    """The block with the lowest pooled beta at this step leaves first; a block without a window counts as -inf."""

    name = "beta"
    ranks_by_beta = True

    def rank(self, slot_blocks: Tensor, last_use: Tensor, pooled_betas: Tensor | None) -> Tensor:
        if pooled_betas is None:
            return torch.zeros(slot_blocks.shape, device=slot_blocks.device)
        return pooled_betas.gather(-1, slot_blocks.clamp(min=0).long())


POLICIES: dict[str, Policy] = {p.name: p for p in (ExactPolicy(), LruPolicy(), BetaPolicy())}


def get_policy(name: str) -> Policy:
    """Look a policy up; the error lists the known ones (belady needs the future: replay only)."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r} for an engine; known: {', '.join(POLICIES)}")
    return POLICIES[name]
