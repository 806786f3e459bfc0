"""Workload: the misses of every step and layer, from a trace's own situation or drawn for another one.

The rules for another situation: sequences beyond the recorded ones are recorded ones with seeded time offsets, layers
map by relative depth, KV heads cyclically. Each rule used is written down in ``rules``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from nosa_sys.errors import CapacityError, ConfigError, TraceError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.host_storage import HostStorage
from nosa_sys.simulator.memory import MemoryUse, memory_use
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses, MissTable
from nosa_sys.traces.playback import heads_in_turn, layers_by_depth

# Above these a mistyped step count would fill memory, a mistyped batch run for hours.
MAX_CELLS = 2**24  # [step, layer] entries
MAX_BATCH = 2**16


@dataclass(frozen=True)
class Workload:
    """A situation ready to be priced.

    ``own_situation``: exactly what was recorded or replayed, nothing drawn. ``first_half``: what of ``loads`` belongs
    to the first half of each step's rows, the smaller half where they are odd. ``recorded_schedule``: that of the
    trace, None where misses have no trace. ``key_means_dtype``: float32 or model, in memory alone.
    """

    loads: LayerStepMisses
    shape: ModelShape
    sparse: SparseConfig
    method: str
    slots: int
    policy: str
    host_block_bytes: int
    device_block_bytes: int
    batch: int
    context_tokens: int
    own_situation: bool
    first_half: LayerStepMisses
    recorded_schedule: str | None = None
    rules: tuple[str, ...] = ()
    storage: HostStorage | None = None
    key_means_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not len(self.loads):
            raise TraceError("the workload has no decode step; capture at least one generated token")
        if not get_method(self.method).dense and self.slots < self.sparse.topk:
            raise CapacityError(f"slots={self.slots} must be >= topk={self.sparse.topk}, the blocks of one step")

    def stored_as(self, storage: HostStorage | None) -> Workload:
        """The same situation with host blocks in another format, thereby a projection; None leaves it as it is."""
        if storage is None:
            return self
        host_bytes = self.shape.kv_block_bytes(self.sparse.block_size, str(storage.format))
        if host_bytes == self.host_block_bytes and not storage.format.quantised:
            return self
        return dataclasses.replace(self, host_block_bytes=host_bytes, own_situation=False, storage=storage)

    def memory(self) -> MemoryUse:
        return memory_use(
            self.shape,
            self.sparse,
            self.method,
            slots=self.slots,
            batch=self.batch,
            context_tokens=self.context_tokens,
            host_block_bytes=self.host_block_bytes,
            device_block_bytes=self.device_block_bytes,
            key_means_dtype=self.key_means_dtype,
        )

    def settings(self) -> dict[str, Any]:
        """The resolved values that a reader of the prediction needs."""
        return {
            "model_shape": self.shape.name,
            "method": self.method,
            "sparse": self.sparse.to_dict(),
            "k_e": self.sparse.k_e,
            "slots": self.slots,
            "policy": self.policy,
            "batch": self.batch,
            "context_tokens": self.context_tokens,
            "block_bytes": self.host_block_bytes,
            "host_kv_dtype": None if self.storage is None else str(self.storage.format),
        }


@dataclass(frozen=True)
class SequenceHistory:
    """One sequence's rows: ``position`` and ``cold`` [step]; ``n_misses`` and ``n_selected`` [step, layer, kv_head]."""

    position: np.ndarray
    cold: np.ndarray
    n_misses: np.ndarray
    n_selected: np.ndarray

    def for_shape(self, shape: ModelShape) -> SequenceHistory:
        """Sums over the KV heads of another model, kept as one head: [step, layer', 1]."""
        _, layers, heads = self.n_misses.shape
        layer = layers_by_depth(shape.n_layers, layers)
        repeats = np.bincount(heads_in_turn(shape.n_kv_heads, heads), minlength=heads)

        def mapped(values: np.ndarray) -> np.ndarray:
            return (values.astype(np.int64) @ repeats)[:, layer, None]

        return SequenceHistory(self.position, self.cold, mapped(self.n_misses), mapped(self.n_selected))

    def rows_at(self, n_steps: int, offset: int) -> np.ndarray:
        """Rows to play at steps 0..n_steps-1: the cold row first where there is one, then warm rows from ``offset`` on.

        The warm rows start over at their end.
        """
        warm = np.flatnonzero(~self.cold)
        lead = np.flatnonzero(self.cold)[:1]
        n_warm = n_steps - len(lead)
        if n_warm > 0 and not len(warm):
            raise ConfigError(
                f"steps={n_steps} needs more than the cold row that sequences of this trace have; "
                "capture at least 2 tokens"
            )
        return np.concatenate([lead, warm[(offset + np.arange(max(0, n_warm))) % max(1, len(warm))]])[:n_steps]


def histories_of(table: MissTable) -> list[SequenceHistory]:
    """Split a miss table by sequence, in ascending id. TraceError where a step lacks a layer or head."""
    found = []
    per_step = table.n_layers * table.n_kv_heads
    for sequence in np.unique(table.sequence):
        rows = np.flatnonzero(table.sequence == sequence)
        n_steps = len(np.unique(table.step[rows]))
        complete = len(rows) == n_steps * per_step
        cells = table.layer[rows].astype(np.int64) * table.n_kv_heads + table.kv_head[rows]
        if not complete or not np.array_equal(cells, np.tile(np.arange(per_step), n_steps)):
            raise TraceError(
                f"sequence {sequence} has {len(rows)} rows for {n_steps} steps of {table.n_layers} layers x "
                f"{table.n_kv_heads} KV heads; another batch or model needs every one of them"
            )
        shape = (n_steps, table.n_layers, table.n_kv_heads)
        found.append(
            SequenceHistory(
                table.position[rows][::per_step].astype(np.int64),
                np.any(table.cold[rows].reshape(n_steps, per_step), axis=1),
                table.n_misses[rows].reshape(shape),
                table.n_selected[rows].reshape(shape),
            )
        )
    return found


def check_size(shape: ModelShape, batch: int, steps: int) -> None:
    """Refuse a situation that is too large to simulate, before any work."""
    if batch > MAX_BATCH:
        raise CapacityError(f"batch={batch} exceeds the limit of {MAX_BATCH}")
    if steps * shape.n_layers > MAX_CELLS:
        raise CapacityError(
            f"steps={steps} of {shape.n_layers} layers exceed the limit of {MAX_CELLS // shape.n_layers}"
        )


def draw_loads(
    histories: list[SequenceHistory],
    shape: ModelShape,
    *,
    batch: int,
    steps: int,
    block_size: int,
    dense: bool,
    rng: np.random.Generator,
) -> tuple[LayerStepMisses, LayerStepMisses]:
    """Play ``batch`` sequences side by side for ``steps`` steps: (all of them, the first half of them).

    The first sequences are the histories themselves; each further one is a history (in turn) whose warm rows start at
    a drawn offset, so that births and misses of copies are not in step.
    """
    check_size(shape, batch, steps)
    mapped = [h.for_shape(shape) for h in histories]
    cells = (steps, shape.n_layers)
    misses, filled, attended = (np.zeros(cells, dtype=np.int64) for _ in range(3))
    context, cold = np.zeros(steps, dtype=np.int64), np.zeros(steps, dtype=np.bool_)
    for index in range(batch):
        history = mapped[index % len(mapped)]
        n_warm = int((~history.cold).sum())
        offset = int(rng.integers(n_warm)) if index >= len(mapped) and n_warm else 0
        rows = history.rows_at(steps, offset)
        misses += history.n_misses[rows, :, 0]
        attended += history.n_selected[rows, :, 0]
        position = history.position[rows]
        context += position + 1
        cold |= history.cold[rows]
        if not dense:
            filled += (((position + 1) % block_size == 0) * shape.n_kv_heads)[:, None]
        if index + 1 == n_first_half(batch):
            first = _sums(n_first_half(batch), misses, filled, attended, context, cold)
    return _sums(batch, misses, filled, attended, context, cold), first


def n_first_half(n_rows: Any) -> Any:
    """Rows of a batch (or of each of several, an array) that the first of two halves has; one row is all of it."""
    return np.maximum(1, n_rows // 2)


def second_half(loads: LayerStepMisses, first: LayerStepMisses) -> LayerStepMisses:
    """What is left of a workload without the first half of its rows."""
    return dataclasses.replace(
        loads,
        n_sequences=loads.n_sequences - first.n_sequences,
        misses=loads.misses - first.misses,
        filled_blocks=loads.filled_blocks - first.filled_blocks,
        attended_blocks=loads.attended_blocks - first.attended_blocks,
        context_tokens=loads.context_tokens - first.context_tokens,
    )


def first_half_of(table: MissTable) -> LayerStepMisses:
    """The loads of the first half of each step's rows, sequences in ascending id."""
    pairs, row = np.unique(np.stack([table.step, table.sequence], axis=1), axis=0, return_inverse=True)
    _, begin, n_rows = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    rank = np.arange(len(pairs)) - np.repeat(begin, n_rows)
    keep = (rank < np.repeat(n_first_half(n_rows), n_rows))[row.reshape(-1)]
    columns = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    kept: dict[str, Any] = {name: value[keep] for name, value in columns.items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(table, **kept).per_layer_step()


def _sums(
    batch: int,
    misses: np.ndarray,
    filled: np.ndarray,
    attended: np.ndarray,
    context: np.ndarray,
    cold: np.ndarray,
) -> LayerStepMisses:
    n_steps = len(context)
    return LayerStepMisses(
        steps=np.arange(n_steps, dtype=np.int32),
        n_sequences=np.full(n_steps, batch, dtype=np.int32),
        misses=misses.copy(),
        filled_blocks=filled.copy(),
        attended_blocks=attended.copy(),
        context_tokens=context.copy(),
        cold=cold.copy(),
    )
