"""Confidence intervals over documents: a seeded bootstrap that resamples whole documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nosa_sys.errors import ConfigError

RESAMPLES = 4000


class Interval(NamedTuple):
    """An estimate and its 95 % interval; low and high are NaN with fewer than two documents."""

    value: float
    low: float
    high: float


def interval(sums: ArrayLike, counts: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """sum(sums) / sum(counts) over documents, each of which has one entry in both; 95 % percentile bootstrap.

    For a paired difference of two methods give the differences of their sums. ConfigError for no document.
    """
    top, bottom = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if not len(top) or bottom.sum() <= 0:
        raise ConfigError("an interval needs at least one document with a count")
    value = float(top.sum() / bottom.sum())
    if len(top) < 2:
        return Interval(value, float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(0, len(top), (resamples, len(top)))
    totals = bottom[drawn].sum(1)
    means = top[drawn].sum(1)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def exponential(of: Interval) -> Interval:
    """A mean loss in nats as perplexity, or a mean difference as a ratio of perplexities."""
    return Interval(*(float(np.exp(x)) for x in of))
