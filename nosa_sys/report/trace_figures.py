"""Figures out of one trace: gamma over time, misses and origins by layer, where a measured step goes."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.methods import get_method
from nosa_sys.report.figure import COLOURS, ORIGIN_COLOURS, Figure, styled
from nosa_sys.report.inputs import TraceInput
from nosa_sys.traces.schema import ORIGIN_NAMES, WHOLE_STEP_LAYER

_MAX_STEPS_DRAWN = 2000


def trace_figures(source: TraceInput, index: int) -> list[Figure]:
    """Every figure that this trace has the data for."""
    candidates = (
        gamma_figure(source, index),
        misses_figure(source, index),
        origins_figure(source, index),
        measured_breakdown(source, index),
    )
    return [figure for figure in candidates if figure is not None]


def gamma_grid(source: TraceInput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps [S], mean gamma [layer, S], lowest gamma [S]); NaN where no row has a gamma."""
    rows = source.trace.selections
    known = np.isfinite(rows.gamma)
    steps = np.unique(rows.step[known])
    n_layers = source.trace.meta.model.n_layers
    place = np.searchsorted(steps, rows.step[known])
    total = np.zeros((n_layers, len(steps)))
    count = np.zeros((n_layers, len(steps)))
    np.add.at(total, (rows.layer[known], place), rows.gamma[known])
    np.add.at(count, (rows.layer[known], place), 1)
    lowest = np.full(len(steps), np.inf)
    np.minimum.at(lowest, place, rows.gamma[known])
    with np.errstate(invalid="ignore"):
        mean = np.where(count > 0, total / count, np.nan)
    return steps, mean, np.where(np.isfinite(lowest), lowest, np.nan)


def guaranteed_floor(source: TraceInput) -> float | None:
    """k_e / k where the method guarantees it."""
    meta = source.trace.meta
    return meta.sparse.guaranteed_gamma if meta.method == "nosa" and not meta.injected else None


def gamma_figure(source: TraceInput, index: int) -> Figure | None:
    """Heat map of gamma, layer by step, above the mean and the lowest head against the guaranteed floor."""
    steps, mean, lowest = gamma_grid(source)
    if not len(steps):
        return None
    stride = -(-len(steps) // _MAX_STEPS_DRAWN)
    steps, mean, lowest = steps[::stride], mean[:, ::stride], lowest[::stride]
    floor = guaranteed_floor(source)
    plot = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.66, 0.34], vertical_spacing=0.06)
    low = min(float(np.nanmin(mean)), floor if floor is not None else 1.0)
    bar = {"title": "gamma", "len": 0.62, "y": 0.69, "thickness": 14}
    if floor is not None:
        ticks = [floor, (floor + 1) / 2, 1.0]
        bar |= {"tickvals": ticks, "ticktext": [f"{floor:.3g} floor", f"{ticks[1]:.3g}", "1"]}
    plot.add_trace(
        go.Heatmap(
            x=steps,
            y=np.arange(mean.shape[0]),
            z=mean,
            zmin=low,
            zmax=1.0,
            colorscale="Viridis",
            colorbar=bar,
            hovertemplate="step %{x}, layer %{y}: gamma %{z:.3f}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    with np.errstate(invalid="ignore"):
        average = np.nanmean(mean, axis=0)
    plot.add_trace(go.Scatter(x=steps, y=average, name="mean of all heads", line={"color": COLOURS[0]}), row=2, col=1)
    plot.add_trace(
        go.Scatter(x=steps, y=lowest, name="lowest head", line={"color": COLOURS[1], "width": 1}), row=2, col=1
    )
    if floor is not None:
        plot.add_trace(
            go.Scatter(
                x=[steps[0], steps[-1]],
                y=[floor, floor],
                name=f"guaranteed floor k_e/k = {floor:.3g}",
                mode="lines",
                line={"color": "#000000", "dash": "dash", "width": 1.5},
            ),
            row=2,
            col=1,
        )
    styled(plot, height=560)
    plot.update_yaxes(title="layer", row=1, col=1)
    plot.update_yaxes(title="gamma", row=2, col=1)
    plot.update_xaxes(title="decode step", row=2, col=1)
    reading = "Bright is stable: the share of a step's blocks that the step before had already selected."
    if floor is not None:
        reading += " The theorem says that no head ever falls below the dashed floor once the context exceeds k."
    return Figure(f"gamma-{index}", f"Locality over time: {source.label}", source.trace.meta.status, reading, plot)


def misses_figure(source: TraceInput, index: int) -> Figure | None:
    """Misses per head and step by layer, mean and 90th percentile, cold rows left out."""
    rows = source.trace.selections
    meta = source.trace.meta
    warm = ~rows.cold
    if not warm.any():
        return None
    mean, high = [], []
    for layer in range(meta.model.n_layers):
        values = rows.n_misses[warm & (rows.layer == layer)]
        mean.append(float(values.mean()) if len(values) else None)
        high.append(float(np.percentile(values, 90)) if len(values) else None)
    layers = list(range(meta.model.n_layers))
    plot = go.Figure()
    plot.add_trace(go.Bar(x=layers, y=mean, name="mean", marker_color=COLOURS[0]))
    plot.add_trace(
        go.Scatter(x=layers, y=high, name="90th percentile", mode="markers", marker={"color": COLOURS[1], "size": 7})
    )
    bound = get_method(meta.method).max_loads(meta.sparse, 2**31)
    styled(plot, x="layer", y="blocks loaded per head and step")
    reading = f"Low is cheap: each block moves {meta.block_bytes:,} bytes over the link; slots = {meta.slots}."
    if meta.method != "full" and not meta.injected:
        reading += f" No head may ever load more than {bound} at slots = k."
    return Figure(f"misses-{index}", f"Misses by layer: {source.label}", meta.status, reading, plot)


def origins_figure(source: TraceInput, index: int) -> Figure | None:
    """Why blocks were selected, by layer."""
    rows = source.trace.selections
    if not len(rows.block_ids):
        return None
    n_layers = source.trace.meta.model.n_layers
    counts = np.zeros((len(ORIGIN_NAMES), n_layers))
    np.add.at(counts, (rows.origins, rows.layer[rows.row_of_entry]), 1)
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(axis=0)
    plot = go.Figure()
    for origin, name in enumerate(ORIGIN_NAMES):
        if counts[origin].any():
            plot.add_trace(
                go.Bar(x=list(range(n_layers)), y=shares[origin], name=name, marker_color=ORIGIN_COLOURS[origin])
            )
    styled(plot, x="layer", y="share of selected blocks", barmode="stack")
    plot.update_yaxes(tickformat=".0%", range=[0, 1])
    reading = "Only query-aware picks may change from step to step freely; the others are forced or change slowly."
    return Figure(
        f"origins-{index}", f"Why blocks are selected: {source.label}", source.trace.meta.status, reading, plot
    )


def measured_breakdown(source: TraceInput, index: int) -> Figure | None:
    """Mean time of a warm step by part, as the engine recorded it."""
    table = source.trace.table("steps").to_pandas()
    rows = source.trace.selections
    cold_steps = np.unique(rows.step[rows.cold])
    table = table[~table["step"].isin(cold_steps)]
    layers = table[table["layer"] != WHOLE_STEP_LAYER]
    whole = table[table["layer"] == WHOLE_STEP_LAYER]
    parts = [
        ("select_us", "selection"),
        ("h2d_us", "block fetch"),
        ("attention_us", "attention"),
        ("other_us", "projections and MLP"),
    ]
    n_steps = whole["step"].nunique()
    means = []
    for column, name in parts:
        use = layers if layers[column].notna().any() else whole
        if n_steps and use[column].notna().any():
            means.append((name, float(use[column].sum()) / n_steps / 1000))
    if not means:
        return None
    total = whole["time_us"].mean() / 1000 if whole["time_us"].notna().any() else None
    outside = total - sum(value for _, value in means) if total is not None else 0.0
    if outside > 0:
        means.append(("outside the layers", outside))
    plot = go.Figure()
    for colour, (name, value) in zip(COLOURS, means, strict=False):
        plot.add_trace(
            go.Bar(y=[source.label], x=[value], name=name, orientation="h", marker_color=colour, text=f"{value:.1f} ms")
        )
    styled(plot, height=230, x="milliseconds per step", barmode="stack")
    device = source.trace.meta.device or "an unnamed device"
    reading = f"Mean of {n_steps} warm steps, measured on {device}"
    reading += f"; a whole step takes {total:.1f} ms." if total is not None else "."
    return Figure(f"measured-time-{index}", f"Where a measured step goes: {source.label}", "measured", reading, plot)
