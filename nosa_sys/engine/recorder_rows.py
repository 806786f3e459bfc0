"""Rows of the trace tables, built from step plans by whole arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.plan import StepPlan
from nosa_sys.errors import ConfigError
from nosa_sys.traces.schema import WHOLE_STEP_LAYER
from nosa_sys.traces.writer import Column, FlatLists

Columns = dict[str, Column]

_TABLE_BYTES = 2**20  # what count_shared marks blocks in: it fits a core's cache


class SelectionHistory:
    """Rows of table selections, and each sequence's last ids, which gamma is counted against."""

    def __init__(self) -> None:
        self._previous: dict[int, NDArray[np.int32]] = {}  # [layer, head, k], -1 padded

    def forget(self, sequence: int) -> None:
        self._previous.pop(sequence, None)

    def columns(self, plan: StepPlan, block_bytes: int) -> Columns:
        """Rows ordered by sequence, layer, head, of arrays of their own. ConfigError for a plan without selection."""
        batch, (n_layers, n_rows, n_heads) = plan.batch, plan.n_misses.shape
        if plan.block_ids is None or plan.origins is None or plan.counts is None:
            raise ConfigError(f"the plan of step {batch.step} holds no selection; ask the runner to record it")
        per_row = n_layers * n_heads
        ids = _by_row(plan.block_ids)  # [batch, layer, head, k]
        counts = np.repeat(plan.counts.astype(np.int64), per_row)
        misses = _by_row(plan.n_misses).ravel().astype(np.int64)
        shared = self._shared(batch.sequences, batch.cold, ids)
        self._previous.update(zip(batch.sequences, ids, strict=True))
        return {
            "step": np.full(misses.size, batch.step),
            "position": np.repeat(batch.positions, per_row),
            "sequence": np.repeat(batch.sequences, per_row),
            "layer": np.tile(np.repeat(np.arange(n_layers), n_heads), n_rows),
            "kv_head": np.tile(np.arange(n_heads), n_rows * n_layers),
            "block_ids": FlatLists.from_padded(ids.reshape(misses.size, -1), counts),
            "origins": FlatLists.from_padded(_by_row(plan.origins).reshape(misses.size, -1), counts),
            "n_misses": misses,
            "h2d_bytes": misses * block_bytes,
            "gamma": shared.ravel() / counts,
            "cold": np.repeat(batch.cold, per_row),
        }

    def _shared(self, sequences: Sequence[int], cold: Sequence[bool], ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """Blocks shared with each sequence's ids of its step before [batch, layer, head]; NaN for cold rows."""
        shared = np.full(ids.shape[:3], np.nan)
        warm = [row for row, is_cold in enumerate(cold) if not is_cold]
        if warm:
            before = [self._previous[sequences[row]] for row in warm]
            previous = np.full((len(warm), *ids.shape[1:3], max(b.shape[-1] for b in before)), -1, dtype=np.int32)
            for place, one in zip(previous, before, strict=True):
                place[..., : one.shape[-1]] = one
            shared[warm] = count_shared(ids if len(warm) == len(ids) else ids[warm], previous)
        return shared


def step_columns(plan: StepPlan, block_bytes: int) -> Columns:
    """Table steps: a row for each layer, and one for the whole step."""
    batch, (n_layers, _, n_heads) = plan.batch, plan.n_misses.shape
    misses = plan.n_misses.sum(axis=(1, 2), dtype=np.int64)
    zeros = np.zeros(n_layers + 1, dtype=np.int64)
    columns: Columns = {
        "step": zeros + batch.step,
        "layer": np.append(np.arange(n_layers), WHOLE_STEP_LAYER),
        "n_sequences": zeros + batch.size,
        "n_misses": _with_sum(misses),
        "h2d_bytes": _with_sum(misses * block_bytes),
        "d2h_bytes": _with_sum(np.full(n_layers, batch.n_written_back * n_heads * block_bytes)),
    }
    for name, loads in (("prefetch_bytes", plan.prefetch_loads), ("wasted_prefetch_bytes", plan.wasted_loads)):
        columns[name] = zeros if loads is None else _with_sum(loads.astype(np.int64) * block_bytes)
    layer_us = np.full(n_layers, np.nan)
    if plan.phase_us is not None:
        layer_us = np.sum([plan.phase_us[name] for name in PHASES], axis=0)
        columns |= {name: _with_sum(plan.phase_us[name]) for name in PHASES}
    return {**columns, "time_us": np.append(layer_us, plan.time_us)}


def score_columns(plan: StepPlan, scores: NDArray[np.float32]) -> Columns:
    """Table scores out of window scores [layer, batch, kv_head, window], ordered by layer, row, head."""
    layer, row, head = _axes(scores.shape[:3])
    return {
        "step": np.full(len(layer), plan.batch.step),
        "sequence": np.array(plan.batch.sequences)[row],
        "layer": layer,
        "kv_head": head,
        "window_scores": FlatLists.from_padded(
            scores.reshape(len(layer), scores.shape[3]), np.array(plan.batch.windows)[row]
        ),
    }


def new_beta_columns(plan: StepPlan, means: NDArray[np.float32]) -> Columns:
    """Table betas out of the windows that a step completes, means [layer, row of windows_done, kv_head]."""
    done = np.array(plan.batch.windows_done, dtype=np.int64)
    layer, row, head = _axes(means.shape)
    return {
        "sequence": np.array(plan.batch.sequences)[done][row],
        "layer": layer,
        "kv_head": head,
        "window": np.array(plan.batch.windows)[done][row] - 1,
        "beta_mean": means.ravel(),
    }


def first_beta_columns(sequence: int, means: NDArray[Any]) -> Columns:
    """Table betas out of the windows of a prefill, means [layer, kv_head, window]."""
    layer, head, window = _axes(means.shape)
    return {
        "sequence": np.full(means.size, sequence),
        "layer": layer,
        "kv_head": head,
        "window": window,
        "beta_mean": means.ravel(),
    }


def count_shared(ids: NDArray[Any], previous: NDArray[Any]) -> NDArray[np.int64]:
    """|G & Gprev| of each row: int [..., k] and [..., k'], -1 padded, no id twice in a row -> int64 [...]."""
    shape, k = ids.shape[:-1], ids.shape[-1]
    ids, previous = ids.reshape(-1, k), previous.reshape(-1, previous.shape[-1])
    span = int(max(ids.max(initial=0), previous.max(initial=0))) + 2  # column 0 is for padding
    at_once = max(1, min(len(ids), _TABLE_BYTES // span))
    begins = np.arange(at_once)[:, None] * span + 1
    shared = np.empty(len(ids), dtype=np.int64)
    for first in range(0, len(ids), at_once):
        rows = slice(first, first + at_once)
        here = begins[: len(ids[rows])]
        table = np.zeros(len(here) * span, dtype=np.uint8)
        table[(previous[rows] + here).ravel()] = 1
        table[::span] = 0
        shared[rows] = table[(ids[rows] + here).ravel()].reshape(-1, k).sum(axis=1)
    return shared.reshape(shape)


def _axes(shape: Iterable[int]) -> list[NDArray[Any]]:
    return [axis.ravel() for axis in np.indices(tuple(shape))]


def _by_row(values: NDArray[Any]) -> NDArray[Any]:
    """[layer, batch, ...] -> a copy [batch, layer, ...]."""
    return np.array(values.swapaxes(0, 1), order="C")


def _with_sum(values: NDArray[Any]) -> NDArray[Any]:
    return np.append(values, values.sum())
