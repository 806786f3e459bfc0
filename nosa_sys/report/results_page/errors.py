"""Predicted against measured: every validation there is, with a histogram of its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.inputs import VALIDATION_FILE, read_validation
from nosa_sys.report.results_page.files import Origin, ResultRows
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.report.validation_figures import validation_figures

# Folder under the results, what it validates, and the command that fills it.
_VALIDATIONS = (
    (
        "h200/validate",
        "the CUDA engine on an H200",
        "python -m nosa_sys.experiments.gpu_validation --out experiments/results/h200/validate --calibrate",
    ),
    (
        "cpu/validate",
        "the engine on a CPU",
        "nosa validate experiments/validate-cpu.yaml --out experiments/results/cpu/validate",
    ),
)


def predicted_against_measured(root: Path) -> list[Section]:
    """A section for each validation, also for one that is not there."""
    sections = []
    for folder, what, command in _VALIDATIONS:
        key, title = f"validation-{folder.partition('/')[0]}", f"Predicted against measured: {what}"
        file = root / folder / VALIDATION_FILE
        if not file.is_file():
            sections.append(missing(key, title, "no validation run", command))
            continue
        document = read_validation(file)
        cells = [row for row in document["cells"] if row.get("error") is not None]
        if not cells:
            sections.append(missing(key, title, f"none of {len(document['cells'])} cells could be compared", command))
            continue
        sections.append(_section(key, title, document, cells, file))
    return sections


def _section(key: str, title: str, document: dict[str, Any], cells: list[dict[str, Any]], file: Path) -> Section:
    figure = validation_figures([document])[0]
    errors = np.array([float(row["error"]) for row in cells])
    source = ResultRows(file.as_posix(), [], document)
    facts = source.origin("measured").facts
    facts |= {name: str(document[name]) for name in ("weights", "selections", "hardware") if document.get(name)}
    kinds = ["injected" if document.get("selections") == "injected" else "measured", str(document.get("status"))]
    origins = tuple(Origin(kind, file.as_posix(), str(document.get("device")), facts) for kind in kinds)
    return Section(
        key,
        title,
        _headline(document, cells, errors),
        figure.how_to_read,
        origins,
        (figure.plot, _histogram(cells)),
        _by_schedule(cells),
    )


def _headline(document: dict[str, Any], cells: list[dict[str, Any]], errors: np.ndarray) -> str:
    text = (
        f"{len(cells)} of {len(document['cells'])} cells compared: median error of the step time "
        f"{np.median(np.abs(errors)):.1%}, nine in ten within {np.percentile(np.abs(errors), 90):.1%}, "
        f"{errors[np.argmax(np.abs(errors))]:+.1%} at worst."
    )
    noise = document.get("noise_median")
    if noise is not None:
        text += f" Runs of one cell differ by {float(noise):.1%} among themselves."
    order = document.get("orderings")
    if isinstance(order, dict) and order.get("pairs"):
        text += f" Schedules are ordered as measured in {order['agree']} of {order['pairs']} pairs."
    return text


def _histogram(cells: list[dict[str, Any]]) -> go.Figure:
    plot = go.Figure()
    field = "schedule" if any(row.get("schedule") for row in cells) else "method"
    for colour, name in zip(COLOURS * 8, sorted({str(row.get(field)) for row in cells}), strict=False):
        own = [100 * float(row["error"]) for row in cells if str(row.get(field)) == name]
        plot.add_trace(go.Histogram(x=own, name=name, marker_color=colour, xbins={"size": 1.0}))
    styled(plot, height=300, x="error of the predicted step time, %", y="cells", barmode="stack")
    return plot


def _by_schedule(cells: list[dict[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """Errors by schedule where cells have one."""
    names = sorted({str(row["schedule"]) for row in cells if row.get("schedule")})
    if not names:
        return ()
    rows: list[tuple[Any, ...]] = [("schedule", "cells", "median error, %", "p90, %", "worst, %")]
    for name in names:
        size = np.array([100 * abs(float(row["error"])) for row in cells if row.get("schedule") == name])
        rows.append((name, len(size), float(np.median(size)), float(np.percentile(size, 90)), float(size.max())))
    return tuple(rows)
