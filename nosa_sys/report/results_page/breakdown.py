"""Where a step goes: compute and exposed transfer, measured beside simulated, for every schedule and miss rate."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.files import ResultRows, Row, merged, simulated
from nosa_sys.report.results_page.pricing import AUTO, EVEN_RULE, price_all
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.report.results_page.throughput import situation
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.prediction import Prediction

_COLUMNS = ("batch", "context", "topk", "block_size", "misses_per_head", "step_ms_median", "compute_ms", "transfer_ms")
_PARTS = (
    ("select_ms", "select_us", "selection", COLOURS[4]),
    ("attention_ms", "attention_us", "attention", COLOURS[2]),
    ("other_ms", "rest_us", "matrices and the rest", COLOURS[0]),
    ("h2d_exposed_ms", "h2d_exposed_us", "exposed transfer", COLOURS[1]),
)
_COMMAND = "python -m nosa_sys.experiments.nosi_bench --out experiments/results/h200/nosi --stages"


def breakdown(schedules: ResultRows, paper: ResultRows, profile: HardwareProfile) -> list[Section]:
    """Schedules x misses in two parts; the paper's cells in four."""
    return [_schedules(schedules, profile), _phases(paper, profile)]


def _schedules(stage: ResultRows, profile: HardwareProfile) -> Section:
    key, title = "breakdown", "Where a step goes, by schedule and misses"
    rows = [row for row in stage.having(*_COLUMNS) if row.get("schedule") in AUTO]
    if not rows:
        return missing(key, title, "no measured row of schedules", f"{_COMMAND} schedules")
    pairs: list[tuple[Row, Prediction]] = []
    for name in AUTO:
        own = [row for row in rows if row["schedule"] == name]
        pairs += zip(own, price_all([situation(r) for r in own], [profile] * len(own), name), strict=True)
    return Section(
        key,
        title,
        _headline(pairs),
        "Left bar of a pair: measured, right bar: simulated. The lower part is the step without copies of missed "
        "blocks, the upper part what copies add to it. The line marks the copies alone: what no bar shows was hidden.",
        merged([*stage.origins(rows), simulated(profile, EVEN_RULE)]),
        (_pairs_plot(pairs),),
    )


def _by_misses(pairs: list[tuple[Row, Prediction]]) -> dict[str, list[tuple[Row, Prediction]]]:
    """Pairs of one miss rate under its name, ascending: that of a row's segment, which all schedules share."""
    found: dict[str, list[tuple[Row, Prediction]]] = {}
    for row, prediction in sorted(pairs, key=lambda pair: float(pair[0]["misses_per_head"])):
        name = str(row.get("segment") or f"{row['misses_per_head']:.2g} misses")
        found.setdefault(name, []).append((row, prediction))
    return found


def _headline(pairs: list[tuple[Row, Prediction]]) -> str:
    parts = []
    for name, own in _by_misses(pairs).items():
        rows = [row for row, _ in own]
        fastest = min(rows, key=lambda r: float(r["step_ms_median"]))
        # the least compute of any: overlapping schedules add launches of their own
        longer = max(min(float(row["compute_ms"]) for row in rows), float(fastest["transfer_ms"]))
        parts.append(f"{name}: {fastest['schedule']} ({fastest['step_ms_median'] / longer:.2f} x)")
    errors = [p.step_time_us / 1e3 / row["step_ms_median"] - 1 for row, p in pairs]
    text = "Fastest schedule by misses a head, and its step over the longer of the least compute and its copies: "
    text += f"{', '.join(parts)}."
    typical, worst = np.median(np.abs(errors)), max(errors, key=abs)
    return f"{text} Simulated steps differ by {typical:.0%} in the median, {worst:+.0%} at worst."


def _pairs_plot(pairs: list[tuple[Row, Prediction]]) -> go.Figure:
    groups = _by_misses(pairs)
    plot = make_subplots(1, len(groups), shared_yaxes=True, subplot_titles=[f"{name} a head" for name in groups])
    for column, own in enumerate(groups.values(), 1):
        for side, place in (("measured", -0.2), ("simulated", 0.2)):
            at, lower, upper = [], [], []
            for row, prediction in own:
                if side == "measured":
                    step, compute = float(row["step_ms_median"]), float(row["compute_ms"])
                else:
                    step = prediction.step_time_us / 1e3
                    compute = step - prediction.h2d_exposed_us / 1e3
                at.append(AUTO.index(row["schedule"]) + place)
                lower.append(min(step, compute))
                upper.append(max(0.0, step - compute))
            opacity = 1.0 if side == "measured" else 0.55
            for name, values, colour in (("compute", lower, COLOURS[0]), ("exposed transfer", upper, COLOURS[1])):
                plot.add_trace(
                    go.Bar(
                        x=at, y=values, width=0.36, name=f"{name}, {side}",
                        marker={"color": colour, "opacity": opacity},
                        legendgroup=f"{name}{side}", showlegend=column == 1,
                        hovertemplate="%{y:.2f} ms<extra>%{fullData.name}</extra>",
                    ),
                    row=1, col=column,
                )  # fmt: skip
        plot.add_trace(
            go.Scatter(
                x=[AUTO.index(row["schedule"]) - 0.2 for row, _ in own], y=[row["transfer_ms"] for row, _ in own],
                mode="markers", marker={"symbol": "line-ew-open", "size": 14, "color": COLOURS[6]},
                name="copies alone, measured", legendgroup="alone", showlegend=column == 1,
                hovertemplate="%{y:.2f} ms<extra>copies alone</extra>",
            ),
            row=1, col=column,
        )  # fmt: skip
    styled(plot, height=460, barmode="stack")
    plot.update_layout(margin={"t": 110}, legend={"y": 1.12})
    plot.update_xaxes(tickvals=list(range(len(AUTO))), ticktext=list(AUTO), tickangle=-45)
    plot.update_yaxes(title="milliseconds a step", col=1)
    return plot


def _phases(stage: ResultRows, profile: HardwareProfile) -> Section:
    key, title = "phases", "Parts of a step, measured and simulated"
    rows = stage.having(*_COLUMNS[:6], *(column for column, _, _, _ in _PARTS))
    if not rows:
        return missing(key, title, "no measured row of the paper's cells with their phases", f"{_COMMAND} paper")
    names = [str(row.get("schedule_in_use") or "fused_kv") for row in rows]
    found = [
        price_all([situation(row)], [profile], name if name in AUTO else "fused_kv")[0]
        for row, name in zip(rows, names, strict=True)
    ]
    plot = go.Figure()
    for column, attribute, name, colour in _PARTS:
        measured, simulated_ms = [row[column] for row in rows], [_part_ms(p, attribute) for p in found]
        for side, values, place in (("measured", measured, -0.2), ("simulated", simulated_ms, 0.2)):
            plot.add_trace(
                go.Bar(
                    x=[i + place for i in range(len(rows))], y=values, width=0.36, name=f"{name}, {side}",
                    marker={"color": colour, "opacity": 1.0 if side == "measured" else 0.55},
                    hovertemplate="%{y:.2f} ms<extra>%{fullData.name}</extra>",
                )
            )  # fmt: skip
    styled(plot, height=440, y="milliseconds a step", barmode="stack")
    labels = [
        f"{row['method']}, {row['misses_per_head']:.1f} misses<br>{name}" for row, name in zip(rows, names, strict=True)
    ]
    plot.update_layout(margin={"t": 90})
    plot.update_xaxes(tickvals=list(range(len(rows))), ticktext=labels)
    slowest = max(rows, key=lambda r: float(r["step_ms_median"]))
    largest = max(_PARTS, key=lambda part: float(slowest[part[0]]))
    share = float(slowest[largest[0]]) / float(slowest["step_ms_median"])
    return Section(
        key,
        title,
        f"At {slowest['misses_per_head']:.1f} misses a head ({slowest['method']}, batch {slowest['batch']}) "
        f"{largest[2]} is the largest part: {share:.0%} of {slowest['step_ms_median']:.1f} ms.",
        "Phases are timed in a run with clock marks, exposed transfer is the step less the step without copies; "
        "in overlapping schedules phases of a layer run side by side, so a bar may be longer than the step.",
        merged([*stage.origins(rows), simulated(profile, EVEN_RULE)]),
        (plot,),
    )


def _part_ms(prediction: Prediction, attribute: str) -> float:
    if attribute == "rest_us":
        return (prediction.gemm_us + prediction.host_overhead_us) / 1e3
    return float(getattr(prediction, attribute)) / 1e3
