"""Playing recorded sequences in another situation: which recorded layer, head and rows stand for which new ones.

Layers map by relative depth, KV heads cyclically, further sequences are recorded ones with time offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.traces.reader import Trace


def layers_by_depth(n_layers: int, n_recorded: int) -> np.ndarray:
    """Recorded layer int64 [n_layers] that stands for each layer of another model.

    >>> layers_by_depth(4, 2).tolist(), layers_by_depth(2, 4).tolist()
    ([0, 0, 1, 1], [1, 3])
    """
    return ((np.arange(n_layers) + 0.5) * n_recorded / n_layers).astype(np.int64)


def heads_in_turn(n_kv_heads: int, n_recorded: int) -> np.ndarray:
    """Recorded KV head int64 [n_kv_heads] that stands for each head of another model.

    >>> heads_in_turn(5, 3).tolist()
    [0, 1, 2, 0, 1]
    """
    return np.arange(n_kv_heads) % n_recorded


@dataclass(frozen=True)
class RecordedSets:
    """What one sequence selected: ``position`` int64 [step]; ``ids`` int32 [step, layer, kv_head, k], ascending,
    -1 padded."""

    sequence: int
    position: np.ndarray
    ids: np.ndarray


def recorded_sets(trace: Trace) -> list[RecordedSets]:
    """The selections of every sequence of a trace, in ascending id.

    TraceError for dense attention (nothing was selected), where a step lacks a layer or head, where positions have a
    gap, or where a row holds more than k blocks.
    """
    meta, rows = trace.meta, trace.selections
    if meta.method == "full":
        raise TraceError(f"{trace.directory} holds dense attention, which selects nothing; capture a sparse method")
    k = meta.sparse.topk
    per_step = meta.model.n_layers * meta.model.n_kv_heads
    order = np.lexsort((rows.kv_head, rows.layer, rows.position, rows.sequence))
    rows = rows.take(order)
    counts = rows.n_selected
    if counts.max(initial=0) > k:
        raise TraceError(f"{trace.directory}: a row selects {counts.max()} blocks, more than topk={k}")
    padded = np.full((len(rows), k), -1, dtype=np.int32)
    place = np.arange(len(rows.block_ids)) - np.repeat(rows.offsets[:-1], counts)
    padded[rows.row_of_entry, place] = rows.block_ids
    cells = rows.layer.astype(np.int64) * meta.model.n_kv_heads + rows.kv_head
    found = []
    for sequence in np.unique(rows.sequence):
        own = rows.sequence == sequence
        n_steps = int(own.sum()) // per_step
        if not np.array_equal(cells[own], np.tile(np.arange(per_step), n_steps)):
            raise TraceError(
                f"{trace.directory}: sequence {sequence} lacks rows of some of its {meta.model.n_layers} layers x "
                f"{meta.model.n_kv_heads} KV heads; nosa trace check says which"
            )
        position = rows.position[own][::per_step].astype(np.int64)
        if len(position) and not np.array_equal(position, np.arange(position[0], position[0] + n_steps)):
            raise TraceError(f"{trace.directory}: positions of sequence {sequence} have a gap")
        shape = (n_steps, meta.model.n_layers, meta.model.n_kv_heads, k)
        found.append(RecordedSets(int(sequence), position, padded[own].reshape(shape)))
    return found
