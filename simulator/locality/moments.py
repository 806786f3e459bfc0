"""What a locality model is fitted to: how long the order of scores lasts, how it jumps, recency, and betas.

Captured and drawn scores are measured by the same functions, so that what an estimate leaves out (few blocks, ranks in
place of scores) is alike on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.stats import norm

from nosa_sys.simulator.locality.process import remoteness
from nosa_sys.sparse_config import SparseConfig

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # steps
DEPTH_TOKENS = (256, 512, 1024, 1536)  # the top blocks whose stay is looked at, at most half of all
MIN_BLOCKS = 16  # free blocks that a sequence must have
MIN_STEPS = 2 * LAGS[-1]
_CORRELATIONS = np.linspace(0.0, 0.9995, 400)


@dataclass(frozen=True)
class Moments:
    """Of one sequence, or means over several.

    ``correlation`` ``[head, lag]``: that of normal variables whose top blocks would stay as long as these did, mean
    over depths; ``left`` ``[head, lag]``: share of the top blocks that are no longer there after each lag, mean over
    depths. ``turmoil`` ``[head]``: variance over
    steps of the changes among the top blocks, relative to their mean; ``turmoil_layers`` and ``turmoil_all``: that of
    the mean over the heads of a layer, and over all. ``beta_correlation`` ``[head]``: of betas with mean scores.
    ``recency`` ``[head]``: slope of the mean normal score over remoteness; ``spread`` ``[head]``: the variance
    over blocks that it makes.
    """

    correlation: np.ndarray
    left: np.ndarray
    turmoil: np.ndarray
    turmoil_layers: np.ndarray
    turmoil_all: np.ndarray
    beta_correlation: np.ndarray
    recency: np.ndarray
    spread: np.ndarray


def free_blocks(position: int, sparse: SparseConfig) -> np.ndarray:
    """Ids of the blocks that a query at ``position`` may pick: neither sink nor window."""
    return np.arange(sparse.init_blocks, position // sparse.block_size - sparse.local_blocks)


def moments_of(
    position: np.ndarray, scores: np.ndarray, betas: np.ndarray, sparse: SparseConfig, n_kv_heads: int
) -> Moments:
    """Moments of one sequence over the blocks that are free at its first step.

    Args:
        position: int64 ``[step]``; scores: ``[step, head, block]``; betas: ``[head, block]``.
    """
    blocks = free_blocks(int(position[0]), sparse)
    levels = norm.ppf(1.0 - (np.arange(len(blocks)) + 0.5) / len(blocks))
    levels = (levels / levels.std()).astype(np.float32)
    rank = _ranks(scores[:, :, blocks])
    normal = levels[rank]
    standing = normal.mean(axis=0)
    current = int(position[len(position) // 2]) // sparse.block_size
    far = remoteness((current - blocks) * sparse.block_size)
    far -= far.mean()
    recency = (standing * far).mean(axis=1) / far.var()
    tops = [rank < depth for depth in _depths(len(blocks), sparse.block_size)]
    left = [_left(top) for top in tops]
    changes = np.mean([_relative(_changes(top)) for top in tops], axis=0)
    return Moments(
        correlation=np.mean([_correlation(own, top) for own, top in zip(left, tops, strict=True)], axis=0),
        left=np.mean(left, axis=0),
        turmoil=changes.var(axis=0),
        turmoil_layers=changes.reshape(len(changes), -1, n_kv_heads).mean(axis=2).var(axis=0).mean(),
        turmoil_all=changes.mean(axis=1).var(),
        beta_correlation=(standing * levels[_ranks(betas[:, blocks])]).mean(axis=1),
        recency=recency,
        spread=recency**2 * far.var(),
    )


def mean_moments(found: Sequence[Moments]) -> Moments:
    names = [field.name for field in dataclasses.fields(Moments)]
    return Moments(**{name: np.mean([getattr(m, name) for m in found], axis=0) for name in names})


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank along the last axis, 0 for the highest; ties by index, as selection breaks them."""
    order = np.argsort(-values, axis=-1, kind="stable")
    rank = np.empty(order.shape, dtype=np.int16)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1], dtype=np.int16), order.shape), axis=-1)
    return rank


def _depths(n_blocks: int, block_size: int) -> list[int]:
    return sorted({max(1, min(tokens // block_size, n_blocks // 2)) for tokens in DEPTH_TOKENS})


def _left(top: np.ndarray) -> np.ndarray:
    """Share ``[head, lag]`` of the ``top`` blocks that are not among the top after each lag."""
    n_steps, depth = len(top), int(top[0, 0].sum())
    stay = [(top[lag:] & top[: n_steps - lag]).sum(axis=2).mean(axis=0) / depth for lag in LAGS]
    return 1.0 - np.stack(stay, axis=1)


def _correlation(left: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Correlation of normal variables of which as many would leave the top."""
    share = float(top[0, 0].mean())
    return np.interp(1.0 - left, _overlap_table(share), _CORRELATIONS)


def _changes(top: np.ndarray) -> np.ndarray:
    """Blocks ``[step, head]`` that came into the ``top`` at each step but the first."""
    return (top[1:] & ~top[:-1]).sum(axis=2)


def _relative(changes: np.ndarray) -> np.ndarray:
    return changes / np.maximum(1e-6, changes.mean(axis=0))


@cache
def _overlap_table(share: float) -> np.ndarray:
    """P(Y among its top ``share`` | X among its own) of normal X, Y, for each of _CORRELATIONS."""
    edge = norm.isf(share)
    x = np.linspace(edge, edge + 7.0, 700)
    rho = _CORRELATIONS[:, None]
    both = norm.sf((edge - rho * x) / np.sqrt(1.0 - rho**2)) * norm.pdf(x)
    return np.trapezoid(both, x, axis=1) / share
