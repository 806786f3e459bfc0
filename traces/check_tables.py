"""Rules of the tables beside the selections: sums of steps, prefill bytes, scores and betas."""

from __future__ import annotations

import numpy as np

from nosa_sys.methods import get_method
from nosa_sys.traces.check_rows import repeated
from nosa_sys.traces.findings import Findings
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.reselect import match_keys, n_windows_of
from nosa_sys.traces.rows import SelectionRows, column, find_streams, list_column
from nosa_sys.traces.schema import WHOLE_STEP_LAYER

_TIMES = ("time_us", "select_us", "h2d_us", "attention_us", "other_us")
_KEYS = ("step", "sequence", "layer", "kv_head")


def check_steps(trace: Trace, rows: SelectionRows, findings: Findings) -> None:
    """Every steps row must equal the sums of its selection rows, the whole-step row (layer -1) over all layers."""
    meta, name = trace.meta, "steps"
    table = trace.table(name)
    data = {field.name: column(table, field.name) for field in table.schema}
    step, layer = data["step"].astype(np.int64), data["layer"].astype(np.int64)
    bad_key = (step < 0) | (layer < WHOLE_STEP_LAYER) | (layer >= meta.model.n_layers)
    findings.add_rows(
        name, "key-range", bad_key, lambda r: f"step={step[r]}, layer={layer[r]} of {meta.model.n_layers} layers"
    )
    twice = repeated([step, layer])
    findings.add_rows(name, "duplicate-row", twice, lambda r: f"step {step[r]}, layer {layer[r]} is there already")
    _check_step_sums(trace, rows, data, ~bad_key, findings)
    whole = np.unique(step[layer == WHOLE_STEP_LAYER])
    ids, first = np.unique(rows.step, return_index=True)
    for number, row in zip(ids.tolist(), first.tolist(), strict=True):
        at = np.searchsorted(whole, number)
        if at == len(whole) or whole[at] != number:
            findings.add("selections", row, "step-missing", f"table steps has no whole-step row of step {number}")
    n_steps = len(np.unique(step))
    if n_steps != meta.n_steps:
        findings.add("meta", None, "n-steps", f"n_steps={meta.n_steps}, table steps holds {n_steps}")
    prefetch, wasted = data["prefetch_bytes"], data["wasted_prefetch_bytes"]
    bad = (prefetch < 0) | (wasted < 0) | (wasted > prefetch) | (prefetch % meta.block_bytes != 0)
    bad |= (wasted % meta.block_bytes != 0) | ((prefetch != 0) & (meta.schedule != "prefetch"))
    findings.add_rows(
        name,
        "prefetch-bytes",
        bad,
        lambda r: (
            f"prefetch_bytes={prefetch[r]}, wasted_prefetch_bytes={wasted[r]}, schedule {meta.schedule}: whole "
            f"blocks of {meta.block_bytes}, wasted <= prefetched, 0 without prefetch"
        ),
    )
    for time in _TIMES:
        values = data[time]
        findings.add_rows(
            name,
            "times",
            ~np.isnan(values) & ~(np.isfinite(values) & (values >= 0)),
            lambda r, t=time, v=values: f"{t}={v[r]} must be null or finite and >= 0",  # type: ignore[misc]
        )


def _check_step_sums(
    trace: Trace, rows: SelectionRows, data: dict[str, np.ndarray], valid: np.ndarray, findings: Findings
) -> None:
    meta = trace.meta
    ids, index = np.unique(rows.step, return_inverse=True)
    fills = (rows.position.astype(np.int64) + 1) % meta.sparse.block_size == 0
    if get_method(meta.method).dense:
        fills[:] = False
    n_layers = meta.model.n_layers
    inside = (rows.layer >= 0) & (rows.layer < n_layers)
    cell = index[inside] * (n_layers + 1) + rows.layer[inside] + 1
    sums = {}
    for name, values in (
        ("n_misses", rows.n_misses.astype(np.int64)),
        ("h2d_bytes", rows.h2d_bytes),
        ("d2h_bytes", fills * np.int64(meta.block_bytes)),
    ):
        grid = np.zeros(len(ids) * (n_layers + 1) + 1, dtype=np.int64)  # the last cell serves steps without rows
        np.add.at(grid, cell, values[inside])
        per_step = grid[:-1].reshape(len(ids), n_layers + 1)
        per_step[:, 0] = per_step[:, 1:].sum(axis=1)
        sums[name] = grid
    pairs = np.unique(np.stack([index, rows.sequence], axis=1), axis=0)
    n_sequences = np.append(np.bincount(pairs[:, 0], minlength=len(ids)), 0)
    at = np.searchsorted(ids, data["step"])
    known = valid & (at < len(ids))
    known[known] = ids[at[known]] == data["step"][known]
    where = np.where(known, at * (n_layers + 1) + data["layer"].astype(np.int64) + 1, len(ids) * (n_layers + 1))
    expected = {name: grid[where] for name, grid in sums.items()}
    expected["n_sequences"] = n_sequences[np.where(known, at, len(ids))]
    for name, values in expected.items():
        findings.add_rows(
            "steps",
            f"sum-{name.replace('_', '-')}",
            valid & (data[name] != values),
            lambda r, n=name, v=values: f"{n}={data[n][r]}, its selection rows give {v[r]}",  # type: ignore[misc]
        )


def check_prefill(trace: Trace, findings: Findings) -> None:
    """Keys in range and there once, whole blocks, no transfers for method full, the last prompt token left out."""
    meta, name = trace.meta, "prefill"
    table = trace.table(name)
    data = {field.name: column(table, field.name) for field in table.schema}
    bad = (data["sequence"] < 0) | (data["layer"] < 0) | (data["layer"] >= meta.model.n_layers)
    findings.add_rows(
        name, "key-range", bad, lambda r: f"sequence={data['sequence'][r]}, layer={data['layer'][r]} is out of range"
    )
    twice = repeated([data["sequence"], data["layer"]])
    findings.add_rows(name, "duplicate-row", twice, lambda r: "this sequence and layer are there already")
    findings.add_rows(name, "n-tokens", data["n_tokens"] < 0, lambda r: f"n_tokens={data['n_tokens'][r]} is negative")
    prompts = {info.id: info.prompt_tokens for info in meta.sequences if info.prompt_tokens}
    limit = np.array([prompts.get(number, 2**31) for number in data["sequence"].tolist()], dtype=np.int64)
    findings.add_rows(
        name,
        "n-tokens",
        data["n_tokens"] >= limit,
        lambda r: f"n_tokens={data['n_tokens'][r]} of a prompt of {limit[r]}, whose last token is the first step's",
    )
    dense = get_method(meta.method).dense
    for direction in ("h2d_bytes", "d2h_bytes"):
        moved = data[direction]
        bad = (moved < 0) | (moved % meta.block_bytes != 0) | (dense & (moved != 0))
        findings.add_rows(
            name,
            "prefill-bytes",
            bad,
            lambda r, d=direction, m=moved: (
                f"{d}={m[r]} is no whole number of {meta.block_bytes}-byte blocks"  # type: ignore[misc]
                + (", and method full moves none" if dense else "")
            ),
        )
    times = data["time_us"]
    findings.add_rows(
        name,
        "times",
        ~np.isnan(times) & ~(np.isfinite(times) & (times >= 0)),
        lambda r: f"time_us={times[r]} must be null or finite and >= 0",
    )


def check_scores(trace: Trace, rows: SelectionRows, findings: Findings) -> None:
    """Each scores row belongs to a selection row, covers its complete windows, and holds sums of probabilities."""
    name = "scores"
    table = trace.table(name)
    keys = [column(table, key) for key in _KEYS]
    values, offsets = list_column(table, "window_scores")
    lengths = np.diff(offsets)
    twice = repeated(keys)
    findings.add_rows(name, "duplicate-row", twice, lambda r: "scores of this row are there already")
    theirs = np.stack([key.astype(np.int64) for key in keys], axis=1)
    ours = np.stack([getattr(rows, key).astype(np.int64) for key in _KEYS], axis=1)
    selection = match_keys(theirs, ours)
    findings.add_rows(name, "unknown-row", selection < 0, lambda r: "no selection row has this key")
    expected = np.append(n_windows_of(rows.position, trace.meta.sparse), 0)[selection]
    findings.add_rows(
        name,
        "n-windows",
        (selection >= 0) & (lengths != expected),
        lambda r: f"{lengths[r]} window scores, the position has {expected[r]} complete windows",
    )
    limit = trace.meta.model.group * (1 + 1e-3)
    wrong = ~((values >= 0) & (values <= limit))
    row = np.repeat(np.arange(len(lengths)), lengths)
    findings.add_rows(
        name,
        "score-range",
        np.bincount(row[wrong], minlength=len(lengths)) > 0,
        lambda r: f"window scores must lie in [0, {trace.meta.model.group}] (query heads of a group)",
    )


def check_betas(trace: Trace, rows: SelectionRows, findings: Findings) -> None:
    """Windows of a stream run from 0 without gaps up to the ones complete at its last position."""
    name, meta = "betas", trace.meta
    table = trace.table(name)
    data = {field.name: column(table, field.name) for field in table.schema}
    layer, head, window = data["layer"], data["kv_head"], data["window"].astype(np.int64)
    bad = (data["sequence"] < 0) | (window < 0) | (layer < 0) | (layer >= meta.model.n_layers)
    bad |= (head < 0) | (head >= meta.model.n_kv_heads)
    findings.add_rows(name, "key-range", bad, lambda r: f"layer {layer[r]}, KV head {head[r]}, window {window[r]}")
    twice = repeated([data["sequence"], layer, head, window])
    findings.add_rows(name, "duplicate-row", twice, lambda r: f"window {window[r]} of its stream is there already")
    finite = np.isfinite(data["beta_mean"])
    findings.add_rows(name, "beta-finite", ~finite, lambda r: f"beta_mean={data['beta_mean'][r]} is no number")
    streams = find_streams(rows.sequence, rows.layer, rows.kv_head, rows.step)
    last = streams.order[streams.first + streams.lengths - 1] if len(rows) else streams.order
    complete = n_windows_of(rows.position[last], meta.sparse)
    ours = np.stack([getattr(rows, key)[last].astype(np.int64) for key in _KEYS[1:]], axis=1)
    theirs = np.stack([data[key].astype(np.int64) for key in _KEYS[1:]], axis=1)
    stream = match_keys(theirs, ours)
    limit = np.append(complete, np.iinfo(np.int64).max)[stream]  # a sequence without decode rows has no limit here
    findings.add_rows(
        name,
        "incomplete-window",
        window >= limit,
        lambda r: f"window {window[r]} was not complete at the last position, which has {limit[r]} windows",
    )
    known = (stream >= 0) & ~twice & (window >= 0) & (window < limit)
    found = np.bincount(stream[known], minlength=len(last))
    for index in np.flatnonzero(found != complete):
        key = ours[index]
        findings.add(
            name,
            None,
            "missing-window",
            f"sequence {key[0]}, layer {key[1]}, KV head {key[2]}: {found[index]} of {complete[index]} windows",
        )
