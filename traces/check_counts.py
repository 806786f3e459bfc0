"""Rules on what was counted: gamma, misses, bytes, the locality bounds, the core, and selection from the scores."""

from __future__ import annotations

import numpy as np

from nosa_sys.errors import NosaError
from nosa_sys.methods import get_method
from nosa_sys.traces.findings import Findings
from nosa_sys.traces.locality import core_mask, locality_rows
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import final_pooled_betas, misses_of, serve
from nosa_sys.traces.reselect import CapturedBetas, CapturedScores, Describer, n_blocks_of, n_windows_of, reselect
from nosa_sys.traces.reuse import BlockUses, block_uses, gamma_of
from nosa_sys.traces.rows import SelectionRows
from nosa_sys.traces.selection import pool_windows_np

_TABLE = "selections"
_GAMMA_TOLERANCE = 1e-6
_CORE_CHUNK = 4096


def check_counts(
    trace: Trace, rows: SelectionRows, sound: np.ndarray, findings: Findings, *, scores: bool, betas: bool
) -> None:
    """``sound`` [row] marks rows of structurally valid streams; only those are recounted. ``scores`` and ``betas``
    say whether these tables are there and readable."""
    meta = trace.meta
    cfg, method = meta.sparse, get_method(meta.method)
    n_selected = rows.n_selected
    outside = (rows.n_misses < 0) | (rows.n_misses > n_selected)
    findings.add_rows(
        _TABLE, "misses-range", outside, lambda r: f"n_misses={rows.n_misses[r]} of |G|={n_selected[r]} blocks"
    )
    expected_bytes = rows.n_misses.astype(np.int64) * meta.block_bytes
    findings.add_rows(
        _TABLE,
        "h2d-bytes",
        rows.h2d_bytes != expected_bytes,
        lambda r: f"h2d_bytes={rows.h2d_bytes[r]}, {rows.n_misses[r]} misses move {expected_bytes[r]}",
    )
    null_wrong = np.isnan(rows.gamma) != rows.cold
    findings.add_rows(
        _TABLE, "gamma-null", null_wrong, lambda r: "gamma must be null on cold rows and a number on all others"
    )
    chosen = np.flatnonzero(sound)
    findings.facts["n_rows_recounted"] = len(chosen)
    if not len(chosen):
        return
    uses = block_uses(rows.take(chosen))
    stored = chosen[uses.streams.order]  # sorted row -> row of the table
    _check_gamma(uses, stored, findings)
    if not meta.injected:
        _check_bounds(trace, uses, stored, findings)
    if not method.dense and meta.slots >= cfg.topk:
        _check_misses(trace, uses, stored, findings, betas=betas)
    elif method.dense:
        nonzero = rows.n_misses != 0
        findings.add_rows(
            _TABLE, "misses", nonzero, lambda r: f"n_misses={rows.n_misses[r]}; method full loads nothing"
        )
    if meta.injected:
        findings.facts["guarantee"] = "not checked: the selections were injected, no method chose them"
        return
    if meta.kv_dtype == "float64":
        # stored scores are fp32: distinct fp64 scores may tie there, so the selection need not follow from them
        findings.facts["reselected"] = "not checked: scores of a float64 run are stored rounded to float32"
        return
    _check_core(trace, rows, chosen, findings, betas=betas)
    _check_selection(trace, rows, chosen, findings, scores=scores, betas=betas)


def _check_gamma(uses: BlockUses, stored: np.ndarray, findings: Findings) -> None:
    recorded, expected = uses.rows.gamma, gamma_of(uses, uses.rows.cold)
    off = np.abs(recorded - expected) > _GAMMA_TOLERANCE  # NaN compares false: nulls have their own rule
    findings.add_rows(_TABLE, "gamma", off, lambda i: f"gamma={recorded[i]}, the selections give {expected[i]}", stored)


def _check_bounds(trace: Trace, uses: BlockUses, stored: np.ndarray, findings: Findings) -> None:
    cfg, method = trace.meta.sparse, get_method(trace.meta.method)
    if method.dense:  # no block is ever left out, so there is nothing to bound
        return
    local = locality_rows(uses, cfg, method)
    findings.facts["locality"] = local.facts(cfg)
    findings.facts["gamma_floor"] = cfg.guaranteed_gamma if method.name == "nosa" else None
    findings.add_rows(
        _TABLE,
        "overlap-bound",
        local.warm & (local.overlap < local.overlap_bound),
        lambda i: f"shares {local.overlap[i]} blocks with the step before, the guarantee is {local.overlap_bound[i]}",
        stored,
    )
    loads = np.maximum(local.loads, uses.rows.n_misses)
    findings.add_rows(
        _TABLE,
        "loads-bound",
        local.warm & (loads > local.loads_bound),
        lambda i: f"{loads[i]} blocks loaded, the bound min(a, max(0, N - k)) is {local.loads_bound[i]}",
        stored,
    )


def _check_misses(trace: Trace, uses: BlockUses, stored: np.ndarray, findings: Findings, *, betas: bool) -> None:
    """n_misses of warm rows against a replay of the slot cache; policies without one right answer are skipped."""
    meta = trace.meta
    if meta.schedule == "prefetch" or meta.policy == "belady" or (meta.policy == "beta" and not betas):
        findings.facts["misses_recounted"] = f"not derivable (schedule {meta.schedule}, policy {meta.policy})"
        return
    cfg, method = meta.sparse, get_method(meta.method)
    try:
        ranks = final_pooled_betas(trace, uses, cfg) if meta.policy == "beta" else None
    except NosaError as error:
        findings.facts["misses_recounted"] = f"not derivable: {error}"
        return
    findings.facts["misses_recounted"] = f"policy {meta.policy}, {meta.slots} slots"
    wrong = np.zeros(len(uses.rows), dtype=np.bool_)
    expected = np.zeros(len(uses.rows), dtype=np.int64)
    # Victims of equal rank leave in slot order, and a foreign engine may seat the first selection in plain ascending
    # id instead of keeping the partial current block in slot 0: a stream passes if either order explains it.
    variants = (True,) if meta.policy == "exact" else (True, False)
    unexplained = np.ones(uses.streams.n_streams, dtype=np.bool_)
    for in_first_slot in variants:
        loaded = serve(uses, cfg, method, meta.slots, meta.policy, ranks, current_in_first_slot=in_first_slot)
        recount = misses_of(uses, loaded)
        differs = ~uses.rows.cold & (recount != uses.rows.n_misses)
        if in_first_slot:
            wrong, expected = differs, recount
        per_stream = np.bincount(uses.streams.stream[differs], minlength=uses.streams.n_streams)
        unexplained &= per_stream > 0
    wrong &= unexplained[uses.streams.stream]
    recorded = uses.rows.n_misses
    findings.add_rows(
        _TABLE,
        "misses",
        wrong,
        lambda i: f"n_misses={recorded[i]}, the {meta.policy} cache of {meta.slots} slots misses {expected[i]}",
        stored,
    )


def _check_core(trace: Trace, rows: SelectionRows, chosen: np.ndarray, findings: Findings, *, betas: bool) -> None:
    """The top m by pooled beta must be part of G."""
    cfg, method = trace.meta.sparse, get_method(trace.meta.method)
    if not betas or method.dense or not method.fill(cfg, cfg.n_forced):
        return
    captured = CapturedBetas(trace, rows, cfg)
    n_blocks, n_windows = n_blocks_of(rows.position, cfg), n_windows_of(rows.position, cfg)
    sparse = chosen[(n_blocks > cfg.topk)[chosen]]
    sparse = sparse[captured.n_complete[sparse] >= n_windows[sparse]]
    findings.facts["n_rows_core_checked"] = len(sparse)
    describe = Describer(rows)
    for begin in range(0, len(sparse), _CORE_CHUNK):
        part = sparse[begin : begin + _CORE_CHUNK]
        width = int(n_blocks[part].max())
        windows = captured.windows(part, n_windows[part], describe)
        core = core_mask(pool_windows_np(windows, n_windows[part], width, cfg), n_blocks[part], cfg, method)
        selected = rows.take(part)
        held = np.zeros(core.shape, dtype=np.bool_)
        held[selected.row_of_entry, selected.block_ids] = True
        lost = core & ~held
        for index in np.flatnonzero(lost.any(axis=1)):
            missing = np.flatnonzero(lost[index])
            findings.add(
                _TABLE, int(part[index]), "core", f"core block {missing[0]} (of top m by beta) is not selected"
            )


def _check_selection(
    trace: Trace, rows: SelectionRows, chosen: np.ndarray, findings: Findings, *, scores: bool, betas: bool
) -> None:
    """Selecting again from the stored scores and betas must give the recorded ids and origins."""
    cfg, method = trace.meta.sparse, get_method(trace.meta.method)
    needs_scores = method.query_aware_picks(cfg, cfg.n_forced) > 0
    needs_betas = method.fill(cfg, cfg.n_forced) > 0
    if method.dense or (needs_scores and not scores) or (needs_betas and not betas):
        findings.facts["n_rows_reselected"] = 0
        return
    n_windows = n_windows_of(rows.position, cfg)
    usable = (n_blocks_of(rows.position, cfg) > cfg.topk)[chosen]
    if needs_scores:
        usable &= CapturedScores(trace, rows).n_windows[chosen] == n_windows[chosen]
    if needs_betas:
        usable &= CapturedBetas(trace, rows, cfg).n_complete[chosen] >= n_windows[chosen]
    part = chosen[usable]
    findings.facts["n_rows_reselected"] = len(part)
    recorded = rows.take(part)
    try:
        again = reselect(trace, recorded, cfg, method)
    except NosaError as error:
        findings.add(_TABLE, None, "selection", f"cannot select again: {error}")
        return
    differs = (recorded.block_ids != again.block_ids) | (recorded.origins != again.origins)
    bad = np.bincount(recorded.row_of_entry[differs], minlength=len(recorded)) > 0
    for index in np.flatnonzero(bad):
        own = slice(again.offsets[index], again.offsets[index + 1])
        findings.add(
            _TABLE, int(part[index]), "selection", f"scores and betas give block_ids {again.block_ids[own].tolist()}"
        )
