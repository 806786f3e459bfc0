"""Predicted against measured: a dot a cell of `nosa validate`, with lines at 5 and 10 % around equality."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from nosa_sys.report.figure import COLOURS, Figure, styled

_BANDS = ((0.05, "dash"), (0.10, "dot"))


def validation_figures(validations: list[dict[str, Any]]) -> list[Figure]:
    """One figure for each validation that compared a cell; cells that failed are counted in its reading."""
    found = []
    for index, document in enumerate(validations):
        rows = [row for row in document.get("cells") or [] if row.get("error") is not None]
        if rows:
            found.append(_figure(document, rows, index))
    return found


def _figure(document: dict[str, Any], rows: list[dict[str, Any]], index: int) -> Figure:
    measured = [row["measured_step_us"] / 1000 for row in rows]
    predicted = [row["predicted_step_us"] / 1000 for row in rows]
    ends = [0.8 * min(measured + predicted), 1.25 * max(measured + predicted)]
    plot = go.Figure()
    plot.add_trace(go.Scatter(x=ends, y=ends, name="equal", mode="lines", line={"color": "#52606d"}))
    for share, dash in _BANDS:
        for sign in (1, -1):
            plot.add_trace(
                go.Scatter(
                    x=ends,
                    y=[end * (1 + sign * share) for end in ends],
                    name=f"{share:.0%}",
                    legendgroup=f"{share:.0%}",
                    showlegend=sign > 0,
                    mode="lines",
                    line={"color": "#9aa5b1", "dash": dash, "width": 1},
                )
            )
    for colour, method in zip(COLOURS * 8, sorted({str(row["method"]) for row in rows}), strict=False):
        chosen = [i for i, row in enumerate(rows) if str(row["method"]) == method]
        plot.add_trace(
            go.Scatter(
                x=[measured[i] for i in chosen],
                y=[predicted[i] for i in chosen],
                text=[_label(rows[i]) for i in chosen],
                name=method,
                mode="markers",
                marker={"size": 10, "color": colour},
            )
        )
    styled(plot, x="measured, ms per step", y="predicted, ms per step")
    plot.update_xaxes(type="log")
    plot.update_yaxes(type="log")
    errors = document.get("errors") or {}
    stated = ", ".join(f"{name} {value:.1%}" for name, value in errors.items() if value is not None)
    reading = (
        f"Each dot is a cell that calibration did not use, on {document.get('device')}. Step time errors: {stated}."
    )
    n_left_out = len(document.get("cells") or []) - len(rows)
    if n_left_out:
        reading += f" Cells that failed and are not drawn: {n_left_out}."
    title = f"Predicted against measured: {document.get('name')}"
    return Figure(f"validation-{index}", title, str(document.get("status")), reading, plot)


def _label(row: dict[str, Any]) -> str:
    return f"batch {row['batch']}, k={row['topk']}, context {row['context']}, slots {row['slots']}: {row['error']:+.1%}"
