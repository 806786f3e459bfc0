"""Guesses for injected selections: what schedule prefetch brings in, with a chosen share of the next misses in it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nosa_sys.engine.injection import Injection, ascending_ids, some_of
from nosa_sys.errors import ConfigError
from nosa_sys.sparse_config import SparseConfig


def with_guesses(
    injection: Injection, sparse: SparseConfig, n_guesses: int, hit_share: float, seed: int = 0
) -> Injection:
    """The same sets with ``n_guesses`` blocks a head and step beside each, fewer where no more exist.

    Each block that the next step takes in anew is among them with probability ``hit_share`` (as far as n_guesses
    reach), the rest are blocks drawn from those of neither set. A model's own ranking would guess; its hit share is an
    assumption here, and the label says so. Raises ConfigError for n_guesses < 1 or a share outside [0, 1].
    """
    if n_guesses < 1 or not 0 <= hit_share <= 1:
        raise ConfigError(f"n_guesses={n_guesses} must be >= 1 and hit_share={hit_share} must lie in [0, 1]")
    table = injection.ids_table
    device, n_steps, k = table.device, injection.n_steps, sparse.topk
    generator = torch.Generator(device).manual_seed(seed)
    n_blocks = sparse.n_blocks(max(injection.contexts) + n_steps - 1)
    ids = torch.arange(n_blocks, device=device)
    contexts = torch.tensor(injection.contexts, device=device)
    guesses = torch.empty((*table.shape[:-1], k + n_guesses), dtype=torch.int32, device=device)
    members = _members(table[0], n_blocks)
    for step in range(n_steps):
        upcoming = _members(table[step + 1], n_blocks) if step + 1 < n_steps else members
        current = ((contexts - 1 + step) // sparse.block_size)[:, None, None]
        outside = ~members & (ids <= current)
        fresh = upcoming & outside
        foreseen = fresh & (torch.rand(fresh.shape, device=device, generator=generator) < hit_share)
        foreseen = some_of(foreseen, foreseen.sum(-1).clamp(max=n_guesses), n_guesses, generator)
        others = outside & ~fresh
        n_others = (n_guesses - foreseen.sum(-1)).minimum(others.sum(-1))
        chosen = members | foreseen | some_of(others, n_others, n_guesses, generator)
        guesses[step] = ascending_ids(chosen, k + n_guesses)
        members = upcoming
    label = f"{injection.label}; {n_guesses} guesses a head, of the next misses a share of {hit_share:g} (assumed)"
    return dataclasses.replace(injection, label=label, guess_table=guesses)


def _members(ids: Tensor, n_blocks: int) -> Tensor:
    """bool [..., block] of ids int32 [..., k], -1 padded."""
    mask = torch.zeros((*ids.shape[:-1], n_blocks + 1), dtype=torch.bool, device=ids.device)
    return mask.scatter_(-1, ids.long().remainder(n_blocks + 1), True)[..., :n_blocks]
