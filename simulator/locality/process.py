"""Score process of a fitted locality model: Gaussian components of several time scales for each layer and KV head.

The pooled score of block b at step t, seen by one head, is (on a scale of which only the order counts)

    profile(distance of b to the current block) + sqrt(w_S) z
        + v(t) r sqrt(w_0) white(t) + sum over time scales j of sqrt(w_j) u_j(t)

``z`` is constant, ``white`` fresh noise, ``u_j`` an AR(1) process of unit variance that forgets within
TIME_SCALES[j] steps; the weights of a head add up to 1. Some steps are wilder than others: ``v = exp(s n - s^2)``
scales the fresh noise and what enters the fastest ``u_j``, with n normal and partly shared by all heads and by those
of a layer, since one token drives them all. ``r = exp(tilt y - tilt^2)`` likewise makes popular blocks fluctuate more,
or less, with y the sum of the constant part and the slowest u at the first step, scaled to unit variance. A block's
beta is normal, constant, and correlated with y. Blocks are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIME_SCALES = (2.0, 12.0, 60.0, 300.0)  # steps
WILD_SCALES = 1  # of these, from the fastest on, take part in the wildness of a step
N_WEIGHTS = len(TIME_SCALES) + 2  # fresh noise, one a time scale, constant
KNOT_TOKENS = (512, 1024, 2048, 4096, 8192)  # distances of the profile's knots: linear in log2 between, flat beyond


@dataclass(frozen=True, eq=False)
class ScoreProcess:
    """Parameters of every head, ``[head]`` first (head = layer * KV heads + KV head).

    ``weights`` ``[head, N_WEIGHTS]`` in the order of the module's formula (fresh, time scales, constant); ``profile``
    ``[head, knot]``; ``beta_correlation`` ``[head]`` with y; ``wildness`` ``[head]`` is s; ``tilt`` ``[head]``;
    ``shared_by_all`` and ``shared_by_layer`` are shares of the variance of n.
    """

    n_layers: int
    n_kv_heads: int
    weights: np.ndarray
    profile: np.ndarray
    beta_correlation: np.ndarray
    wildness: np.ndarray
    tilt: np.ndarray
    shared_by_all: float
    shared_by_layer: float

    @property
    def n_heads(self) -> int:
        return self.n_layers * self.n_kv_heads

    @property
    def standing_weight(self) -> np.ndarray:
        """Variance ``[head]`` of what a block keeps for long: the constant part and the slowest component."""
        return self.weights[:, -1] + self.weights[:, -2]

    def for_heads(self, layers: np.ndarray, kv_heads: np.ndarray) -> ScoreProcess:
        """The process of another model, whose layers and KV heads follow ``layers`` and ``kv_heads`` of this one."""
        head = (layers[:, None] * self.n_kv_heads + kv_heads[None, :]).reshape(-1)
        return ScoreProcess(
            len(layers),
            len(kv_heads),
            self.weights[head],
            self.profile[head],
            self.beta_correlation[head],
            self.wildness[head],
            self.tilt[head],
            self.shared_by_all,
            self.shared_by_layer,
        )


class ScoreStream:
    """Scores of all heads of one sequence of at most ``n_blocks``, step by step.

    ``betas`` float32 ``[head, block]`` are constant.
    """

    def __init__(self, process: ScoreProcess, n_blocks: int, block_size: int, rng: np.random.Generator) -> None:
        self._process, self._rng = process, rng
        self._shape = (process.n_heads, n_blocks)
        weight = np.sqrt(process.weights).astype(np.float32)[:, :, None]
        constant = weight[:, -1] * self._normal()
        # each component carries its weight, so that a step only adds them up
        used = [j for j in range(len(TIME_SCALES)) if process.weights[:, j + 1].any()]
        self._components = [weight[:, j + 1] * self._normal() for j in used]
        slowest = self._components[-1] if used[-1:] == [len(TIME_SCALES) - 1] else np.float32(0.0)
        spread = np.sqrt(process.standing_weight).astype(np.float32)[:, None]
        standing = (constant + slowest) / np.maximum(spread, np.float32(1e-6))
        correlation = process.beta_correlation[:, None].astype(np.float32)
        self.betas = correlation * standing + np.sqrt(1.0 - correlation**2) * self._normal()
        tilt = process.tilt[:, None].astype(np.float32)
        restless = np.exp(tilt * standing - tilt**2)
        self._constant, self._fresh = constant, weight[:, 0] * restless
        self._kept = [np.float32(np.exp(-1.0 / TIME_SCALES[j])) for j in used]
        self._entering = [
            weight[:, j + 1] * np.sqrt(1.0 - kept**2) * (restless if j < WILD_SCALES else np.float32(1.0))
            for j, kept in zip(used, self._kept, strict=True)
        ]
        self._wild = [j < WILD_SCALES for j in used]
        distance = np.log2(np.maximum(1, np.arange(n_blocks)) * block_size)
        knots = np.log2(KNOT_TOKENS)
        self._profile = np.stack([np.interp(distance, knots, row) for row in process.profile]).astype(np.float32)

    def next_step(self, n_blocks: int) -> np.ndarray:
        """Scores float32 ``[head, n_blocks]`` of the next step, whose current block is the last of ``n_blocks``."""
        wild = self._wildness()
        total = self._normal()
        total *= self._fresh * wild
        total += self._constant
        for component, kept, entering, is_wild in zip(
            self._components, self._kept, self._entering, self._wild, strict=True
        ):
            noise = self._normal()
            noise *= entering * wild if is_wild else entering
            component *= kept
            component += noise
            total += component
        scores = total[:, :n_blocks]
        scores += self._profile[:, :n_blocks][:, ::-1]
        return scores

    def _wildness(self) -> np.ndarray:
        p = self._process
        own = 1.0 - p.shared_by_all - p.shared_by_layer
        n = np.sqrt(own) * self._rng.standard_normal(p.n_heads) + np.sqrt(p.shared_by_all) * self._rng.standard_normal()
        n += np.sqrt(p.shared_by_layer) * np.repeat(self._rng.standard_normal(p.n_layers), p.n_kv_heads)
        return np.exp(p.wildness * n - p.wildness**2).astype(np.float32)[:, None]

    def _normal(self) -> np.ndarray:
        return self._rng.standard_normal(self._shape, dtype=np.float32)
