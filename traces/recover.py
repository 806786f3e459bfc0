"""Recovery of a killed run: keep the steps that are whole on disk, leave out the torn tail, and say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from nosa_sys.errors import TraceError
from nosa_sys.traces.reader import Trace, part_paths, read_part
from nosa_sys.traces.reselect import match_keys, n_windows_of
from nosa_sys.traces.rows import column, find_streams
from nosa_sys.traces.schema import REQUIRED_TABLES, SCHEMAS, WHOLE_STEP_LAYER, SequenceInfo, TraceMeta
from nosa_sys.traces.writer import TraceWriter


def recover_tables(directory: Path, meta: TraceMeta) -> tuple[TraceMeta, dict[str, pa.Table], list[str]]:
    """(meta of what is kept, tables, notes). Reads every part up to the first gap or unreadable one.

    A step is whole when its whole-step row of `steps` is there, together with one selection row for each of that
    row's sequences, layers and KV heads, and one row of scores for each of these where the trace has scores. The
    first step that is not whole ends the trace. Raises TraceError when not even the required tables can be read.
    """
    notes: list[str] = []
    tables: dict[str, pa.Table] = {}
    for name in SCHEMAS:
        table = _readable_parts(directory, name, notes)
        if table is not None:
            tables[name] = table
    for name in REQUIRED_TABLES:
        if name not in tables:
            raise TraceError(f"trace {directory} holds no whole part of table {name!r}; nothing can be recovered")
    last_whole = _last_whole_step(tables, meta)
    for name in ("selections", "steps", "scores"):
        if name in tables:
            keep = column(tables[name], "step") <= last_whole
            if not keep.all():
                notes.append(f"{name}: {int((~keep).sum())} rows of torn steps were left out")
            tables[name] = tables[name].filter(pa.array(keep))
    if "betas" in tables:
        tables["betas"] = _betas_up_to(tables, meta)
    n_steps = len(np.unique(column(tables["steps"], "step")))
    notes.append(f"recovered {n_steps} whole steps of an unfinished run")
    return dataclasses.replace(meta, n_steps=n_steps, sequences=_sequences(tables, meta)), tables, notes


def _readable_parts(directory: Path, name: str, notes: list[str]) -> pa.Table | None:
    parts = []
    every = part_paths(directory, name, stop_at_gap=True)
    for path in every:
        try:
            parts.append(read_part(name, path)[0])
        except TraceError as error:
            notes.append(f"{name}: read {len(parts)} of {len(every)} parts ({error})")
            break
    return pa.concat_tables(parts).combine_chunks() if parts else None


def _last_whole_step(tables: dict[str, pa.Table], meta: TraceMeta) -> int:
    """The last step before the first torn one; -1 if none is whole."""
    steps = tables["steps"]
    step, layer = column(steps, "step"), column(steps, "layer")
    whole_rows = layer == WHOLE_STEP_LAYER
    expected = dict(zip(step[whole_rows].tolist(), column(steps, "n_sequences")[whole_rows].tolist(), strict=True))
    rows_per_sequence = meta.model.n_layers * meta.model.n_kv_heads
    counted = [name for name in ("selections", "scores") if name in tables]
    counts = {name: _counts(column(tables[name], "step")) for name in counted}
    seen = sorted({*step.tolist(), *(s for c in counts.values() for s in c)})
    last = -1
    for number in seen:
        wanted = expected.get(number, -1) * rows_per_sequence
        if wanted < 0 or any(counts[name].get(number, 0) != wanted for name in counted):
            break
        last = number
    return last


def _counts(steps: np.ndarray) -> dict[int, int]:
    values, counts = np.unique(steps, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _betas_up_to(tables: dict[str, pa.Table], meta: TraceMeta) -> pa.Table:
    """Betas of the kept steps: windows that are complete at the stream's last kept position."""
    selections, betas = tables["selections"], tables["betas"]
    names = ("sequence", "layer", "kv_head")
    keys = [column(selections, name) for name in names]
    streams = find_streams(keys[0], keys[1], keys[2], column(selections, "step"))
    last = streams.order[streams.first + streams.lengths - 1] if streams.n_streams else streams.first
    complete = np.append(n_windows_of(column(selections, "position")[last], meta.sparse), 0)
    ours = np.stack([key[last].astype(np.int64) for key in keys], axis=1)
    theirs = np.stack([column(betas, name).astype(np.int64) for name in names], axis=1)
    keep = column(betas, "window") < complete[match_keys(theirs, ours)]
    return betas.filter(pa.array(keep))


def _sequences(tables: dict[str, pa.Table], meta: TraceMeta) -> tuple[SequenceInfo, ...]:
    """Sequences with the rows that were kept: prompt as known or from the first position, tokens as counted."""
    known = {info.id: info for info in meta.sequences}
    position, sequence = column(tables["selections"], "position"), column(tables["selections"], "sequence")
    out = []
    for number in np.unique(sequence).tolist():
        own = position[sequence == number]
        info = known.get(number, SequenceInfo(number, int(own.min()) + 1))
        out.append(dataclasses.replace(info, new_tokens=int(own.max() - own.min()) + 1))
    return tuple(out)


def save_recovered(trace: Trace, directory: Path) -> None:
    """Write what was recovered as a complete trace of its own, so that every reader takes it."""
    kept = [info.id for info in trace.meta.sequences]
    if not kept:
        raise TraceError(f"trace {trace.directory} holds no whole step; nothing can be recovered")
    writer = TraceWriter(directory, trace.meta, overwrite=True)
    for name in SCHEMAS:
        if trace.has(name):
            table = trace.table(name)
            writer.add_table(
                name, table.filter(pa.array(np.isin(column(table, "sequence"), kept))) if name == "prefill" else table
            )
    writer.close(sequences=trace.meta.sequences, n_steps=trace.meta.n_steps)
