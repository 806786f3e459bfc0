"""MissTable: who missed how many blocks at which step; what the simulator consumes, from a capture or a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.methods import get_method
from nosa_sys.traces.reader import Trace


@dataclass(frozen=True)
class LayerStepMisses:
    """Sums of a MissTable over the sequences and KV heads of each step and layer.

    ``steps``, ``n_sequences``, ``context_tokens`` and ``cold`` are ``[step]``; ``misses``, ``filled_blocks`` (blocks
    written back because the step's token fills them) and ``attended_blocks`` are ``[step, layer]`` and count blocks
    of one KV head each. ``context_tokens`` sums p + 1 over the step's sequences; ``cold`` marks steps with any cold
    row.
    """

    steps: np.ndarray
    n_sequences: np.ndarray
    misses: np.ndarray
    filled_blocks: np.ndarray
    attended_blocks: np.ndarray
    context_tokens: np.ndarray
    cold: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class MissTable:
    """Demand misses of every (step, sequence, layer, KV head), rows sorted by these keys.

    Columns are equally long numpy arrays ``[row]``. ``n_misses`` counts blocks loaded from the host: blocks of the
    selection that were not resident, the current block left out. ``block_bytes`` is what one of them moves
    (2 * block * D * e_host).
    """

    step: np.ndarray
    position: np.ndarray
    sequence: np.ndarray
    layer: np.ndarray
    kv_head: np.ndarray
    n_selected: np.ndarray
    n_misses: np.ndarray
    cold: np.ndarray
    block_bytes: int
    block_size: int
    n_layers: int
    n_kv_heads: int
    method: str = "nosa"
    assumptions: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def from_trace(cls, trace: Trace) -> MissTable:
        """The misses as they were recorded."""
        rows = trace.selections
        order = np.lexsort((rows.kv_head, rows.layer, rows.sequence, rows.step))
        meta = trace.meta
        table = cls(
            step=rows.step[order],
            position=rows.position[order],
            sequence=rows.sequence[order],
            layer=rows.layer[order],
            kv_head=rows.kv_head[order],
            n_selected=rows.n_selected[order].astype(np.int32),
            n_misses=rows.n_misses[order],
            cold=rows.cold[order],
            block_bytes=meta.block_bytes,
            block_size=meta.sparse.block_size,
            n_layers=meta.model.n_layers,
            n_kv_heads=meta.model.n_kv_heads,
            method=meta.method,
            assumptions=[*trace.notes],
        )
        table.check_ranges(str(trace.directory))
        return table

    def check_ranges(self, source: str) -> None:
        """Refuse layers and heads that the model does not have, and negative counts: the sums below rely on it."""
        for name, values, limit in (("layer", self.layer, self.n_layers), ("kv_head", self.kv_head, self.n_kv_heads)):
            bad = np.flatnonzero((values < 0) | (values >= limit))
            if len(bad):
                raise TraceError(f"trace {source}: {name}={values[bad[0]]} is outside [0, {limit})")
        for name, values in (("position", self.position), ("n_misses", self.n_misses)):
            if len(values) and values.min() < 0:
                raise TraceError(f"trace {source}: {name}={values.min()} is negative")

    @property
    def h2d_bytes_total(self) -> int:
        """All demand bytes, cold rows included."""
        return int(self.n_misses.sum(dtype=np.int64)) * self.block_bytes

    @property
    def d2h_bytes_total(self) -> int:
        """All write-back bytes of decode: one block per KV head at the step whose token fills it."""
        return int(self._fills().sum()) * self.block_bytes

    def _fills(self) -> np.ndarray:
        """Whether the row's token fills its block and that block goes to the host, bool [row]."""
        if get_method(self.method).dense:  # no host tier
            return np.zeros(len(self), dtype=np.bool_)
        return (self.position.astype(np.int64) + 1) % self.block_size == 0

    def per_layer_step(self) -> LayerStepMisses:
        """Sum over sequences and KV heads."""
        steps, step_index = np.unique(self.step, return_inverse=True)
        shape = (len(steps), self.n_layers)
        cell = step_index * self.n_layers + self.layer

        def total(weights: np.ndarray) -> np.ndarray:
            sums = np.zeros(shape[0] * shape[1], dtype=np.int64)
            np.add.at(sums, cell, weights.astype(np.int64))
            return sums.reshape(shape)

        pairs = np.unique(np.stack([step_index, self.sequence], axis=1), axis=0, return_index=True)[1]
        context = np.zeros(len(steps), dtype=np.int64)
        np.add.at(context, step_index[pairs], self.position[pairs].astype(np.int64) + 1)
        return LayerStepMisses(
            steps=steps.astype(np.int32),
            n_sequences=np.bincount(step_index[pairs], minlength=len(steps)).astype(np.int32),
            misses=total(self.n_misses),
            filled_blocks=total(self._fills()),
            attended_blocks=total(self.n_selected),
            context_tokens=context,
            cold=np.bincount(step_index, weights=self.cold, minlength=len(steps)) > 0,
        )
