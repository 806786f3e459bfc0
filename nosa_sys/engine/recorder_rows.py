"""Rows of the trace tables, built from step plans by whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.plan import StepBatch, StepPlan
from nosa_sys.errors import ConfigError
from nosa_sys.traces.schema import WHOLE_STEP_LAYER
from nosa_sys.traces.writer import Column, FlatLists

Columns = dict[str, Column]

_TABLE_BYTES = 2**20  # what count_shared marks blocks in: it fits a core's cache


class SelectionHistory:
    """Rows of table selections, and each sequence's last ids, which gamma is counted against."""

    def __init__(self) -> None:
        self._ids: NDArray[np.int32] | None = None  # [row, layer, head, k], -1 padded
        self._row_of: dict[int, int] = {}  # sequence -> its row

    def forget(self, sequence: int) -> None:
        self._row_of.pop(sequence, None)

    def columns(self, plans: Sequence[StepPlan], block_bytes: int) -> Columns:
        """Rows of consecutive steps, each ordered by sequence, layer, head, of arrays of their own. Many steps at once
        cost little more Python than one. ConfigError for a plan without selection."""
        batches = [plan.batch for plan in plans]
        n_layers, _, n_heads = plans[0].n_misses.shape
        per_row = n_layers * n_heads
        selections = [selection_of(plan) for plan in plans]
        n_rows = sum(batch.size for batch in batches)
        counts = np.repeat(np.concatenate([of.counts for of in selections]).astype(np.int64), per_row)
        misses = _by_row([plan.n_misses for plan in plans]).ravel().astype(np.int64)
        ids, shared = self._shared(batches, [of.block_ids for of in selections])
        return {
            "step": np.repeat([batch.step for batch in batches], [batch.size * per_row for batch in batches]),
            "position": np.repeat(_joined(batch.positions for batch in batches), per_row),
            "sequence": np.repeat(_joined(batch.sequences for batch in batches), per_row),
            "layer": np.tile(np.repeat(np.arange(n_layers), n_heads), n_rows),
            "kv_head": np.tile(np.arange(n_heads), n_rows * n_layers),
            "block_ids": FlatLists.from_padded(ids.reshape(misses.size, -1), counts),
            "origins": FlatLists.from_padded(
                _by_row([of.origins for of in selections]).reshape(misses.size, -1), counts
            ),
            "n_misses": misses,
            "h2d_bytes": misses * block_bytes,
            "gamma": shared.ravel() / counts,
            "cold": np.repeat(_joined(batch.cold for batch in batches), per_row),
        }

    def _shared(
        self, batches: Sequence[StepBatch], block_ids: Sequence[NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The ids of all rows [row, layer, head, k], and how many each shares with its sequence's ids of the step
        before [row, layer, head]; NaN for cold rows."""
        kept = [] if self._ids is None else [self._ids.swapaxes(0, 1)]
        ids = _by_row([*kept, *block_ids])
        n_kept = 0 if self._ids is None else len(self._ids)
        row_of, warm, before = self._row_of, [], []
        pairs = (pair for batch in batches for pair in zip(batch.sequences, batch.cold, strict=True))
        for row, (sequence, is_cold) in enumerate(pairs, n_kept):
            if not is_cold:
                warm.append(row)
                before.append(row_of[sequence])
            row_of[sequence] = row
        shared = np.full(ids.shape[:3], np.nan)
        if warm:
            here = ids[n_kept:] if len(warm) == len(ids) - n_kept else ids[warm]
            shared[warm] = count_shared(here, ids[before])
        self._ids = ids[list(row_of.values())]
        self._row_of = {sequence: row for row, sequence in enumerate(row_of)}
        return ids[n_kept:], shared[n_kept:]


class Selected(NamedTuple):
    """What a plan with a selection holds of it (see StepPlan)."""

    block_ids: NDArray[np.int32]
    origins: NDArray[np.int8]
    counts: NDArray[np.int32]


def selection_of(plan: StepPlan) -> Selected:
    """ConfigError for a plan without its selection."""
    if plan.block_ids is None or plan.origins is None or plan.counts is None:
        raise ConfigError(f"the plan of step {plan.batch.step} holds no selection; ask the runner to record it")
    return Selected(plan.block_ids, plan.origins, plan.counts)


def step_columns(plans: Sequence[StepPlan], block_bytes: int) -> Columns:
    """Table steps: for each step a row for each layer, and one for the whole step."""
    n_layers, _, n_heads = plans[0].n_misses.shape
    misses = np.array([plan.n_misses.sum(axis=(1, 2), dtype=np.int64) for plan in plans])  # [step, layer]
    written = np.array([[plan.batch.n_written_back * n_heads * block_bytes] for plan in plans])
    columns: Columns = {
        "step": np.repeat([plan.batch.step for plan in plans], n_layers + 1),
        "layer": np.tile(np.append(np.arange(n_layers), WHOLE_STEP_LAYER), len(plans)),
        "n_sequences": np.repeat([plan.batch.size for plan in plans], n_layers + 1),
        "n_misses": _with_sums(misses),
        "h2d_bytes": _with_sums(misses * block_bytes),
        "d2h_bytes": _with_sums(np.repeat(written, n_layers, axis=1)),
    }
    none = np.zeros(n_layers, dtype=np.int64)
    for name, loads in (
        ("prefetch_bytes", [plan.prefetch_loads for plan in plans]),
        ("wasted_prefetch_bytes", [plan.wasted_loads for plan in plans]),
    ):
        columns[name] = _with_sums(np.array([none if of is None else of for of in loads], dtype=np.int64) * block_bytes)
    unknown = np.full(n_layers, np.nan)
    phases_us = {
        name: np.array([unknown if plan.phase_us is None else plan.phase_us[name] for plan in plans]) for name in PHASES
    }
    columns |= {name: _with_sums(times_us) for name, times_us in phases_us.items()}
    layers_us = np.sum(list(phases_us.values()), axis=0)
    columns["time_us"] = np.column_stack([layers_us, [plan.time_us for plan in plans]]).ravel()
    return columns


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


def _by_row(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [layer, row, head, ...] after one another as a copy [row, layer, head, ...], the last axis padded with -1
    where their widths differ."""
    widths = {array.shape[3:] for array in arrays}
    n_layers, _, n_heads = arrays[0].shape[:3]
    shape = (sum(array.shape[1] for array in arrays), n_layers, n_heads, *max(widths))
    found = np.full(shape, -1, arrays[0].dtype) if len(widths) > 1 else np.empty(shape, arrays[0].dtype)
    row = 0
    for array in arrays:
        here = found[row : row + array.shape[1]]
        (here[..., : array.shape[3]] if array.ndim > 3 else here)[...] = array.swapaxes(0, 1)
        row += array.shape[1]
    return found


def _joined(lists: Iterable[Sequence[Any]]) -> NDArray[Any]:
    return np.array(list(itertools.chain.from_iterable(lists)))


def _with_sums(values: NDArray[Any]) -> NDArray[Any]:
    """[step, layer], and the sum of each step behind it, flat."""
    return np.column_stack([values, values.sum(axis=1)]).ravel()
