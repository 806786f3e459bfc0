"""The numbers at the top of the page."""

from __future__ import annotations

import numpy as np

from nosa_sys.report.inputs import ReportInputs
from nosa_sys.report.sweep_rows import usable
from nosa_sys.report.trace_figures import guaranteed_floor


def headline_numbers(inputs: ReportInputs) -> list[tuple[str, str]]:
    """(value, what it says): gamma against its floor, misses, what a hot buffer saves, measured and projected speed."""
    numbers: list[tuple[str, str]] = []
    for source in inputs.traces[:1]:
        rows = source.trace.selections
        gamma = rows.gamma[np.isfinite(rows.gamma)]
        floor = guaranteed_floor(source)
        if len(gamma):
            promised = f", {floor:.3g} guaranteed" if floor is not None else ""
            numbers.append((f"{gamma.mean():.3f}", f"mean gamma{promised}; lowest seen {gamma.min():.3f}"))
        warm = ~rows.cold
        if warm.any():
            numbers.append(
                (
                    f"{rows.n_misses[warm].mean():.2f}",
                    f"blocks loaded per head and step, of {source.trace.meta.sparse.topk}",
                )
            )
        speed = source.capture.get("tokens_per_s_per_sequence")
        if isinstance(speed, (int, float)):
            numbers.append((f"{speed:.1f} tok/s", f"per sequence, measured on {source.trace.meta.device}"))
    saved = _saved_by_spare_slots(inputs)
    if saved is not None:
        numbers.append((f"{saved:.1f}x", "fewer loads with 1.5 k slots and LRU, replayed"))
    for sweep in inputs.sweeps[:1]:
        rows_ = usable(sweep.rows)
        if "tokens_per_s" in rows_ and rows_["tokens_per_s"].notna().any():
            best = rows_.sort_values("tokens_per_s").iloc[-1]
            batch, link = best.get("batch", ""), best.get("h2d_gbps")
            settings = f"batch {batch}" + (f", link {link:g} GB/s" if link is not None and np.isfinite(link) else "")
            numbers.append(
                (
                    f"{best['tokens_per_s']:,.0f} tok/s",
                    f"{best.get('status', 'projected')}: the fastest of {len(rows_):,} configurations "
                    f"({best.get('model_shape', '')}, {best.get('hardware', '')}, {settings})",
                )
            )
    return numbers


def _saved_by_spare_slots(inputs: ReportInputs) -> float | None:
    """Misses at slots = k over those at 1.5 k with LRU, both at the first trace's own budgets and method."""
    if not inputs.traces:
        return None
    meta = inputs.traces[0].trace.meta
    own = [r for r in inputs.replays if r.get("sparse") == meta.sparse.to_dict() and r.get("method") == meta.method]
    found = {(r.get("policy"), r.get("slots_over_k")): r.get("misses_per_head_step") for r in own}
    exact, spare = found.get(("exact", 1.0)), found.get(("lru", 1.5))
    return exact / spare if exact and spare else None
