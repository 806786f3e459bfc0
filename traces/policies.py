"""Eviction policies of the slot cache: a base and its variants, looked up by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nosa_sys.errors import ConfigError
from nosa_sys.traces.schema import POLICIES

if TYPE_CHECKING:
    from nosa_sys.traces.slot_cache import SlotCache


class EvictionPolicy:
    """Base: which resident, unwanted block leaves when a slot is needed. A block of the current G never does."""

    name = ""
    summary = ""
    keep_unwanted = True
    needs_betas = False

    def rank(self, cache: SlotCache, streams: np.ndarray) -> np.ndarray:
        """``[stream, slot]``: the lowest leaves first, ties go to the lower slot; empty slots may hold anything."""
        raise NotImplementedError


class Exact(EvictionPolicy):
    """Unwanted blocks leave at once: residents are exactly G."""

    name = "exact"
    summary = "unwanted blocks leave at once, as in the reference system"
    keep_unwanted = False

    def rank(self, cache: SlotCache, streams: np.ndarray) -> np.ndarray:
        return np.zeros((len(streams), cache.n_slots), dtype=np.int64)


class LeastRecentlyUsed(EvictionPolicy):
    name = "lru"
    summary = "the block selected longest ago leaves first"

    def rank(self, cache: SlotCache, streams: np.ndarray) -> np.ndarray:
        return cache.last_use[streams]


class BetaRanked(EvictionPolicy):
    """Ranks by pooled beta, which is final once a block has left the window, so one value a block is enough."""

    name = "beta"
    summary = "the block of the lowest pooled beta leaves first"
    needs_betas = True

    def rank(self, cache: SlotCache, streams: np.ndarray) -> np.ndarray:
        blocks = cache.slot_blocks[streams]
        return np.where(blocks >= 0, cache.pooled_betas[np.maximum(blocks, 0)], -np.inf)


class Belady(EvictionPolicy):
    """The offline optimum (MIN): no policy that loads on demand misses fewer."""

    name = "belady"
    summary = "the block needed again latest leaves first (offline optimum)"

    def rank(self, cache: SlotCache, streams: np.ndarray) -> np.ndarray:
        return -cache.next_use[streams]


_VARIANTS = (Exact, LeastRecentlyUsed, BetaRanked, Belady)


def get_policy(name: str) -> EvictionPolicy:
    """Look a policy up; the error lists the known ones."""
    for variant in _VARIANTS:
        if variant.name == name:
            return variant()
    raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
