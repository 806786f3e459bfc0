"""Where natural locality stops being enough for the link: tokens/s against misses, beside those that texts cause."""

from __future__ import annotations

import dataclasses

import numpy as np
import plotly.graph_objects as go

from nosa_sys.experiments.nosi_scale import FULL
from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.files import ResultRows, Row, merged, simulated
from nosa_sys.report.results_page.pricing import AUTO, EVEN_RULE, Priced, Situation, best_of, outside_note, price_all
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.report.results_page.throughput import NAMES
from nosa_sys.simulator.hardware import HardwareProfile

_COMMAND = "python -m nosa_sys.experiments.nosi_bench --out experiments/results/h200/nosi --stages"
# The link that the profile was measured on, and the simulator's description of the one before it.
_LINKS = (("own", "PCIe 5", COLOURS[0], "solid"), ("pcie4-x16", "PCIe 4", COLOURS[3], "dash"))
_MISSES = np.linspace(0.0, 20.0, 41)


def natural_misses(hot_buffer: ResultRows) -> dict[str, float]:
    """Misses a head of recorded real selections at slots = k, method by method, as a share of k times the k here."""
    rows = hot_buffer.having("misses_per_head", "topk", slots_over_k=1.0)
    return {
        str(r["method"]): float(r["misses_per_head"]) / r["topk"] * FULL.sparse.topk for r in rows if r.get("method")
    }


def enough_until(situation: Situation, profile: HardwareProfile) -> float | None:
    """Misses a head at which the copies of a step take as long as the rest of it (a launch a layer, nothing hidden)."""
    none, some = (dataclasses.replace(situation, misses=misses) for misses in (0.0, 8.0))
    without, with_some = price_all([none, some], [profile] * 2, "fused_kv")
    if with_some.step_time_us <= without.step_time_us:
        return None
    return 8.0 * without.step_time_us / (with_some.step_time_us - without.step_time_us)


def measured_limit(rows: list[Row]) -> float | None:
    """The same, measured: where transfer alone over compute alone crosses 1, between two miss rates of one schedule."""
    own = sorted((row for row in rows if row["schedule"] == "fused_kv"), key=lambda row: float(row["misses_per_head"]))
    ratio = [row["transfer_ms"] / row["compute_ms"] for row in own]
    if len(own) < 2 or not ratio[0] < 1 <= ratio[-1]:
        return None
    return float(np.interp(1.0, ratio, [row["misses_per_head"] for row in own]))


def link_limit(schedules: ResultRows, paper: ResultRows, hot_buffer: ResultRows, profile: HardwareProfile) -> Section:
    """Dots: every measured schedule and the paper's cells; lines: the fastest simulated schedule on two links."""
    key, title = "link-limit", "Where natural locality stops being enough for the link"
    rows = schedules.having("misses_per_head", "tokens_per_s", "compute_ms", "transfer_ms", "batch", "context")
    rows = [row for row in rows if row.get("schedule") in AUTO]
    if not rows:
        return missing(key, title, "no measured row of schedules", f"{_COMMAND} schedules")
    batch, context = int(rows[0]["batch"]), int(rows[0]["context"])
    base = Situation(FULL.shape, FULL.sparse, "nosa", batch, context)
    plot = go.Figure()
    limits: dict[str, float | None] = {}
    priced: list[Priced] = []
    for link, name, colour, dash in _LINKS:
        machine = profile.with_link(link)
        line = best_of([dataclasses.replace(base, misses=float(m)) for m in _MISSES], [machine] * len(_MISSES))
        priced += line
        limits[name] = enough_until(base, machine)
        plot.add_trace(
            go.Scatter(
                x=_MISSES, y=[point.tokens_per_s for point in line], mode="lines", line={"color": colour, "dash": dash},
                name=f"simulated, {name} ({machine.link_gbps:.0f} GB/s)",
            )
        )  # fmt: skip
    cells = paper.having("misses_per_head", "tokens_per_s", batch=batch, context=context)
    groups = [(schedule, [row for row in rows if row["schedule"] == schedule], COLOURS[6]) for schedule in AUTO]
    groups += [("the paper's cells", cells, COLOURS[1])] if cells else []
    for symbol, (name, own, colour) in zip(("circle", "square", "diamond", "cross", "star"), groups, strict=False):
        marker: Row = {"symbol": symbol, "size": 9, "color": colour}
        plot.add_trace(
            go.Scatter(
                x=[row["misses_per_head"] for row in own], y=[row["tokens_per_s"] for row in own], mode="markers",
                marker=marker, name=f"measured, {name}",
            )
        )  # fmt: skip
    natural = natural_misses(hot_buffer)
    for method, misses in natural.items():
        colour = COLOURS[1] if method == "infllmv2" else COLOURS[2]
        text = f"{NAMES.get(method, method)}: {misses:.1f}"
        plot.add_vline(x=misses, line={"dash": "dot", "color": colour}, annotation_text=text)
    styled(plot, height=470, x="misses a head and step", y="tokens/s")
    plot.update_layout(margin={"t": 90})
    plot.update_yaxes(rangemode="tozero")
    origins = [*schedules.origins(rows), *paper.origins(cells)]
    if natural:
        origins += hot_buffer.origins(hot_buffer.having("misses_per_head"))
    natural_rule = f"natural misses: their share of k in the trace, times {FULL.sparse.topk}"
    notes = (EVEN_RULE, "PCIe 5: the profile's own link, PCIe 4: the simulator's description pcie4-x16", natural_rule)
    lacks = () if natural else (f"natural misses of a real text; {_COMMAND} hot_buffer --trace METHOD=DIR makes them",)
    return Section(
        key,
        title,
        _headline(limits, measured_limit(rows), natural, batch, context),
        f"Batch {batch}, {context // 1024}K, k = {FULL.sparse.topk}, slots = k. Left of the limit copies can hide "
        "behind compute, right of it the link sets the pace. Vertical lines: what each method's selections of a real "
        "text load, counted in a playback of recorded sets.",
        merged([*origins, simulated(profile, *notes, outside_note(priced))]),
        (plot,),
        missing=lacks,
    )


def _headline(
    limits: dict[str, float | None], measured: float | None, natural: dict[str, float], batch: int, context: int
) -> str:
    shown = [f"{value:.1f} on {name}" for name, value in limits.items() if value is not None]
    text = f"Batch {batch}, {context // 1024}K: copies take as long as compute at {' and '.join(shown)} misses a head"
    text += " (projected)" + (f", measured on the card: {measured:.1f}." if measured is not None else ".")
    limit = measured if measured is not None else next(iter(limits.values()))
    slow = limits.get("PCIe 4")
    for method, misses in natural.items():
        parts = [
            f"{misses / most:.1f} x {where}"
            for where, most in (("the limit here", limit), ("that of PCIe 4", slow))
            if most is not None
        ]
        text += f" {NAMES.get(method, method)} loads {misses:.1f}: {', '.join(parts)}."
    return text
