"""Perplexity over dense and bytes a step by block size, from blocks of 128 tokens to single tokens, at equal tokens."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.equal_training.evaluations import (
    error_bars,
    gap,
    part_note,
    perplexities,
    read_evaluation,
    recipe_sparse,
    run_with,
)
from nosa_sys.report.results_page.files import ResultRows, Row, is_number
from nosa_sys.report.results_page.section import Section

_STAGE = "ablation-blocks"
_BYTES = (("h2d_bytes_per_step", "slots = k", "solid"), ("hot_h2d_bytes_per_step", "LRU slots", "dash"))


def quality_by_block_size(root: Path) -> Section:
    """NOSA and InfLLMv2 trained with one block size, evaluated with others."""
    key, title = "quality-blocks", "Quality against transfers: block size"
    stage = read_evaluation(root, _STAGE)
    rows = perplexities(stage, "block_size", "h2d_bytes_per_step")
    if not rows:
        return Section(key, title, missing=(gap(_STAGE),))
    sizes = sorted({int(row["block_size"]) for row in rows}, reverse=True)
    methods = {
        label: sorted((row for row in rows if row["label"] == label), key=lambda row: -row["block_size"])
        for label in dict.fromkeys(row["label"] for row in rows)
    }
    plot = make_subplots(1, 2, subplot_titles=("perplexity over dense, %", "H2D bytes a step, MB"))
    for label, own in methods.items():
        colour = own[0]["colour"]
        plot.add_trace(
            go.Scatter(
                x=[_tokens(row) for row in own], y=[row["over_dense"] for row in own], error_y=error_bars(own, colour),
                name=label, mode="lines+markers", line={"color": colour},
                hovertext=[_text(row) for row in own], hoverinfo="text",
            ),
            row=1, col=1,
        )  # fmt: skip
        for column, slots, dash in _BYTES:
            known = [row for row in own if is_number(row.get(column))]
            plot.add_trace(
                go.Scatter(
                    x=[_tokens(row) for row in known], y=[row[column] / 1e6 for row in known],
                    name=f"{label}, {slots}", showlegend=False, mode="lines+markers",
                    line={"color": colour, "dash": dash}, hovertext=[_text(row) for row in known], hoverinfo="text",
                ),
                row=1, col=2,
            )  # fmt: skip
    for _, slots, dash in _BYTES:
        line = {"color": COLOURS[6], "dash": dash}
        plot.add_trace(go.Scatter(x=[None], y=[None], name=f"right: {slots}", mode="lines", line=line), row=1, col=2)
    styled(plot, height=440)
    plot.update_layout(margin={"t": 50, "b": 110}, legend={"y": -0.22, "yanchor": "top"})
    order = [str(size) for size in sizes]
    plot.update_xaxes(title="tokens a block", type="category", categoryorder="array", categoryarray=order)
    plot.update_yaxes(rangemode="tozero")
    return Section(key, title, _headline(methods), _reading(stage, rows), stage.origins(rows), (plot,))


def _tokens(row: Row) -> str:
    return str(int(row["block_size"]))


def _text(row: Row) -> str:
    parts = [f"{row['label']}, blocks of {_tokens(row)}, {row['over_dense']:+.2f} % over dense"]
    if is_number(row.get("over_dense_all")):
        parts.append(f"{row['over_dense_all']:+.2f} % over all positions")
    parts += [f"{name} {row[name]:.3f}" for name in ("recall", "dense_mass", "gamma_macro") if is_number(row.get(name))]
    if is_number(row.get("gpu_bytes")):
        parts.append(f"{row['gpu_bytes'] / 1e6:.0f} MB a sequence on the GPU")
    return "<br>".join(parts)


def _headline(methods: dict[str, list[Row]]) -> str:
    """From the widest block to the finest: perplexity, bytes and GPU memory."""
    parts = []
    for label, own in methods.items():
        wide, fine = own[0], own[-1]
        text = (
            f"{label}: {wide['over_dense']:.2f} % over dense with blocks of {_tokens(wide)} tokens, "
            f"{fine['over_dense']:.2f} % with {_named(fine)}, for "
            f"{_times(fine, wide, 'h2d_bytes_per_step')} x the bytes at slots = k"
        )
        if is_number(wide.get("gpu_bytes")) and is_number(fine.get("gpu_bytes")):
            text += f" and {_times(fine, wide, 'gpu_bytes')} x the GPU memory"
        parts.append(text)
    return "; ".join(parts) + "."


def _named(row: Row) -> str:
    return "single tokens" if row["block_size"] == 1 else f"blocks of {_tokens(row)}"


def _times(row: Row, other: Row, column: str) -> str:
    return f"{row[column] / other[column]:.2f}" if other[column] else "?"


def _reading(stage: ResultRows, rows: list[Row]) -> str:
    size = recipe_sparse(stage).get("block_size", "one size")
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    return (
        f"k, window and k_q are equal in tokens (k is {rows[0].get('budget_k')} blocks of {size}); the models were "
        f"trained with blocks of {size}. {rows[0].get('documents')} texts of {rows[0].get('context')} tokens, seed "
        f"{seeds}; bars are 95 % over documents. {part_note('the pointer')} "
        "Finer blocks cross the link in shorter runs, which the figure on "
        f"fragments prices, and compressed keys take the GPU memory that the pointer shows. {run_with([_STAGE])}"
    )
