"""Where a predicted step goes: stacked parts for predictions and for the batches of a sweep."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from nosa_sys.report.figure import COLOURS, Figure, styled
from nosa_sys.report.sweep_rows import baseline, matching, text_of

PARTS = (
    ("select_us", "selection", COLOURS[4]),
    ("h2d_exposed_us", "exposed H2D transfer", COLOURS[1]),
    ("attention_us", "attention", COLOURS[2]),
    ("gemm_us", "GEMM", COLOURS[0]),
    ("host_overhead_us", "host overhead", COLOURS[6]),
    ("d2h_exposed_us", "exposed D2H transfer", COLOURS[3]),
)


def _stacked(labels: list[str], rows: list[dict[str, Any]]) -> go.Figure:
    plot = go.Figure()
    for column, name, colour in PARTS:
        values = [row.get(column) for row in rows]
        if any(value is not None and not pd.isna(value) and value > 0 for value in values):
            shown = [value / 1000 if value is not None and not pd.isna(value) else None for value in values]
            plot.add_trace(go.Bar(x=labels, y=shown, name=name, marker_color=colour))
    return styled(plot, y="milliseconds per step", barmode="stack")


def prediction_figure(predictions: list[dict[str, Any]]) -> list[Figure]:
    """One stacked bar for each prediction."""
    if not predictions:
        return []
    labels = []
    for index, prediction in enumerate(predictions):
        settings = prediction.get("settings") or {}
        labels.append(
            f"{index + 1}: {settings.get('model_shape')}<br>batch {settings.get('batch')}, "
            f"{prediction.get('hardware') or settings.get('hardware')}"
        )
    plot = _stacked(labels, predictions)
    statuses = {str(prediction.get("status")) for prediction in predictions}
    status = statuses.pop() if len(statuses) == 1 else "projected"
    reading = (
        "Exposed transfer is time in which the GPU waits for blocks; transfers hidden behind compute cost nothing."
    )
    return [Figure("predictions", "Where a predicted step goes", status, reading, plot)]


def breakdown(rows: pd.DataFrame, key: str, model: str, status: str) -> Figure | None:
    """Stacked parts of a sweep's baseline, batch by batch and slots by slots."""
    if "batch" not in rows.columns or not any(column in rows.columns for column, _, _ in PARTS):
        return None
    base = baseline(rows)
    free = ("batch", "slots_over_k", "policy")
    chosen = matching(rows, base, but=free).sort_values([n for n in free if n in rows.columns])
    if "slots_over_k" in chosen.columns:
        ends = (chosen["slots_over_k"].min(), chosen["slots_over_k"].max())
        chosen = chosen[chosen["slots_over_k"].isin(ends)]
    labels = [
        f"{row['batch']}<br>{text_of('slots_over_k', row['slots_over_k']).removeprefix('slots ')}"
        if "slots_over_k" in row
        else str(row["batch"])
        for _, row in chosen.iterrows()
    ]
    plot = _stacked(labels, [{str(k): v for k, v in row.items()} for row in chosen.to_dict("records")])
    plot.update_xaxes(title="sequences decoded together, and device slots")
    reading = "The coloured transfer share is what spare slots remove; what remains is compute and overhead."
    return Figure(f"breakdown-{key}", f"Where a predicted step goes: {model}", status, reading, plot)
