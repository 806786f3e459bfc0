"""Compact traces: the same rows in an order that compresses, scores rounded or left out, some sequences alone.

A compact trace is a trace like any other: it passes the check, and what it still holds replays to the same figures.
Steps keep their whole-step row; those of single layers are sums of the selections, and times that do not compress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nosa_sys.errors import TraceError
from nosa_sys.methods import get_method
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.reselect import match_keys, n_blocks_of, reselect
from nosa_sys.traces.rows import SelectionRows, column, list_column
from nosa_sys.traces.schema import SCHEMAS, WHOLE_STEP_LAYER, TraceMeta
from nosa_sys.traces.writer import TraceWriter

FULL_BITS = 24  # of a float32, the leading one included
_MORE_BITS = 4  # for a row whose rounded scores select other blocks
_ROW = ("step", "sequence", "layer", "kv_head")
_ORDER = {
    "selections": ("sequence", "layer", "kv_head", "step"),
    "scores": ("sequence", "layer", "kv_head", "step"),
    "betas": ("sequence", "layer", "kv_head", "window"),
    "steps": ("layer", "step"),
    "prefill": ("sequence", "layer"),
}


def compact_trace(
    trace: Trace, directory: Path, *, sequences: Sequence[int] | None = None, score_bits: int | None = None
) -> TraceMeta:
    """Write ``trace`` anew into ``directory``, small; returns its meta.

    Rows are ordered stream by stream, so that a selection stands beside the one before it. ``sequences`` keeps those
    alone (default: all); sums of their steps are then made anew, without times, which were those of the whole batch.
    ``score_bits``: significant bits of the scores kept, FULL_BITS for all; None leaves out scores and betas. Rows whose
    rounded scores would select other blocks keep more of them. Raises TraceError for sequences that the trace lacks,
    and for some of the sequences of a trace with prefetched bytes, which belong to no sequence.
    """
    tables = {name: trace.table(name) for name in SCHEMAS if trace.has(name)}
    tables["steps"] = tables["steps"].filter(pa.array(column(tables["steps"], "layer") == WHOLE_STEP_LAYER))
    meta = trace.meta
    if score_bits is None:
        tables = {name: table for name, table in tables.items() if name not in ("scores", "betas")}
    elif not 1 <= score_bits <= FULL_BITS:
        raise TraceError(f"score_bits={score_bits} must lie in [1, {FULL_BITS}]")
    if sequences is not None:
        meta, tables = _some_sequences(trace, tables, sorted(set(sequences)))
    tables = {name: _ordered(name, table) for name, table in tables.items()}
    if score_bits is not None and score_bits < FULL_BITS and "scores" in tables:
        tables["scores"] = _rounded_scores(Trace(trace.directory, meta, tables=tables), score_bits)
    writer = TraceWriter(directory, meta, smallest=True, overwrite=True)
    for name in SCHEMAS:
        if name in tables:
            writer.add_table(name, tables[name])
    writer.close(sequences=meta.sequences, n_steps=meta.n_steps)
    return writer.meta


def _ordered(name: str, table: pa.Table) -> pa.Table:
    order = np.lexsort([column(table, key) for key in reversed(_ORDER[name])])
    return table.take(pa.array(order)).combine_chunks()


def _some_sequences(
    trace: Trace, tables: dict[str, pa.Table], kept: list[int]
) -> tuple[TraceMeta, dict[str, pa.Table]]:
    meta = trace.meta
    known = {info.id: info for info in meta.sequences}
    if not kept or (missing := [number for number in kept if number not in known]):
        raise TraceError(
            f"trace {trace.directory} has no sequence {missing[0] if kept else 'left'}; it has {list(known)}"
        )
    own = {
        name: table.filter(pa.array(np.isin(column(table, "sequence"), kept)))
        for name, table in tables.items()
        if name != "steps"
    }
    infos = tuple(known[number] for number in kept)
    forced = dict(meta.forced_tokens)
    if forced:  # the digest was that of all sequences
        forced = {"source": forced.get("source", ""), "tokens": sum(info.new_tokens for info in infos)}
    steps = _step_sums(trace, own["selections"])
    n_steps = len(np.unique(column(steps, "step")))
    return dataclasses.replace(meta, sequences=infos, forced_tokens=forced, n_steps=n_steps), own | {"steps": steps}


def _step_sums(trace: Trace, selections: pa.Table) -> pa.Table:
    """Whole-step rows of table `steps` for these selection rows."""
    meta, before = trace.meta, trace.table("steps")
    if column(before, "prefetch_bytes").any() or column(before, "wasted_prefetch_bytes").any():
        raise TraceError(f"trace {trace.directory} has prefetched bytes, which belong to no sequence; keep all of them")
    step, of_row = np.unique(column(selections, "step"), return_inverse=True)
    members = np.unique(np.stack([of_row, column(selections, "sequence")], axis=1), axis=0)
    fills = (column(selections, "position") + 1) % meta.sparse.block_size == 0
    writes_back = fills & (not get_method(meta.method).dense)

    def summed(values: np.ndarray) -> np.ndarray:
        total = np.zeros(len(step), dtype=np.int64)
        np.add.at(total, of_row, values)
        return total

    columns = {
        "step": step,
        "layer": np.full(len(step), WHOLE_STEP_LAYER),
        "n_sequences": np.bincount(members[:, 0]),
        "n_misses": summed(column(selections, "n_misses")),
        "h2d_bytes": summed(column(selections, "h2d_bytes")),
        "d2h_bytes": summed(writes_back * meta.block_bytes),
        "prefetch_bytes": np.zeros(len(step)),
        "wasted_prefetch_bytes": np.zeros(len(step)),
    }
    arrays = [
        pa.array(columns[field.name].astype(field.type.to_pandas_dtype()), type=field.type)
        if field.name in columns
        else pa.nulls(len(step), field.type)
        for field in SCHEMAS["steps"]
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMAS["steps"])


def round_scores(values: np.ndarray, bits: int) -> np.ndarray:
    """float32 values >= 0 with ``bits`` significant bits, to the nearest, halves up: their order stays, ties appear.

    >>> round_scores(np.array([1.0, 1.1, 1.24, 3.0], dtype=np.float32), 3).tolist()
    [1.0, 1.0, 1.25, 3.0]
    """
    dropped = FULL_BITS - bits
    raw = np.ascontiguousarray(values).view(np.uint32)
    return (((raw + (1 << dropped >> 1)) >> dropped) << dropped).astype(np.uint32).view(np.float32)


def _rounded_scores(trace: Trace, bits: int) -> pa.Table:
    """Table `scores` rounded; rows that would select other blocks than captured keep more bits, all where need be."""
    table, meta = trace.table("scores"), trace.meta
    values, offsets = list_column(table, "window_scores")
    rounded = round_scores(values, bits)
    method = get_method(meta.method)
    if not method.dense and method.query_aware_picks(meta.sparse, meta.sparse.n_forced):
        rows = trace.selections
        rows = rows.take(n_blocks_of(rows.position, meta.sparse) > meta.sparse.topk)
        keys = np.stack([column(table, key).astype(np.int64) for key in _ROW], axis=1)
        while bits < FULL_BITS and len(rows):
            wrong = _selects_otherwise(trace, _with_scores(table, offsets, rounded), rows)
            rows = rows.take(wrong)
            bits = min(FULL_BITS, bits + _MORE_BITS)
            again = match_keys(keys, np.stack([getattr(rows, key).astype(np.int64) for key in _ROW], axis=1)) >= 0
            of_value = np.repeat(again, np.diff(offsets))
            rounded[of_value] = round_scores(values[of_value], bits)
    return _with_scores(table, offsets, rounded)


def _with_scores(table: pa.Table, offsets: np.ndarray, values: np.ndarray) -> pa.Table:
    index = table.schema.get_field_index("window_scores")
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
    return table.set_column(index, table.schema.field(index), lists)


def _selects_otherwise(trace: Trace, scores: pa.Table, rows: SelectionRows) -> np.ndarray:
    """bool [row]: rows that ``scores`` would give other blocks or origins than recorded."""
    tables = {name: trace.table(name) for name in SCHEMAS if trace.has(name)} | {"scores": scores}
    method = get_method(trace.meta.method)
    again = reselect(Trace(trace.directory, trace.meta, tables=tables), rows, trace.meta.sparse, method)
    differs = (rows.block_ids != again.block_ids) | (rows.origins != again.origins)
    return np.asarray(np.bincount(rows.row_of_entry[differs], minlength=len(rows)) > 0)
