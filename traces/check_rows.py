"""Structural rules of the selections table: keys, positions, cold rows, ids, budgets, forced blocks, origins."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nosa_sys.methods import get_method
from nosa_sys.traces.findings import Findings
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.reselect import n_blocks_of
from nosa_sys.traces.rows import SelectionRows, find_streams, list_column, selection_rows, take_lists
from nosa_sys.traces.schema import ORIGIN_DENSE, ORIGIN_NAMES, ORIGIN_QUERY, ORIGIN_SINK, ORIGIN_WINDOW

_TABLE = "selections"


def check_rows(trace: Trace, findings: Findings) -> tuple[SelectionRows, np.ndarray]:
    """(rows as stored, bool [row]: rows whose whole stream obeys every structural rule)."""
    table = trace.table("selections")
    _, id_offsets = list_column(table, "block_ids")
    _, origin_offsets = list_column(table, "origins")
    n_ids, n_origins = np.diff(id_offsets), np.diff(origin_offsets)
    bad = n_ids != n_origins
    findings.add_rows(_TABLE, "origins-length", bad, lambda r: f"{n_origins[r]} origins for {n_ids[r]} block ids")
    rows = _aligned_rows(trace, bad, origin_offsets) if bad.any() else selection_rows(table)
    bad = bad | _check_keys(trace, rows, findings)
    bad |= _check_groups(trace, rows, findings)
    bad |= _check_order(rows, findings)
    lists_ok = ~bad & _check_budget(trace, rows, ~bad, findings)
    bad |= ~lists_ok
    chosen = np.flatnonzero(lists_ok)
    bad[chosen] |= _check_lists(trace, rows.take(chosen), chosen, findings)
    return rows, ~_spread_over_streams(rows, bad)


def _aligned_rows(trace: Trace, bad: np.ndarray, origin_offsets: np.ndarray) -> SelectionRows:
    """Rows with origins as long as block_ids: a row where they differ gets origin -1 (and is reported already)."""
    table = trace.table("selections")
    block_ids, offsets = list_column(table, "block_ids")
    origins, _ = list_column(table, "origins")
    aligned = np.full(len(block_ids), -1, dtype=np.int8)
    good = np.flatnonzero(~bad)
    aligned[take_lists(offsets, good)[0]] = origins[take_lists(origin_offsets, good)[0]]
    index = table.schema.get_field_index("origins")
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(aligned))
    return selection_rows(table.set_column(index, "origins", lists))


def _check_keys(trace: Trace, rows: SelectionRows, findings: Findings) -> np.ndarray:
    model = trace.meta.model
    bad = np.zeros(len(rows), dtype=np.bool_)
    for name, values, limit in (
        ("step", rows.step, None),
        ("position", rows.position, None),
        ("sequence", rows.sequence, None),
        ("layer", rows.layer, model.n_layers),
        ("kv_head", rows.kv_head, model.n_kv_heads),
    ):
        outside = values < 0 if limit is None else (values < 0) | (values >= limit)
        span = ">= 0" if limit is None else f"in [0, {limit})"
        findings.add_rows(_TABLE, "key-range", outside, lambda r, n=name, v=values, s=span: f"{n}={v[r]} must be {s}")  # type: ignore[misc]
        bad |= outside
    twice = repeated([rows.step, rows.sequence, rows.layer, rows.kv_head])
    findings.add_rows(
        _TABLE, "duplicate-row", twice, lambda r: "a row of this step, sequence, layer and KV head is there already"
    )
    return bad | twice


def repeated(keys: list[np.ndarray]) -> np.ndarray:
    """bool [row]: rows whose key occurred in an earlier row."""
    order = np.lexsort(keys[::-1])
    again = np.zeros(len(order), dtype=np.bool_)
    if len(order):
        again[1:] = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    out = np.zeros(len(order), dtype=np.bool_)
    out[order] = again
    return out


def _check_groups(trace: Trace, rows: SelectionRows, findings: Findings) -> np.ndarray:
    """A sequence has one row for each layer and KV head at its step, all at one position."""
    per_step = trace.meta.model.n_layers * trace.meta.model.n_kv_heads
    order = np.lexsort((rows.position, rows.sequence, rows.step))
    begins = np.zeros(len(rows), dtype=np.bool_)
    begins[:1] = True
    for key in (rows.step, rows.sequence):
        begins[1:] |= key[order][1:] != key[order][:-1]
    first = np.flatnonzero(begins)
    size = np.diff(np.append(first, len(rows)))
    group = np.empty(len(rows), dtype=np.int64)
    group[order] = np.cumsum(begins) - 1
    lead = np.full(len(first), len(rows))
    np.minimum.at(lead, group, np.arange(len(rows)))
    incomplete = np.zeros(len(rows), dtype=np.bool_)
    incomplete[lead[size != per_step]] = True
    findings.add_rows(
        _TABLE,
        "missing-row",
        incomplete,
        lambda r: (
            f"{size[group[r]]} rows of step {rows.step[r]}, sequence {rows.sequence[r]}; layers x KV heads are "
            f"{per_step}"
        ),
    )
    middle = rows.position[order][first + size // 2] if len(first) else rows.position
    differs = rows.position != middle[group]
    findings.add_rows(
        _TABLE,
        "one-position",
        differs,
        lambda r: f"position {rows.position[r]}, other rows of the sequence at this step have {middle[group[r]]}",
    )
    return differs


def _check_order(rows: SelectionRows, findings: Findings) -> np.ndarray:
    """Consecutive positions of each stream, and cold exactly on its first row."""
    streams = find_streams(rows.sequence, rows.layer, rows.kv_head, rows.step)
    position = rows.position[streams.order].astype(np.int64)
    jump = np.zeros(len(rows), dtype=np.bool_)
    inner = streams.time[1:] > 0
    jump[1:] = inner & (position[1:] != position[:-1] + 1)
    before = np.empty(len(rows), dtype=np.int64)
    before[streams.order] = np.concatenate([[-1], position[:-1]]) if len(rows) else position
    jump_row = np.zeros(len(rows), dtype=np.bool_)
    jump_row[streams.order] = jump
    findings.add_rows(
        _TABLE,
        "consecutive-positions",
        jump_row,
        lambda r: f"position {rows.position[r]} follows {before[r]} of the same stream",
    )
    first = np.zeros(len(rows), dtype=np.bool_)
    first[streams.order[streams.first]] = True
    cold = rows.cold != first
    findings.add_rows(
        _TABLE,
        "cold-first",
        cold,
        lambda r: f"cold={bool(rows.cold[r])} on {'the first' if first[r] else 'a later'} row of its stream",
    )
    return jump_row | cold


def _check_budget(trace: Trace, rows: SelectionRows, among: np.ndarray, findings: Findings) -> np.ndarray:
    cfg, method = trace.meta.sparse, get_method(trace.meta.method)
    n_blocks = n_blocks_of(np.maximum(rows.position, 0), cfg)
    expected = n_blocks if method.dense else np.minimum(n_blocks, cfg.topk)
    wrong = among & (rows.n_selected != expected)
    findings.add_rows(
        _TABLE,
        "budget",
        wrong,
        lambda r: f"{rows.n_selected[r]} blocks, must be {expected[r]} (N={n_blocks[r]}, topk={cfg.topk})",
    )
    return ~wrong


def any_entry(bad_entry: np.ndarray, rows: SelectionRows) -> np.ndarray:
    """bool [row]: rows with at least one marked entry."""
    return np.bincount(rows.row_of_entry[bad_entry], minlength=len(rows)) > 0


def _check_lists(trace: Trace, rows: SelectionRows, stored: np.ndarray, findings: Findings) -> np.ndarray:
    """Rules on ids and origins of rows with the right count; ``stored`` maps them to the table's row numbers."""
    cfg, method = trace.meta.sparse, get_method(trace.meta.method)
    current = rows.position.astype(np.int64) // cfg.block_size
    row, ids, origins = rows.row_of_entry, rows.block_ids, rows.origins

    def report(rule: str, bad: np.ndarray, what: str) -> np.ndarray:
        def detail(index: int) -> str:
            own = slice(rows.offsets[index], rows.offsets[index + 1])
            return f"{what}: current block {current[index]}, ids {_short(ids[own])}, origins {_short(origins[own])}"

        findings.add_rows(_TABLE, rule, bad, detail, stored)
        return bad

    outside = (ids < 0) | (ids > current[row])
    bad = report("ids-range", any_entry(outside, rows), "block ids must lie in [0, current block]")
    descending = np.zeros(len(row), dtype=np.bool_)
    descending[1:] = (row[1:] == row[:-1]) & (ids[1:] <= ids[:-1])
    bad |= report("ids-ascending", any_entry(descending, rows), "block ids must ascend without repeats")
    sparse = (current + 1 > cfg.topk) & (not method.dense)
    is_sink, is_window = ids < cfg.init_blocks, ids >= current[row] - cfg.local_blocks
    n_forced = np.bincount(row[is_sink | is_window], minlength=len(rows))
    bad |= report("forced", sparse & ~bad & (n_forced != cfg.n_forced), "sinks or window blocks are not all selected")
    unknown = (origins < 0) | (origins >= len(ORIGIN_NAMES))
    expected = np.where(is_sink, ORIGIN_SINK, np.where(is_window, ORIGIN_WINDOW, -1))
    free = (origins == ORIGIN_QUERY) | (origins == ORIGIN_QUERY + 1)
    sparse_ok = np.where(expected >= 0, origins == expected, free)
    wrong = unknown | ~np.where(sparse[row], sparse_ok, origins == ORIGIN_DENSE)
    if trace.meta.injected:  # the origins are of the selection that the given ids replaced
        wrong, sparse = unknown, np.zeros_like(sparse)
    n_query = np.bincount(row[origins == ORIGIN_QUERY], minlength=len(rows))
    miscounted = sparse & (n_query != method.query_aware_picks(cfg, cfg.n_forced))
    bad |= report(
        "origins",
        any_entry(wrong, rows) | miscounted,
        f"origins must be dense where N <= k, else sink, window, "
        f"{method.query_aware_picks(cfg, cfg.n_forced)} query-aware and "
        f"{method.fill(cfg, cfg.n_forced)} query-agnostic",
    )
    return bad


def _short(values: np.ndarray) -> str:
    shown = ", ".join(str(v) for v in values[:80])
    return f"[{shown}{', ...' if len(values) > 80 else ''}]"


def _spread_over_streams(rows: SelectionRows, bad: np.ndarray) -> np.ndarray:
    """bool [row]: rows of any stream that has a bad row."""
    streams = find_streams(rows.sequence, rows.layer, rows.kv_head, rows.step)
    broken = np.zeros(streams.n_streams, dtype=np.bool_)
    broken[streams.stream[bad[streams.order]]] = True
    out = np.empty(len(rows), dtype=np.bool_)
    out[streams.order] = broken[streams.stream]
    return out
