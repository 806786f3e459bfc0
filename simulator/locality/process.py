"""Score process of a fitted locality model: Gaussian components of several time scales for each layer and KV head.

The pooled score of block b at step t, seen by one head, is (on a scale of which only the order counts)

    recency remoteness(distance of b to the current block) + sqrt(w_S + w_L) tanh(flatness y(t)) / spread
        + v(t) sqrt(w_0) white(t) + sum over the shorter time scales j of sqrt(w_j) u_j(t)

``white`` is fresh noise, ``u_j`` an AR(1) process of unit variance that forgets within TIME_SCALES[j] steps, ``y`` the
standing of the block: a constant and the slowest AR(1) process in the ratio of w_S and w_L, scaled to unit variance.
The weights of a head add up to 1. tanh (``spread`` is its standard deviation) keeps the most popular blocks closer to
each other than normal variables would be, so that few of them are picked all the time. Some steps are wilder than
others: ``v = exp(s n - s^2)`` scales the fresh noise and what enters the fastest ``u_j``, with n normal and partly
shared by all heads and by those of a layer, since one token drives them all. A block's beta is normal, constant, and
correlated with y at the first step. Blocks are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIME_SCALES = (2.0, 12.0, 60.0, 300.0)  # steps
WILD_SCALES = 1  # of these, from the fastest on, take part in the wildness of a step
_SLOWEST = len(TIME_SCALES) - 1
_UNIT_TOKENS = 64
_ROOT_TOKENS = 8192  # where remoteness turns from a root into a logarithm: the longest context that was looked at
N_WEIGHTS = len(TIME_SCALES) + 2  # fresh noise, one a time scale, constant


def remoteness(distance_tokens: np.ndarray) -> np.ndarray:
    """Square root of the distance in units of 64 tokens, up to 8192 tokens; from there on the logarithm of equal slope.

    The root is what mean scores of captures of 4K to 8K tokens follow; how they go on is an assumption.

    >>> remoteness(np.array([0, 64, 4096, 8192])).round(3).tolist()
    [0.0, 1.0, 8.0, 11.314]
    """
    edge = np.sqrt(_ROOT_TOKENS / _UNIT_TOKENS)
    beyond = np.log(np.maximum(1.0, distance_tokens / _ROOT_TOKENS))
    return np.sqrt(np.minimum(distance_tokens, _ROOT_TOKENS) / _UNIT_TOKENS) + edge / 2.0 * beyond


def spread_of(flatness: float) -> float:
    """Standard deviation of tanh(flatness x) for a standard normal x."""
    x, weight = np.polynomial.hermite_e.hermegauss(101)
    return float(np.sqrt(np.sum(weight * np.tanh(flatness * x) ** 2) / np.sum(weight)))


@dataclass(frozen=True, eq=False)
class ScoreProcess:
    """Parameters of every head, ``[head]`` first (head = layer * KV heads + KV head).

    ``weights`` ``[head, N_WEIGHTS]`` in the order of the module's formula (fresh, time scales, constant); ``recency``
    ``[head]``, a unit of remoteness; ``beta_correlation`` ``[head]`` with y; ``wildness`` ``[head]`` is s;
    ``shared_by_all`` and ``shared_by_layer`` are shares of the variance of n. ``flatness`` serves all heads.
    """

    n_layers: int
    n_kv_heads: int
    weights: np.ndarray
    recency: np.ndarray
    beta_correlation: np.ndarray
    wildness: np.ndarray
    shared_by_all: float
    shared_by_layer: float
    flatness: float

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
            self.recency[head],
            self.beta_correlation[head],
            self.wildness[head],
            self.shared_by_all,
            self.shared_by_layer,
            self.flatness,
        )


class ScoreStream:
    """Scores of all heads of one sequence of at most ``n_blocks``, step by step.

    ``betas`` float32 ``[head, block]`` are constant.
    """

    def __init__(self, process: ScoreProcess, n_blocks: int, block_size: int, rng: np.random.Generator) -> None:
        self._process, self._rng = process, rng
        self._shape = (process.n_heads, n_blocks)
        weight = np.sqrt(process.weights).astype(np.float32)[:, :, None]
        standing = np.maximum(np.sqrt(process.standing_weight), 1e-6).astype(np.float32)[:, None]
        self._constant = weight[:, -1] / standing * self._normal()
        # each component carries its weight, so that a step only adds them up
        self._used = [j for j in range(len(TIME_SCALES)) if process.weights[:, j + 1].any()]
        share = [weight[:, j + 1] / (standing if j == _SLOWEST else np.float32(1.0)) for j in self._used]
        self._components = [part * self._normal() for part in share]
        self._kept = [np.float32(np.exp(-1.0 / TIME_SCALES[j])) for j in self._used]
        self._entering = [part * np.sqrt(1.0 - kept**2) for part, kept in zip(share, self._kept, strict=True)]
        self._fresh = weight[:, 0]
        self._flatness = np.float32(process.flatness)
        self._scale = standing / np.float32(spread_of(process.flatness))
        correlation = process.beta_correlation[:, None].astype(np.float32)
        self.betas = correlation * self._standing() + np.sqrt(1.0 - correlation**2) * self._normal()
        far = remoteness(np.arange(n_blocks) * block_size)
        self._recency = (process.recency[:, None] * far).astype(np.float32)

    def next_step(self, n_blocks: int) -> np.ndarray:
        """Scores float32 ``[head, n_blocks]`` of the next step, whose current block is the last of ``n_blocks``."""
        wild = self._wildness()
        total = self._normal()
        total *= self._fresh * wild
        for j, component, kept, entering in zip(self._used, self._components, self._kept, self._entering, strict=True):
            noise = self._normal()
            noise *= entering * wild if j < WILD_SCALES else entering
            component *= kept
            component += noise
            if j != _SLOWEST:
                total += component
        standing = self._standing()
        standing *= self._flatness
        np.tanh(standing, out=standing)
        standing *= self._scale
        total += standing
        scores = total[:, :n_blocks]
        scores += self._recency[:, :n_blocks][:, ::-1]
        return scores

    def _standing(self) -> np.ndarray:
        """y: of unit variance, a new array."""
        return self._constant + self._components[-1] if self._used[-1:] == [_SLOWEST] else self._constant.copy()

    def _wildness(self) -> np.ndarray:
        p = self._process
        own = 1.0 - p.shared_by_all - p.shared_by_layer
        n = np.sqrt(own) * self._rng.standard_normal(p.n_heads) + np.sqrt(p.shared_by_all) * self._rng.standard_normal()
        n += np.sqrt(p.shared_by_layer) * np.repeat(self._rng.standard_normal(p.n_layers), p.n_kv_heads)
        return np.exp(p.wildness * n - p.wildness**2).astype(np.float32)[:, None]

    def _normal(self) -> np.ndarray:
        return self._rng.standard_normal(self._shape, dtype=np.float32)
