"""Fit of a score process to captures: moments first, then corrections until drawn scores show the same moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from nosa_sys.errors import TraceError
from nosa_sys.simulator.locality.captured import CapturedSequence
from nosa_sys.simulator.locality.moments import (
    LAGS,
    MIN_BLOCKS,
    MIN_STEPS,
    Moments,
    free_blocks,
    mean_moments,
    moments_of,
)
from nosa_sys.simulator.locality.process import TIME_SCALES, ScoreProcess, ScoreStream
from nosa_sys.sparse_config import SparseConfig

N_ROUNDS = 14
_FULL_ROUNDS = 4  # rounds that correct by the whole difference; later ones by less and less, as draws are noisy
_FIRST_WILDNESS = 0.4
_FIRST_LAG = 3.0  # weight of the lag of one step, which decides misses at slots = k
_LIMITS = {"wildness": (0.0, 1.5), "beta_correlation": (-1.0, 1.0)}


@dataclass(frozen=True)
class _Aim:
    """What the parameters are solved from; starts at the captured moments and is corrected by what draws show."""

    correlation: np.ndarray
    wildness: np.ndarray
    beta_correlation: np.ndarray
    recency: np.ndarray
    shared_by_all: float
    shared_by_layer: float


def fit_process(
    captures: Sequence[CapturedSequence],
    *,
    seed: int = 0,
    rounds: int = N_ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreProcess:
    """Fit one process to sequences of one model at one block size.

    TraceError where a sequence is too short, in steps or context, to be fitted to.
    """
    for capture in captures:
        _refuse_short(capture)
    first = captures[0]
    wanted = mean_moments([moments_of(c.position, c.scores, c.betas, c.sparse, c.n_kv_heads) for c in captures])
    aim = _Aim(
        correlation=wanted.correlation,
        wildness=np.full(len(wanted.turmoil), _FIRST_WILDNESS),
        beta_correlation=wanted.beta_correlation,
        recency=wanted.recency / np.sqrt(_rest(wanted)),
        shared_by_all=float(wanted.turmoil_all / wanted.turmoil.mean()),
        shared_by_layer=0.1,
    )
    for number in range(rounds):
        process = _solve(aim, wanted, first.n_layers, first.n_kv_heads)
        drawn = []
        for index, capture in enumerate(captures):
            rng = np.random.default_rng([seed, number, index])
            scores, betas = draw_scores(process, capture.position, capture.sparse, rng)
            drawn.append(moments_of(capture.position, scores, betas, capture.sparse, capture.n_kv_heads))
        aim = _corrected(aim, wanted, mean_moments(drawn), min(1.0, _FULL_ROUNDS / (number + 1)))
        if progress is not None:
            progress(number + 1, rounds)
    return _solve(aim, wanted, first.n_layers, first.n_kv_heads)


def draw_scores(
    process: ScoreProcess, position: np.ndarray, sparse: SparseConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(scores ``[step, head, block]``, -inf past the context; betas ``[head, block]``) at the given positions."""
    n_blocks = position // sparse.block_size + 1
    stream = ScoreStream(process, int(n_blocks[-1]), sparse.block_size, rng)
    scores = np.full((len(position), process.n_heads, int(n_blocks[-1])), -np.inf, dtype=np.float32)
    for step, count in enumerate(n_blocks):
        scores[step, :, :count] = stream.next_step(int(count))
    return scores, stream.betas


def _refuse_short(capture: CapturedSequence) -> None:
    n_blocks = len(free_blocks(int(capture.position[0]), capture.sparse))
    if n_blocks < MIN_BLOCKS:
        raise TraceError(
            f"a sequence begins with {n_blocks} free blocks of {capture.sparse.block_size} tokens, a locality model "
            f"needs {MIN_BLOCKS}; capture a longer prompt"
        )
    if len(capture.position) < MIN_STEPS:
        raise TraceError(
            f"a sequence has {len(capture.position)} steps, a locality model needs {MIN_STEPS}; capture more tokens"
        )


def _corrected(aim: _Aim, wanted: Moments, found: Moments, gain: float) -> _Aim:
    def towards(name: str, difference: np.ndarray) -> np.ndarray:
        return np.clip(getattr(aim, name) + gain * difference, *_LIMITS[name])

    by_all = aim.shared_by_all * float(wanted.turmoil_all / np.maximum(1e-6, found.turmoil_all)) ** gain
    by_all = min(by_all, 0.9)
    missing = (wanted.turmoil_layers - wanted.turmoil_all) - (found.turmoil_layers - found.turmoil_all)
    by_layer = aim.shared_by_layer + gain * float(missing / wanted.turmoil.mean())
    return dataclasses.replace(
        aim,
        # the share that leaves goes with the root of 1 - correlation, and it is what bytes are made of
        correlation=1.0 - (1.0 - aim.correlation) * np.clip(wanted.left / found.left, 0.5, 2.0) ** (2.0 * gain),
        wildness=towards("wildness", np.sqrt(wanted.turmoil) - np.sqrt(found.turmoil)),
        beta_correlation=towards("beta_correlation", wanted.beta_correlation - found.beta_correlation),
        recency=aim.recency + gain * (wanted.recency - found.recency) / np.sqrt(_rest(wanted)),
        shared_by_all=by_all,
        shared_by_layer=float(np.clip(by_layer, 0.0, 0.95 - by_all)),
    )


def _rest(wanted: Moments) -> np.ndarray:
    """Variance ``[head]`` over blocks that distance does not explain."""
    return 1.0 - np.minimum(0.9, wanted.spread)


def _solve(aim: _Aim, wanted: Moments, n_layers: int, n_kv_heads: int) -> ScoreProcess:
    """Weights by non-negative least squares over the lags; what no time scale explains is fresh noise."""
    rest = _rest(wanted)
    lasting = 1.0 - (1.0 - aim.correlation) / rest[:, None]
    lags = np.asarray(LAGS)
    design = np.stack([*(np.exp(-lags / scale) for scale in TIME_SCALES), np.ones(len(lags))], axis=1)
    emphasis = np.where(lags == 1, _FIRST_LAG, 1.0)
    solved = np.stack([nnls(design * emphasis[:, None], row * emphasis)[0] for row in np.maximum(0.0, lasting)])
    solved /= np.maximum(1.0, solved.sum(axis=1, keepdims=True))
    weights = np.concatenate([np.maximum(0.0, 1.0 - solved.sum(axis=1, keepdims=True)), solved], axis=1)
    standing = np.maximum(0.2, np.sqrt((weights[:, -1] + weights[:, -2]) * rest))
    return ScoreProcess(
        n_layers,
        n_kv_heads,
        weights,
        aim.recency,
        np.clip(aim.beta_correlation / standing, -0.95, 0.95),
        aim.wildness,
        aim.shared_by_all,
        aim.shared_by_layer,
    )
