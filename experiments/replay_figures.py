"""A replayed and a live set of rows held against each other: gamma, misses, and how far the selections agree.

Loads no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.traces.rows import SelectionRows

GAMMA_BOUND = 0.01
MISSES_BOUND = 0.05
_BATCHES = 8


def in_order(rows: SelectionRows) -> SelectionRows:
    """The rows by step, sequence, layer and head, as a replay returns them."""
    return rows.take(np.lexsort((rows.kv_head, rows.layer, rows.sequence, rows.step)))


def row_figures(rows: SelectionRows) -> dict[str, float]:
    """gamma (macro and block-weighted mean) and misses a head and step, cold rows left out; NaN where none is warm."""
    warm = ~rows.cold
    if not warm.any():
        return dict.fromkeys(("gamma_macro", "gamma_weighted", "misses"), float("nan"))
    gamma, selected = rows.gamma[warm], rows.n_selected[warm]
    return {
        "gamma_macro": float(gamma.mean()),
        "gamma_weighted": float(np.average(gamma, weights=selected)),
        "misses": float(rows.n_misses[warm].mean()),
    }


def same_blocks(first: SelectionRows, second: SelectionRows) -> np.ndarray:
    """Blocks that both sets of rows select, int64 ``[row]``; the rows must have equal keys in equal order."""
    keys = ("step", "position", "sequence", "layer", "kv_head")
    if len(first) != len(second) or any((getattr(first, k) != getattr(second, k)).any() for k in keys):
        raise TraceError("the two sets of rows are not of the same steps, sequences, layers and heads")
    width = 1 + max(int(r.block_ids.max(initial=0)) for r in (first, second))
    ours, theirs = (r.row_of_entry * width + r.block_ids for r in (first, second))
    both = np.intersect1d(ours, theirs, assume_unique=True)
    return np.bincount(both // width, minlength=len(first))


def standard_error(rows: SelectionRows, difference: np.ndarray) -> float:
    """Of the mean of ``difference`` ``[row]`` over warm rows, from the means of 8 consecutive batches of steps.

    Neighbouring steps are alike, so rows are no independent draws; NaN for fewer steps than batches.
    """
    warm = ~rows.cold
    steps = np.unique(rows.step[warm])
    if len(steps) < _BATCHES:
        return float("nan")
    batch = np.searchsorted(steps, rows.step[warm]) * _BATCHES // len(steps)
    means = np.bincount(batch, difference[warm]) / np.bincount(batch)
    return float(means.std(ddof=1) / np.sqrt(_BATCHES))


def compare(replayed: SelectionRows, live: SelectionRows) -> dict[str, Any]:
    """Every figure of both, their differences, and whether the bounds hold: gamma within 0.01, misses within 5 %.

    ``same_rows`` is the share of warm rows with equal selections (``_first_layer``: of layer 0 alone, whose queries,
    keys and values no selection can change), ``same_blocks`` the mean share of a live row's blocks that are replayed.
    """
    warm = ~live.cold
    shared = same_blocks(replayed, live)
    equal = (shared == live.n_selected) & (replayed.n_selected == live.n_selected)
    first = warm & (live.layer == 0)
    ours, theirs = row_figures(replayed), row_figures(live)
    row: dict[str, Any] = {"n_rows": int(warm.sum())}
    for name in ours:
        row |= {f"{name}_replay": ours[name], f"{name}_live": theirs[name], f"{name}_diff": ours[name] - theirs[name]}
    misses = row["misses_diff"]
    row["misses_diff_relative"] = misses / theirs["misses"] if theirs["misses"] else (0.0 if misses == 0 else None)
    error = standard_error(live, replayed.n_misses.astype(np.float64) - live.n_misses)
    row["misses_diff_standard_error"] = error / theirs["misses"] if theirs["misses"] else None
    row["same_rows"] = float(equal[warm].mean()) if warm.any() else None
    row["same_blocks"] = float((shared[warm] / live.n_selected[warm]).mean()) if warm.any() else None
    row["same_rows_first_layer"] = float(equal[first].mean()) if first.any() else None
    relative = row["misses_diff_relative"]
    row["gamma_holds"] = max(abs(row["gamma_macro_diff"]), abs(row["gamma_weighted_diff"])) <= GAMMA_BOUND
    row["misses_hold"] = relative is not None and abs(relative) <= MISSES_BOUND
    return row


def by_layer(replayed: SelectionRows, live: SelectionRows) -> list[dict[str, Any]]:
    """`compare` for each layer alone."""
    return [
        {"layer": int(layer), **compare(replayed.take(replayed.layer == layer), live.take(live.layer == layer))}
        for layer in np.unique(live.layer)
    ]
