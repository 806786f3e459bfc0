"""Figures out of sweeps: throughput and link use against batch, bandwidth, and the per-user / per-GPU trade."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nosa_sys.report.figure import COLOURS, Figure, styled
from nosa_sys.report.inputs import SweepInput, TraceInput
from nosa_sys.report.sweep_rows import baseline, by_model, matching, text_of, usable, varying
from nosa_sys.report.time_figures import breakdown
from nosa_sys.traces.schema import WHOLE_STEP_LAYER

_SERIES = ("slots_over_k", "policy", "method", "block_size", "topk", "k_e", "context_tokens", "hardware")


def sweep_figures(sweeps: list[SweepInput], traces: list[TraceInput]) -> list[Figure]:
    """Every figure that each sweep has the data for, model by model."""
    figures: list[Figure] = []
    for index, sweep in enumerate(sweeps):
        for model, rows in by_model(usable(sweep.rows)):
            if not len(rows) or "tokens_per_s" not in rows.columns:
                continue
            key = f"{index}-{model}"
            status = _status(rows)
            found = [
                _batch_figure(rows, key, model, status, traces),
                _link_figure(rows, key, model, status),
                _bandwidth_figure(rows, key, model, status),
                breakdown(rows, key, model, status),
                _pareto_figure(rows, key, model, status),
            ]
            figures += [figure for figure in found if figure is not None]
    return figures


def _status(rows: pd.DataFrame) -> str:
    """The common status of the rows; projected where they differ or have none."""
    found = set(rows["status"].dropna()) if "status" in rows.columns else set()
    return str(found.pop()) if len(found) == 1 else "projected"


def _series(rows: pd.DataFrame, x: str) -> list[tuple[str, pd.DataFrame]]:
    """(label, rows sorted by x): one line for each value of the settings other than x, bandwidth at its baseline."""
    base = baseline(rows)
    rows = matching(rows, {n: base[n] for n in ("h2d_gbps", "batch") if n in base}, but=(x,))
    split = [name for name in varying(rows) if name in _SERIES and name != x]
    if not split:
        return [("simulated", rows.sort_values(x))]
    lines = []
    for values, members in rows.groupby(split, sort=True, dropna=False):
        label = ", ".join(text_of(n, v) for n, v in zip(split, values, strict=True))
        lines.append((label, members.sort_values(x)))
    return lines


def _fixed(rows: pd.DataFrame, x: str) -> str:
    base = baseline(rows)
    names = [n for n in ("hardware", "context_tokens", "h2d_gbps", "batch") if n in base and n != x]
    return ", ".join(text_of(n, base[n]) for n in names if not pd.isna(base[n]))


def _lines(rows: pd.DataFrame, x: str, y: str) -> go.Figure:
    plot = go.Figure()
    for colour, (label, members) in zip(COLOURS * 8, _series(rows, x), strict=False):
        plot.add_trace(
            go.Scatter(
                x=members[x].tolist(),
                y=_gaps(members[y]),
                name=label,
                mode="lines+markers",
                line={"color": colour},
                connectgaps=False,
            )
        )
    return plot


def _gaps(values: pd.Series) -> list[float | None]:
    """Numbers with None where one is missing or not finite: drawn as a gap."""
    return [float(v) if pd.notna(v) and np.isfinite(v) else None for v in values]


def _batch_figure(rows: pd.DataFrame, key: str, model: str, status: str, traces: list[TraceInput]) -> Figure | None:
    if "batch" not in rows.columns or rows["batch"].nunique() < 2:
        return None
    plot = _lines(rows, "batch", "tokens_per_s")
    dots = [point for source in traces if (point := _measured_point(source)) and point["model"] == model]
    for point in dots:
        plot.add_trace(
            go.Scatter(
                x=[point["batch"]],
                y=[point["tokens_per_s"]],
                name=f"measured on {point['device']}",
                mode="markers",
                marker={"size": 12, "color": "#000000", "symbol": "circle"},
            )
        )
    styled(plot, x="sequences decoded together", y="tokens/s, all sequences")
    plot.update_xaxes(type="log", tickvals=sorted(rows["batch"].unique().tolist()))
    if dots:
        plot.update_yaxes(type="log", dtick=1)
    reading = f"Lines are {status} by the simulator ({_fixed(rows, 'batch')}); where a line flattens, the"
    reading += " step grows as fast as the batch."
    reading += " Dots are real runs, on the device in the legend." if dots else " No run of this model was measured."
    return Figure(f"batch-{key}", f"Throughput against batch: {model}", status, reading, plot)


def _measured_point(source: TraceInput) -> dict[str, Any] | None:
    table = source.trace.table("steps").to_pandas()
    rows = source.trace.selections
    whole = table[(table["layer"] == WHOLE_STEP_LAYER) & ~table["step"].isin(np.unique(rows.step[rows.cold]))]
    whole = whole[whole["time_us"].notna()]
    seconds = float(whole["time_us"].sum()) / 1e6
    if not seconds:
        return None
    return {
        "model": source.trace.meta.model.name,
        "device": source.trace.meta.device or "an unnamed device",
        "batch": float(whole["n_sequences"].mean()),
        "tokens_per_s": float(whole["n_sequences"].sum()) / seconds,
    }


def _link_figure(rows: pd.DataFrame, key: str, model: str, status: str) -> Figure | None:
    if "batch" not in rows.columns or rows["batch"].nunique() < 2 or "link_utilisation" not in rows.columns:
        return None
    plot = styled(_lines(rows, "batch", "link_utilisation"), x="sequences decoded together", y="share of link busy")
    plot.update_xaxes(type="log", tickvals=sorted(rows["batch"].unique().tolist()))
    plot.update_yaxes(tickformat=".0%", range=[0, 1])
    reading = f"Bytes moved over what the link could carry in the step's time ({_fixed(rows, 'batch')})."
    reading += " With the serial schedule, the rest of the step computes while the link idles."
    return Figure(f"link-{key}", f"Link utilisation: {model}", status, reading, plot)


def _bandwidth_figure(rows: pd.DataFrame, key: str, model: str, status: str) -> Figure | None:
    if "h2d_gbps" not in rows.columns or rows["h2d_gbps"].nunique() < 2:
        return None
    plot = styled(_lines(rows, "h2d_gbps", "tokens_per_s"), x="host-to-device GB/s", y="tokens/s, all sequences")
    plot.update_yaxes(rangemode="tozero")
    reading = f"How much a faster link buys ({_fixed(rows, 'h2d_gbps')}): a flat line does not wait for the link."
    return Figure(f"bandwidth-{key}", f"Throughput against link bandwidth: {model}", status, reading, plot)


def _pareto_figure(rows: pd.DataFrame, key: str, model: str, status: str) -> Figure | None:
    if "tokens_per_s_per_sequence" not in rows.columns:
        return None
    points = rows[rows["tokens_per_s"].notna() & rows["tokens_per_s_per_sequence"].notna()]
    if len(points) < 3:
        return None
    split = [name for name in varying(points) if name != "model_shape"]
    text = [", ".join(text_of(n, row[n]) for n in split) for _, row in points.iterrows()]
    x, y = points["tokens_per_s_per_sequence"].to_numpy(float), points["tokens_per_s"].to_numpy(float)
    front = pareto_front(x, y)
    plot = go.Figure()
    plot.add_trace(
        go.Scatter(x=x, y=y, mode="markers", name="every configuration", text=text, marker={"color": "#9aa5b1"})
    )
    plot.add_trace(
        go.Scatter(
            x=x[front],
            y=y[front],
            text=[text[i] for i in front],
            mode="lines+markers",
            name="best trades",
            line={"color": COLOURS[1]},
            marker={"size": 9},
        )
    )
    plot.update_traces(hovertemplate="%{x:.4g} per sequence, %{y:.5g} per GPU<br>%{text}<extra></extra>")
    styled(plot, x="tokens/s per sequence (what one user feels)", y="tokens/s per GPU (what it serves)")
    reading = "Up and to the right is better; no configuration beats the line in both. Hover to see the settings."
    return Figure(f"pareto-{key}", f"Speed of one user against the whole GPU: {model}", status, reading, plot)


def pareto_front(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Indices of the points that no other point beats in both, by ascending x.

    >>> pareto_front(np.array([1.0, 2.0, 3.0, 2.0]), np.array([3.0, 2.0, 1.0, 1.0]))
    [0, 1, 2]
    """
    best = -np.inf
    front = []
    for index in np.lexsort((-y, -x)):
        if y[index] > best:
            best = y[index]
            front.append(int(index))
    return front[::-1]
