"""Selections drawn from a locality model, for contexts, models and budgets never captured; the simplest such model.

A model draws scores and betas; the blocks are then selected by the very rule that traces are selected by, and pass
through the same slot caches, so k, k_e, block size, context, slots and policy act as they do on a trace.
`LocalityModel` has a handful of parameters for all heads; `locality.fitted` has its own for each head.

In `LocalityModel` every stream (sequence, layer, KV head) has units of 64 tokens. A unit's query-aware score at step
t is

    popularity_spread * z + slow(t) + fast(t)

with z ~ N(0, 1) constant, ``slow`` an AR(1) process of unit variance with ``slow_correlation`` between steps, and
``fast`` white with the standard deviation fast_spread * exp(N(0, stream_spread) + fast_tilt * z): the first term is
drawn once a stream, the second lets popular units fluctuate more. A unit's beta is constant ~ N(0, 1), correlated
with z by ``beta_correlation``. A block of several units takes their maximum; units split by smaller blocks keep
``part_correlation`` among their parts.

Fit of the default parameters: see `LocalityModel`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.workload import SequenceHistory
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.policies import get_policy
from nosa_sys.traces.replay import misses_of, serve
from nosa_sys.traces.reuse import BlockUses, block_uses, gamma_of
from nosa_sys.traces.rows import SelectionRows
from nosa_sys.traces.selection import select_blocks_np

UNIT_TOKENS = 64
_UNITS_AT_ONCE = 16
# Limits of one sequence: above them a mistyped context or step count would run for hours or fill memory.
MAX_SCORES = 2**33
MAX_UNITS = 2**25


class ScoreSource(Protocol):
    """Scores of one sequence; ``betas`` ``[stream, block]`` cover all its blocks, stream = layer * KV heads + head."""

    betas: np.ndarray

    def next_step(self, n_blocks: int) -> np.ndarray:
        """Scores ``[stream, >= n_blocks]`` of the next step, whose current block is number ``n_blocks`` - 1."""


class ScoreModel(Protocol):
    """Anything that scores of a sequence can be drawn from."""

    def scores(self, shape: ModelShape, sparse: SparseConfig, tokens: int, rng: np.random.Generator) -> ScoreSource:
        """A fresh sequence that will reach ``tokens`` tokens."""

    def describe(self) -> str:
        """Name and what it rests on, for the rules of a prediction."""


@dataclass(frozen=True)
class LocalityModel:
    """Parameters of the score processes; see the module for their meaning. ConfigError names one out of range.

    The defaults were fitted to misses a head and step measured on SmolLM2-135M with its first eviction head (8K tokens
    of one novel, blocks of 64, sink 1, window 8 of k = 32). Measured -> model, 30 streams x 700 steps:

    - NOSA k 32: slots k 1.92 -> 2.02; LRU of 1.25 k 0.44 -> 0.40, 1.5 k 0.17 -> 0.14, 2 k 0.05 -> 0.03; Belady of
      1.25 k 0.26 -> 0.23
    - InfLLMv2 k 32, the same slots: 3.62 -> 3.85, 1.25 -> 1.29, 0.53 -> 0.53, 0.13 -> 0.15
    - NOSA k 16: 1.10 -> 1.14, 0.37 -> 0.36, 0.19 -> 0.18, 0.10 -> 0.07
    - select 4 instead of 8: 1.07 -> 1.11, 0.17 -> 0.16, 0.07 -> 0.06
    - select 12: 2.62 -> 2.66, 0.72 -> 0.65, 0.30 -> 0.24

    That is one small model with 128 blocks of context: elsewhere the model is an assumption, not a fit.
    ``part_correlation`` was not fitted.
    """

    popularity_spread: float = 2.0
    slow_correlation: float = 0.968
    fast_spread: float = 0.35
    fast_tilt: float = 0.29
    stream_spread: float = 0.37
    beta_correlation: float = -0.2
    part_correlation: float = 0.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low, high = (-1.0, 1.0) if field.name in ("beta_correlation", "fast_tilt") else (0.0, math.inf)
            if field.name in ("slow_correlation", "part_correlation"):
                high = 1.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"locality model: {field.name}={value!r} must lie in [{low:g}, {high:g}]")
            if not math.isfinite(value):
                raise ConfigError(f"locality model: {field.name}={value!r} must be finite")

    def scores(self, shape: ModelShape, sparse: SparseConfig, tokens: int, rng: np.random.Generator) -> ScoreSource:
        return _BlockScores(self, shape.n_layers * shape.n_kv_heads, tokens, sparse.block_size, rng)

    def describe(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(self).items())


class _Scores:
    """Score processes of ``n_streams`` x ``n_units``; `next_step` draws the scores [stream, unit] of one step."""

    def __init__(self, model: LocalityModel, n_streams: int, n_units: int, rng: np.random.Generator) -> None:
        self._model, self._rng = model, rng
        shape = (n_streams, n_units)
        standard = rng.standard_normal(shape)
        self._popularity = standard * model.popularity_spread
        own = math.sqrt(1.0 - model.beta_correlation**2)
        self.betas = model.beta_correlation * standard + own * rng.standard_normal(shape)
        self._slow = rng.standard_normal(shape)
        spread = model.stream_spread * rng.standard_normal((n_streams, 1)) + model.fast_tilt * standard
        self._fast = model.fast_spread * np.exp(spread)

    def next_step(self) -> np.ndarray:
        scores = self._popularity + self._slow + self._fast * self._rng.standard_normal(self._slow.shape)
        kept = self._model.slow_correlation
        self._slow = kept * self._slow + math.sqrt(1.0 - kept**2) * self._rng.standard_normal(self._slow.shape)
        return scores


class _BlockScores:
    """Scores and betas of blocks of any size, from units of UNIT_TOKENS."""

    def __init__(
        self, model: LocalityModel, n_streams: int, tokens: int, block_size: int, rng: np.random.Generator
    ) -> None:
        part = math.gcd(UNIT_TOKENS, block_size)
        self._parts_per_unit, self._parts_per_block = UNIT_TOKENS // part, block_size // part
        self._n_blocks = -(-tokens // block_size)
        # whole groups, so that usual block sizes draw from the same units and can be compared
        n_units = -(-self._n_blocks * block_size // (_UNITS_AT_ONCE * UNIT_TOKENS)) * _UNITS_AT_ONCE
        self._shared = math.sqrt(model.part_correlation)
        self._own_share = math.sqrt(1.0 - model.part_correlation)
        self._units = _Scores(model, n_streams, n_units, rng)
        split = self._parts_per_unit > 1
        self._parts = _Scores(model, n_streams, n_units * self._parts_per_unit, rng) if split else None
        self.betas = self._pooled(self._units.betas, None if self._parts is None else self._parts.betas)

    def next_step(self, n_blocks: int) -> np.ndarray:
        return self._pooled(self._units.next_step(), None if self._parts is None else self._parts.next_step())

    def _pooled(self, units: np.ndarray, parts: np.ndarray | None) -> np.ndarray:
        if parts is not None:
            units = self._shared * np.repeat(units, self._parts_per_unit, axis=1) + self._own_share * parts
        used = units[:, : self._n_blocks * self._parts_per_block]
        return used.reshape(len(units), self._n_blocks, self._parts_per_block).max(axis=2)


@dataclass(frozen=True)
class SyntheticSelections:
    """Selections of one synthetic sequence: rows as a trace has them, and the betas ``[stream, block]`` behind them."""

    rows: SelectionRows
    betas: np.ndarray
    n_layers: int
    n_kv_heads: int
    sparse: SparseConfig
    method: str

    def history(self, slots: int, policy: str) -> SequenceHistory:
        """Pass the selections through slot caches; misses by the counting rules of traces."""
        uses = self._uses
        betas = None
        if get_policy(policy).needs_betas:
            stream = np.repeat(np.arange(len(self.betas)), np.diff(uses.first_block))
            betas = self.betas[stream, uses.block_ids]
        loaded = serve(uses, self.sparse, get_method(self.method), slots, policy, betas)
        misses = self._by_step(misses_of(uses, loaded))
        position = uses.rows.position[: len(misses)].astype(np.int64)
        return SequenceHistory(position, uses.rows.cold[: len(misses)], misses, self._by_step(uses.rows.n_selected))

    def gamma(self) -> np.ndarray:
        """gamma [step, layer, kv_head], NaN at the cold step."""
        return self._by_step(gamma_of(self._uses, self._uses.rows.cold))

    @cached_property
    def _uses(self) -> BlockUses:
        return block_uses(self.rows)

    def _by_step(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.n_layers, self.n_kv_heads, -1).transpose(2, 0, 1)


def synthetic_positions(context: int, steps: int, seed: int, sequence: int) -> np.ndarray:
    """Positions [step] of one sequence: it begins at ``context`` tokens less a drawn phase (none for sequence 0)."""
    rng = np.random.default_rng([seed, sequence, 1])
    phase = int(rng.integers(UNIT_TOKENS)) if sequence else 0
    return max(0, context - 1 - phase) + np.arange(steps, dtype=np.int64)


def synthetic_selections(
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    *,
    context: int,
    steps: int,
    model: ScoreModel,
    seed: int = 0,
    sequence: int = 0,
) -> SyntheticSelections:
    """Select for every step, layer and KV head of one sequence; scores do not depend on budgets or method.

    The first step is the cold one. Raises CapacityError for a request of absurd size.
    """
    variant = get_method(method)
    variant.check(sparse)
    positions = synthetic_positions(context, steps, seed, sequence)
    n_streams = shape.n_layers * shape.n_kv_heads
    n_units = n_streams * (int(positions[-1]) // math.gcd(UNIT_TOKENS, sparse.block_size) + 1)
    if n_units > MAX_UNITS or n_units * steps > MAX_SCORES:
        raise CapacityError(
            f"context={context} x steps={steps} x {n_streams} heads exceeds the locality model; lower context or steps"
        )
    source = model.scores(shape, sparse, int(positions[-1]) + 1, np.random.default_rng([seed, sequence, 0]))
    return select_at(source, positions, shape, sparse, method, sequence)


def select_at(
    source: ScoreSource,
    positions: np.ndarray,
    shape: ModelShape,
    sparse: SparseConfig,
    method: str,
    sequence: int = 0,
) -> SyntheticSelections:
    """Select at consecutive ``positions`` [step] by the rule of SPEC section 3.4 that replays use."""
    variant = get_method(method)
    selected = []
    for position in positions:
        n_blocks = int(position) // sparse.block_size + 1
        selected.append(select_blocks_np(source.next_step(n_blocks), source.betas, n_blocks, sparse, variant)[0])
    return SyntheticSelections(
        _as_rows(np.stack(selected), positions, shape, sequence),
        source.betas,
        shape.n_layers,
        shape.n_kv_heads,
        sparse,
        method,
    )


def _as_rows(selected: np.ndarray, positions: np.ndarray, shape: ModelShape, sequence: int) -> SelectionRows:
    """Rows sorted by (layer, kv_head, step) from block ids [step, stream, k]."""
    steps, n_streams, _ = selected.shape
    by_stream = selected.transpose(1, 0, 2)
    present = by_stream >= 0
    n_rows = steps * n_streams
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=2).reshape(-1))])
    stream = np.repeat(np.arange(n_streams), steps)
    step = np.tile(np.arange(steps), n_streams)
    return SelectionRows(
        step=step.astype(np.int32),
        position=np.tile(positions, n_streams).astype(np.int32),
        sequence=np.full(n_rows, sequence, dtype=np.int32),
        layer=(stream // shape.n_kv_heads).astype(np.int16),
        kv_head=(stream % shape.n_kv_heads).astype(np.int16),
        n_misses=np.zeros(n_rows, dtype=np.int32),
        h2d_bytes=np.zeros(n_rows, dtype=np.int64),
        gamma=np.full(n_rows, np.nan),
        cold=step == 0,
        block_ids=by_stream[present],
        origins=np.zeros(offsets[-1], dtype=np.int8),
        offsets=offsets,
    )
