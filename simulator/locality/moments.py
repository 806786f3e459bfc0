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

from nosa_sys.simulator.locality.process import KNOT_TOKENS
from nosa_sys.sparse_config import SparseConfig

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # steps
DEPTH_TOKENS = (256, 512, 1024, 1536)  # the top blocks whose stay is looked at; those beyond half of all are left out
SLOPE_LAGS = 4  # the first lags, at which deep and shallow tops are compared
MIN_BLOCKS = 16  # free blocks that a sequence must have
MIN_STEPS = 2 * LAGS[-1]
_CORRELATIONS = np.linspace(0.0, 0.9995, 400)
_PROFILE_STIFFNESS = 0.3


@dataclass(frozen=True)
class Moments:
    """Of one sequence, or means over several.

    ``correlation`` ``[head, lag]``: that of normal variables whose top blocks would stay as long as these did, mean
    over depths; ``slope`` ``[head]``: the same, deepest less shallowest depth. ``turmoil`` ``[head]``: variance over
    steps of the log of how far scores moved in one step; ``turmoil_layers`` and ``turmoil_all``: that of its mean over
    the heads of a layer, and over all. ``beta_correlation`` ``[head]``: of betas with mean scores. ``profile``
    ``[head, knot]``: mean normal score by distance; ``spread`` ``[head]``: its variance over blocks.
    """

    correlation: np.ndarray
    slope: np.ndarray
    turmoil: np.ndarray
    turmoil_layers: np.ndarray
    turmoil_all: np.ndarray
    beta_correlation: np.ndarray
    profile: np.ndarray
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
    moved = np.log(np.maximum(1e-6, np.square(np.diff(normal, axis=0)).mean(axis=2)))
    standing = normal.mean(axis=0)
    current = int(position[len(position) // 2]) // sparse.block_size
    distance = np.log2((current - blocks) * sparse.block_size)
    profile = _profile(distance, standing)
    shaped = np.stack([np.interp(distance, np.log2(KNOT_TOKENS), row) for row in profile])
    lasting = _lasting(rank, sparse.block_size)
    return Moments(
        correlation=lasting.mean(axis=0),
        slope=(lasting[-1] - lasting[0])[:, :SLOPE_LAGS].mean(axis=1),
        turmoil=moved.var(axis=0),
        turmoil_layers=moved.reshape(len(moved), -1, n_kv_heads).mean(axis=2).var(axis=0).mean(),
        turmoil_all=moved.mean(axis=1).var(),
        beta_correlation=(standing * levels[_ranks(betas[:, blocks])]).mean(axis=1),
        profile=profile,
        spread=shaped.var(axis=1),
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


def _lasting(rank: np.ndarray, block_size: int) -> np.ndarray:
    """Correlation ``[depth, head, lag]`` that explains how many of the top blocks are still there after each lag."""
    n_steps, _, n_blocks = rank.shape
    found: list[np.ndarray] = []
    for depth in (max(1, tokens // block_size) for tokens in DEPTH_TOKENS):
        if found and 2 * depth > n_blocks:
            break
        top = rank < depth
        stay = [(top[lag:] & top[: n_steps - lag]).sum(axis=2).mean(axis=0) / depth for lag in LAGS]
        found.append(np.interp(np.stack(stay, axis=1), _overlap_table(depth / n_blocks), _CORRELATIONS))
    return np.stack(found)


@cache
def _overlap_table(share: float) -> np.ndarray:
    """P(Y among its top ``share`` | X among its own) of normal X, Y, for each of _CORRELATIONS."""
    edge = norm.isf(share)
    x = np.linspace(edge, edge + 7.0, 700)
    rho = _CORRELATIONS[:, None]
    both = norm.sf((edge - rho * x) / np.sqrt(1.0 - rho**2)) * norm.pdf(x)
    return np.trapezoid(both, x, axis=1) / share


def _profile(distance: np.ndarray, standing: np.ndarray) -> np.ndarray:
    """Values ``[head, knot]`` of a piecewise linear function of log2 distance: least squares, drawn to flatness."""
    knots = np.log2(KNOT_TOKENS)
    hats = np.stack([np.interp(distance, knots, row) for row in np.eye(len(knots))], axis=1)
    steps = _PROFILE_STIFFNESS * np.sqrt(len(distance)) * np.diff(np.eye(len(knots)), axis=0)
    left = np.concatenate([hats, steps])
    right = np.concatenate([standing.T, np.zeros((len(steps), len(standing)))])
    return np.linalg.lstsq(left, right, rcond=None)[0].T
