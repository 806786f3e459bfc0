"""Tokens/s against batch: measured dots of every method on the simulator's lines."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nosa_sys.experiments.nosi_scale import FULL
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.files import Origin, ResultRows, Row, is_number, merged, simulated
from nosa_sys.report.results_page.pricing import EVEN_RULE, Priced, Situation, best_of, outside_note
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.sparse_config import SparseConfig

_COLUMNS = ("batch", "context", "tokens_per_s", "topk", "block_size", "misses_per_head")
_COLOUR = {"full": COLOURS[6], "nosa": COLOURS[0], "infllmv2": COLOURS[1], "dma": COLOURS[2]}
NAMES = {"full": "FullAttn", "nosa": "NOSA", "infllmv2": "InfLLMv2", "dma": "DMA"}
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)


def situation(row: Row) -> Situation:
    """What a measured row ran, as the simulator takes it."""
    sparse = SparseConfig().with_block_size(int(row["block_size"])).with_topk(int(row["topk"]))
    slots: Any = row.get("slots")
    return Situation(
        ModelShape.preset(str(row.get("model_shape", FULL.shape.name))),
        sparse,
        str(row["method"]),
        int(row["batch"]),
        int(row["context"]),
        float(row["misses_per_head"]),
        int(slots) if is_number(slots) else None,
        bool(row.get("offload", True)),
    )


def series_name(row: Row) -> str:
    """Method and how its KV is kept."""
    name = NAMES.get(str(row["method"]), str(row["method"]))
    if row.get("runner") == "eager":
        return f"{name}, unfused"
    if get_method(str(row["method"])).dense:
        return name
    if not row.get("offload", True):
        return f"{name}, all KV on the device"
    ratio: Any = row.get("slots_over_k")
    return f"{name}, {float(ratio):g} k slots" if is_number(ratio) else f"{name}, offloaded"


def throughput(methods: ResultRows, crossover: ResultRows, profile: HardwareProfile) -> list[Section]:
    """A section for every context of the experiment and of its rows."""
    found = [methods.having(*_COLUMNS), crossover.having(*_COLUMNS)]
    contexts = {int(row["context"]) for rows in found for row in rows} | set(FULL.contexts)
    sections = []
    for context in sorted(contexts):
        compared, swept = ([row for row in rows if row["context"] == context] for rows in found)
        origins = [*methods.origins(compared), *crossover.origins(swept)]
        sections.append(_section(context, compared, swept, origins, profile))
    return sections


def _section(
    context: int, compared: list[Row], swept: list[Row], origins: list[Origin], profile: HardwareProfile
) -> Section:
    """``compared``: rows of the comparison at equal bytes, ``swept``: of the sweep over batches."""
    key, title = f"throughput-{context}", f"Tokens/s against batch, {context // 1024}K context"
    command = f"python -m nosa_sys.experiments.nosi_bench --out experiments/results/h200/nosi --contexts {context}"
    if not compared and not swept:
        return missing(key, title, "no measured row of this context", f"{command} --stages methods")
    rows = [*compared, *swept]
    fused = [row for row in rows if row.get("runner") != "eager"]
    errors = [
        p.prediction.tokens_per_s / row["tokens_per_s"] - 1
        for row, p in zip(fused, best_of([situation(row) for row in fused], [profile] * len(fused)), strict=True)
        if p.prediction.tokens_per_s
    ]
    lines = _lines(fused, profile)
    lacks: tuple[str, ...] = ()
    if not swept and context == FULL.contexts[0]:
        lacks = (f"a measured sweep over batches; {command} --stages crossover makes it",)
    return Section(
        key,
        title,
        _headline(compared, errors),
        "Dots are measured. Batches of the comparison are those that equal GPU bytes allow (a dot says whose), so read "
        "each method at its own batch. Lines are simulated at the misses of the first dot of their colour, with the "
        "fastest of four schedules; they end where the memory of the profile's machine ends, and are marked where they "
        "leave what the profile was measured at." + _host_note(rows, profile),
        merged([*origins, simulated(profile, EVEN_RULE, outside_note([p for line in lines.values() for p in line]))]),
        (_plot(rows, lines),),
        missing=lacks,
    )


def _host_note(rows: list[Row], profile: HardwareProfile) -> str:
    """Where dots kept more KV on the host than the profile's machine has; empty where none did."""
    beyond = [row for row in rows if is_number(row.get("host_pool_bytes"))]
    beyond = [row for row in beyond if row["host_pool_bytes"] > profile.host_memory_bytes]
    had = max((float(row["host_pinned_bytes"]) for row in beyond if is_number(row.get("host_pinned_bytes"))), default=0)
    if not had:
        return ""
    return (
        f" Lines of offloaded KV end with the profile's host memory, {profile.host_memory_bytes / 1e9:.0f} GB, while "
        f"the dots had {had / 2**30:.0f} GiB ({had / 1e9:.0f} GB) of it pinned."
    )


def _headline(compared: list[Row], errors: list[float]) -> str:
    """NOSA against FullAttn and InfLLMv2 where their rows stand beside each other, and how far the lines are off.

    FullAttn's row is that of the batch whose bytes NOSA was given, where rows say so.
    """

    def fastest(method: str, **equal: Any) -> Row | None:
        kept = [r for r in compared if r["method"] == method and r.get("runner") != "eager"]
        kept = [r for r in kept if all(r.get(name) == value for name, value in equal.items())]
        return max(kept, key=lambda r: float(r["tokens_per_s"]), default=None)

    nosa, parts = fastest("nosa", offload=True), []
    if nosa is not None:
        full = fastest("full", batch=nosa.get("full_batch")) or fastest("full")
        others = [row for row in (full, fastest("infllmv2", offload=True)) if row is not None]
        text = f"Measured: {series_name(nosa)} gives {nosa['tokens_per_s']:,.0f} tokens/s at batch {nosa['batch']}"
        if is_number(nosa.get("equivalent_batch")):
            text += f" in the GPU KV bytes of {nosa['equivalent_batch']:.1f} FullAttn sequences"
        ratios = [
            f"{nosa['tokens_per_s'] / row['tokens_per_s']:.2f} x {series_name(row)} at batch {row['batch']}"
            for row in others
        ]
        parts.append(text + (", " + " and ".join(ratios) if ratios else "") + ".")
    if errors:
        side = "fast" if np.median(errors) > 0 else "slow"
        parts.append(
            f"The lines miss the dots by {np.median(np.abs(errors)):.0%} in the median, mostly too {side} "
            f"({max(errors, key=abs):+.0%} at worst)."
        )
    return " ".join(parts)


def _by_series(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(series_name(row), []).append(row)
    return found


def _lines(fused: list[Row], profile: HardwareProfile) -> dict[str, list[Priced]]:
    """For every series its first row's situation over the batches, all in one call."""
    wanted: list[tuple[str, Situation]] = []
    for name, rows in _by_series(fused).items():
        base = situation(rows[0])
        batches = sorted({*_BATCHES, *(int(row["batch"]) for row in rows)})
        wanted += [(name, dataclasses.replace(base, batch=batch)) for batch in batches]
    lines: dict[str, list[Priced]] = {}
    for (name, _), point in zip(wanted, best_of([s for _, s in wanted], [profile] * len(wanted)), strict=True):
        lines.setdefault(name, []).append(point)
    return lines


def _plot(records: list[Row], lines: dict[str, list[Priced]]) -> go.Figure:
    plot = go.Figure()
    for name, rows in _by_series(records).items():
        colour = COLOURS[5] if rows[0].get("runner") == "eager" else _COLOUR.get(str(rows[0]["method"]), COLOURS[3])
        dash, symbol = _style(rows[0])
        if line := lines.get(name):
            outside = ["; ".join(point.prediction.extrapolated) for point in line]
            plot.add_trace(
                go.Scatter(
                    x=[point.situation.batch for point in line],
                    y=[point.tokens_per_s for point in line],
                    text=[f"<br>extrapolated: {text}" if text else "" for text in outside],
                    name=f"{name}: simulated",
                    legendgroup=name,
                    showlegend=False,
                    mode="lines+markers",
                    line={"color": colour, "dash": dash, "width": 1.5},
                    marker={"symbol": "x-thin-open", "size": [6 if text else 0 for text in outside], "color": colour},
                    hovertemplate="simulated, batch %{x}: %{y:,.0f} tokens/s%{text}<extra>" + name + "</extra>",
                )
            )
        plot.add_trace(
            go.Scatter(
                x=[row["batch"] for row in rows],
                y=[row["tokens_per_s"] for row in rows],
                text=[_hover(row) for row in rows],
                name=name,
                legendgroup=name,
                mode="markers",
                marker={"color": colour, "size": 10, "symbol": symbol, "line": {"color": "#fff", "width": 1}},
                hovertemplate="measured, batch %{x}: %{y:,.0f} tokens/s<br>%{text}<extra>" + name + "</extra>",
            )
        )
    styled(plot, height=500, x="sequences decoded together", y="tokens/s, all sequences together")
    plot.update_layout(margin={"t": 90})
    plot.update_xaxes(type="log", tickvals=list(_BATCHES), ticktext=[str(b) for b in _BATCHES])
    plot.update_yaxes(type="log", dtick="D2")
    return plot


def _style(row: Row) -> tuple[str, str]:
    if not row.get("offload", True) and not get_method(str(row["method"])).dense:
        return "dot", "square"
    ratio: Any = row.get("slots_over_k")
    return ("dash", "diamond") if is_number(ratio) and ratio > 1 else ("solid", "circle")


def _hover(row: Row) -> str:
    parts = [f"{row['misses_per_head']:.2f} misses a head, schedule {row.get('schedule_in_use', '')}"]
    limit = row.get("batch_limited_by")
    if isinstance(limit, str) and limit:
        parts.append(f"batch from: {limit}")
    if row.get("key_means_dtype"):
        parts.append(f"compressed keys in {row['key_means_dtype']}")
    return "<br>".join(parts)
