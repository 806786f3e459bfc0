"""Statistics of a captured or replayed trace: gamma, misses, bytes, reuse, origins. Cold rows stay out of means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from nosa_sys.errors import TraceError
from nosa_sys.methods import get_method
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import ReplayResult, replay
from nosa_sys.traces.reselect import n_blocks_of
from nosa_sys.traces.reuse import block_uses, gamma_of, reuse_histogram, stack_distances
from nosa_sys.traces.schema import ORIGIN_NAMES


@dataclass(frozen=True)
class TraceStatistics:
    """Numbers of one trace or replay; see docs/trace-format.md for each formula.

    Means cover warm rows (one row: step, sequence, layer, KV head). ``gamma_macro_mean`` weighs rows equally,
    ``gamma_block_weighted_mean`` weighs them by |G|. A value that no row defines is None (NaN in the frames).

    Frames: ``by_head`` (layer, kv_head, ...), ``by_layer`` (layer, ...), ``by_layer_step`` (step, layer,
    gamma_macro_mean, misses_per_row), ``origins`` (origin, n_blocks, share, n_misses, miss_share). Misses by origin
    come from a replay of the slot cache and are NaN where that cannot be known.
    """

    n_rows: int
    n_warm_rows: int
    n_steps: int
    n_sequences: int
    sparse_row_share: float | None
    gamma_macro_mean: float | None
    gamma_block_weighted_mean: float | None
    gamma_min: float | None
    misses_total: int
    misses_warm: int
    misses_per_row_mean: float | None
    misses_per_row_p50: float | None
    misses_per_row_p90: float | None
    misses_per_row_max: int | None
    hit_rate: float | None
    h2d_bytes: int
    h2d_bytes_warm: int
    d2h_bytes: int
    reuse_steps: dict[int, int]
    lru_miss_curve: list[tuple[int, int, int]]
    by_head: pd.DataFrame
    by_layer: pd.DataFrame
    by_layer_step: pd.DataFrame
    origins: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: frames become lists of records, NaN becomes None."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, pd.DataFrame):
                records = value.to_dict("records")
                out[name] = [{str(k): _plain(v) for k, v in record.items()} for record in records]
            elif name == "lru_miss_curve":
                out[name] = [{"slots": s, "misses_low": low, "misses_high": high} for s, low, high in value]
            elif name == "reuse_steps":
                out[name] = {str(k): v for k, v in value.items()}
            else:
                out[name] = value
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def trace_statistics(trace: Trace, result: ReplayResult | None = None) -> TraceStatistics:
    """Statistics of what was recorded or, with ``result``, of what that replay of ``trace`` found."""
    meta = trace.meta
    notes: list[str] = list(trace.notes) if result is None else list(result.assumptions)
    if result is None:
        rows = trace.selections
        rows = rows.take(np.lexsort((rows.kv_head, rows.layer, rows.sequence, rows.step)))
        misses, cfg, method = MissTable.from_trace(trace), meta.sparse, meta.method
        loaded = _loaded_as_captured(trace, notes)
    else:
        rows, misses, cfg, method, loaded = (
            result.selections,
            result.misses,
            result.sparse,
            result.method,
            result.loaded,
        )
    uses = block_uses(rows)
    gamma = np.empty(len(rows))
    gamma[uses.streams.order] = gamma_of(uses, uses.rows.cold)
    frame = pd.DataFrame(
        {
            "step": rows.step,
            "layer": rows.layer,
            "kv_head": rows.kv_head,
            "gamma": gamma,
            "n_selected": rows.n_selected,
            "kept": gamma * rows.n_selected,
            "weight": np.where(np.isnan(gamma), 0, rows.n_selected),
            "n_misses": misses.n_misses,
        }
    )
    warm = frame[~rows.cold]
    dense = get_method(method).dense
    sparse_rows = np.zeros(len(rows), dtype=np.bool_) if dense else n_blocks_of(rows.position, cfg) > cfg.topk
    if len(rows) and not sparse_rows.any():
        notes.append("selection was never sparse: every row attended to its whole context")
    curve_slots = sorted({round(cfg.topk * f / 4) for f in range(4, 13)})
    total = _mean_columns(warm.assign(all=0).groupby("all"))
    return TraceStatistics(
        n_rows=len(rows),
        n_warm_rows=len(warm),
        n_steps=len(np.unique(rows.step)),
        n_sequences=len(np.unique(rows.sequence)),
        sparse_row_share=float(sparse_rows.mean()) if len(rows) else None,
        gamma_macro_mean=_first(total["gamma_macro_mean"]),
        gamma_block_weighted_mean=_first(total["gamma_block_weighted_mean"]),
        gamma_min=_first(total["gamma_min"]),
        misses_total=int(misses.n_misses.sum(dtype=np.int64)),
        misses_warm=int(warm["n_misses"].sum()),
        misses_per_row_mean=_first(total["misses_per_row"]),
        misses_per_row_p50=float(warm["n_misses"].quantile(0.5)) if len(warm) else None,
        misses_per_row_p90=float(warm["n_misses"].quantile(0.9)) if len(warm) else None,
        misses_per_row_max=int(warm["n_misses"].max()) if len(warm) else None,
        hit_rate=1.0 - float(warm["n_misses"].sum() / warm["n_selected"].sum()) if len(warm) else None,
        h2d_bytes=misses.h2d_bytes_total,
        h2d_bytes_warm=int(warm["n_misses"].sum()) * misses.block_bytes,
        d2h_bytes=misses.d2h_bytes_total,
        reuse_steps=reuse_histogram(uses),
        lru_miss_curve=[] if dense else stack_distances(uses, cfg.block_size).miss_curve(curve_slots),
        by_head=_mean_columns(warm.groupby(["layer", "kv_head"])),
        by_layer=_mean_columns(warm.groupby(["layer"])),
        by_layer_step=_mean_columns(warm.groupby(["step", "layer"])),
        origins=_origins(rows.origins, loaded, np.repeat(~rows.cold, rows.n_selected)),
        notes=notes,
    )


def _loaded_as_captured(trace: Trace, notes: list[str]) -> np.ndarray | None:
    """Which entries were loaded, from a replay of the captured slots and policy; None where it cannot be replayed."""
    try:
        return replay(trace).loaded
    except TraceError as error:
        notes.append(f"misses by origin are unknown: {error}")
        return None


def _mean_columns(groups: Any) -> pd.DataFrame:
    sums = groups.agg(
        gamma_macro_mean=("gamma", "mean"),
        gamma_min=("gamma", "min"),
        misses_per_row=("n_misses", "mean"),
        n_rows=("n_misses", "size"),
        kept=("kept", "sum"),
        weight=("weight", "sum"),
        known=("gamma", "count"),
    ).reset_index()
    weighted = sums["kept"] / sums["weight"]
    sums["gamma_block_weighted_mean"] = weighted.where(sums["known"] > 0)
    return sums.drop(columns=["kept", "weight", "known"])


def _first(values: pd.Series) -> float | None:
    return float(values.iloc[0]) if len(values) and np.isfinite(values.iloc[0]) else None


def _origins(origins: np.ndarray, loaded: np.ndarray | None, warm: np.ndarray) -> pd.DataFrame:
    """Selected blocks and misses of warm rows by origin."""
    size = len(ORIGIN_NAMES)
    blocks = np.bincount(origins[warm], minlength=size).astype(np.float64)
    misses = np.full(size, np.nan)
    if loaded is not None:
        misses = np.bincount(origins[warm & loaded], minlength=size).astype(np.float64)
    return pd.DataFrame(
        {
            "origin": ORIGIN_NAMES,
            "n_blocks": blocks.astype(np.int64),
            "share": blocks / blocks.sum() if blocks.sum() else np.nan,
            "n_misses": misses,
            "miss_share": misses / misses.sum() if misses.sum() > 0 else np.nan,
        }
    )
