"""Ties and overflow of ED-DMA's and DMA's scores: at extreme head inputs, and as kept types tie a trained head's."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.files import ResultRows, Row
from nosa_sys.report.results_page.section import Section, missing

_COMMAND = "python -m nosa_sys.experiments.head_numerics --out experiments/results/cpu/head_numerics"
_HEADS = {"ed_dma": ("ED-DMA", COLOURS[0]), "dma": ("DMA", COLOURS[1])}
_KEPT = ("float64", "float32", "float16", "bfloat16")


def head_numerics(stage: ResultRows) -> Section:
    """Left: inputs whose score another input has too, and whose plain exponential is infinite. Right: pooled scores of
    a trained head that tie, with the heads whose core changes."""
    key, title = "head-numerics", "What exponents and short types do to eviction scores"
    grid = [
        row
        for row in stage.having("A", "n_inputs", "n_tied", part="grid", implementation="reference", dtype="float32")
        if row.get("head") in _HEADS
    ]
    kept = [
        row
        for row in stage.having("n_pooled", "n_pooled_tied", "n_cores_changed", "n_heads", part="precision")
        if row.get("head") in _HEADS and row.get("kept") in _KEPT and row["n_pooled"]
    ]
    if not (grid and kept):
        return missing(key, title, "no measured row of eviction heads", _COMMAND)
    plot = make_subplots(
        1, 2, subplot_titles=("head inputs -1000 to 1000, fp32: share lost", "trained head: pooled scores that tie")
    )
    for head, (name, colour) in _HEADS.items():
        own = sorted((row for row in grid if row["head"] == head), key=lambda row: float(row["A"]))
        plot.add_trace(
            go.Bar(
                x=[f"{row['A']:g}" for row in own], y=[row["n_tied"] / row["n_inputs"] for row in own],
                name=f"{name}: ties", marker={"color": colour}, legendgroup=head,
            ),
            row=1, col=1,
        )  # fmt: skip
        bars = sorted((row for row in kept if row["head"] == head), key=lambda row: _KEPT.index(str(row["kept"])))
        plot.add_trace(
            go.Bar(
                x=[row["kept"] for row in bars], y=[_tied(row) for row in bars],
                text=[f"{row['n_cores_changed']}/{row['n_heads']}" for row in bars], textposition="outside",
                name=name, marker={"color": colour}, legendgroup=head, showlegend=False,
            ),
            row=1, col=2,
        )  # fmt: skip
    lost = sorted((row for row in grid if "n_exp_overflows" in row), key=lambda row: float(row["A"]))
    plot.add_trace(
        go.Scatter(
            x=[f"{row['A']:g}" for row in lost], y=[row["n_exp_overflows"] / row["n_inputs"] for row in lost],
            name="exp(beta) without a limit is infinite", mode="markers",
            marker={"color": COLOURS[6], "symbol": "x", "size": 9},
        ),
        row=1, col=1,
    )  # fmt: skip
    styled(plot, height=440, barmode="group")
    plot.update_layout(margin={"t": 110}, legend={"y": 1.16})
    plot.update_xaxes(title="A", type="category", row=1, col=1)
    plot.update_xaxes(title="kept in; above each bar: heads whose core changes", row=1, col=2)
    plot.update_yaxes(range=[0, 1.05], tickformat=".0%")
    return Section(
        key,
        title,
        _headline(kept),
        "ED-DMA ranks by beta, DMA by its exponential. Inputs far below zero tie under either, since softplus ends "
        "there; DMA also ties where the exponential reaches its limit or rounds to 1. Ties in float64 are blocks that "
        "share their best window. A core changes where its top m blocks are not those of float64.",
        stage.origins([*grid, *kept]),
        plots=(plot,),
    )


def _tied(row: Row) -> float:
    return float(row["n_pooled_tied"] / row["n_pooled"])


def _headline(kept: list[Row]) -> str:
    parts = []
    for head, (name, _) in _HEADS.items():
        own = {str(row["kept"]): row for row in kept if row["head"] == head}
        row = own.get("bfloat16")
        if row is not None:
            parts.append(
                f"{name}: {_tied(row):.0%} of a trained head's pooled scores tie in bfloat16 and the core changes in "
                f"{row['n_cores_changed']} of {row['n_heads']} heads"
            )
    return "; ".join(parts) + ("." if parts else "")
