"""Token sampling: greedy, or temperature with top-p, each sequence drawing from its own seeded generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nosa_sys.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence picks its next token. ``temperature`` 0 is greedy; ``top_p`` in (0, 1]; ``seed`` >= 0.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1).greedy
    False
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature} must be finite and >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be a whole number >= 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def generator(self) -> np.random.Generator:
        """A fresh generator: the n-th draw of a sequence depends on its seed and n alone, never on the batch."""
        return np.random.Generator(np.random.PCG64(self.seed))


@dataclass(frozen=True)
class Draws:
    """How each row draws its token: temperature (0: greedy), top_p, and one uniform number of its generator."""

    temperature: list[float]
    top_p: list[float]
    uniform: list[float]


def draw_rows(params: list[SamplingParams], draws: list[Callable[[], float]]) -> Draws | None:
    """One number for each non-greedy row, out of its own ``draws``; None when every row is greedy."""
    if all(p.greedy for p in params):
        return None
    return Draws(
        [p.temperature for p in params],
        [p.top_p for p in params],
        [0.0 if p.greedy else number() for p, number in zip(params, draws, strict=True)],
    )


def sample(logits: Tensor, draws: Draws | None) -> list[int]:
    """Next token of each row of ``logits`` [batch, vocab]; see ``sample_rows``."""
    if draws is None:
        return logits.argmax(dim=-1).tolist()
    values = [torch.tensor(v, dtype=torch.float64) for v in (draws.temperature, draws.top_p, draws.uniform)]
    return sample_rows(logits.cpu(), *values).tolist()


def sample_rows(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Tokens int64 [row] of ``logits`` [row, vocab]; temperature 0 takes the best, the others float64 [row].

    The nucleus is the shortest prefix of the tokens by (probability desc, id asc) whose mass reaches top_p. No data is
    looked at: a graph can hold it.
    """
    greedy = temperature == 0
    drawn = _sample_nucleus(logits, torch.where(greedy, 1.0, temperature), top_p, uniform)
    return torch.where(greedy, logits.argmax(dim=-1), drawn)


def _sample_nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw inside each row's nucleus; logits [rows, vocab], the others float64 [rows]."""
    logits = logits.to(torch.float64)
    peak = logits.max(dim=-1, keepdim=True).values  # taken off first: a tiny temperature must not overflow
    scaled = (logits - peak) / temperature[:, None]
    probabilities, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probabilities.cumsum(dim=-1)
    inside = cumulative - probabilities < top_p[:, None]
    mass = torch.where(inside, probabilities, 0.0).sum(dim=-1, keepdim=True)
    target = uniform[:, None] * mass
    rank = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    rank = torch.minimum(rank, inside.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # NaN logits have no nucleus
    return order.gather(-1, rank)[:, 0]
