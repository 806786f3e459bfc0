"""Score process of a fitted locality model: Gaussian components of several time scales for each layer and KV head.

The pooled score of block b at step t, seen by one head, is (on a scale of which only the order counts)

    remoteness(distance of b to the current block) * (recency + sqrt(w_S) z + sqrt(w_L) u_L(t))
        + v(t) sqrt(w_0) white(t) + sum over the shorter time scales j of sqrt(w_j) u_j(t)

``z`` is constant, ``white`` fresh noise, ``u_j`` an AR(1) process of unit variance that forgets within TIME_SCALES[j]
steps, u_L the slowest of them. What a block keeps for long grows with its distance, as the root of it does in
captures, while the noise does not; remoteness is 1 at 2048 tokens, where the weights of a head add up to 1. Some steps
are wilder than others: ``v = exp(s n - s^2)`` scales the fresh noise and what enters the fastest ``u_j``, with n normal
and partly shared by all heads and by those of a layer, since one token drives them all. A block's beta is normal,
constant, and correlated with what it keeps for long at the first step. Blocks are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIME_SCALES = (2.0, 12.0, 60.0, 300.0)  # steps
WILD_SCALES = 1  # of these, from the fastest on, take part in the wildness of a step
_SLOWEST = len(TIME_SCALES) - 1
_REFERENCE_TOKENS = 2048
_ROOT_TOKENS = 8192  # where remoteness turns from a root into a logarithm: the longest context that was looked at
N_WEIGHTS = len(TIME_SCALES) + 2  # fresh noise, one a time scale, constant


def remoteness(distance_tokens: np.ndarray) -> np.ndarray:
    """Root of the distance, 1 at 2048 tokens; beyond 8192 tokens the logarithm that goes on with the same slope.

    The root is what log scores of captures of 4K to 8K tokens follow; how they go on is an assumption.

    >>> remoteness(np.array([0, 512, 2048, 8192])).tolist()
    [0.0, 0.5, 1.0, 2.0]
    """
    root = np.sqrt(np.minimum(distance_tokens, _ROOT_TOKENS) / _REFERENCE_TOKENS)
    edge = np.sqrt(_ROOT_TOKENS / _REFERENCE_TOKENS)
    return root + edge / 2.0 * np.log(np.maximum(1.0, distance_tokens / _ROOT_TOKENS))


@dataclass(frozen=True, eq=False)
class ScoreProcess:
    """Parameters of every head, ``[head]`` first (head = layer * KV heads + KV head).

    ``weights`` ``[head, N_WEIGHTS]`` in the order of the module's formula (fresh, time scales, constant); ``recency``
    ``[head]``, a unit of remoteness; ``beta_correlation`` ``[head]``; ``wildness`` ``[head]`` is s;
    ``shared_by_all`` and ``shared_by_layer`` are shares of the variance of n.
    """

    n_layers: int
    n_kv_heads: int
    weights: np.ndarray
    recency: np.ndarray
    beta_correlation: np.ndarray
    wildness: np.ndarray
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
            self.recency[head],
            self.beta_correlation[head],
            self.wildness[head],
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
        # each component carries its weight, so that a step only adds them up
        self._fresh, self._constant = weight[:, 0], weight[:, -1] * self._normal()
        self._used = [j for j in range(len(TIME_SCALES)) if j == _SLOWEST or process.weights[:, j + 1].any()]
        self._components = [weight[:, j + 1] * self._normal() for j in self._used]
        self._kept = [np.float32(np.exp(-1.0 / TIME_SCALES[j])) for j in self._used]
        self._entering = [
            weight[:, j + 1] * np.sqrt(1.0 - kept**2) for j, kept in zip(self._used, self._kept, strict=True)
        ]
        spread = np.sqrt(np.maximum(process.standing_weight, 1e-12)).astype(np.float32)[:, None]
        correlation = process.beta_correlation[:, None].astype(np.float32)
        standing = (self._constant + self._components[-1]) / spread
        self.betas = correlation * standing + np.sqrt(1.0 - correlation**2) * self._normal()
        self._remoteness = remoteness(np.arange(n_blocks) * block_size)[::-1].astype(np.float32)
        self._constant += process.recency[:, None].astype(np.float32)

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
        standing = self._constant + self._components[-1]
        scores = total[:, :n_blocks]
        scores += standing[:, :n_blocks] * self._remoteness[-n_blocks:]
        return scores

    def _wildness(self) -> np.ndarray:
        p = self._process
        own = 1.0 - p.shared_by_all - p.shared_by_layer
        n = np.sqrt(own) * self._rng.standard_normal(p.n_heads) + np.sqrt(p.shared_by_all) * self._rng.standard_normal()
        n += np.sqrt(p.shared_by_layer) * np.repeat(self._rng.standard_normal(p.n_layers), p.n_kv_heads)
        return np.exp(p.wildness * n - p.wildness**2).astype(np.float32)[:, None]

    def _normal(self) -> np.ndarray:
        return self._rng.standard_normal(self._shape, dtype=np.float32)
