"""The HTML page: headline numbers, figures with their reading, what-if and provenance tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nosa_sys.report.figure import Figure
from nosa_sys.report.headline import headline_numbers
from nosa_sys.report.html import document, html_id, legend_of, pill, plot_html, table_html
from nosa_sys.report.inputs import ReportInputs
from nosa_sys.report.model_errors import model_error_rows
from nosa_sys.report.provenance import provenance_rows
from nosa_sys.report.replay_figures import replay_figures
from nosa_sys.report.sweep_figures import sweep_figures
from nosa_sys.report.time_figures import prediction_figure
from nosa_sys.report.trace_figures import trace_figures
from nosa_sys.report.validation_figures import validation_figures
from nosa_sys.report.what_if import what_if_rows
from nosa_sys.traces.schema import status_kind


@dataclass(frozen=True)
class Page:
    """The document and the keys of the figures drawn in it."""

    html: str
    figures: list[str]


def build_page(inputs: ReportInputs, *, title: str = "NOSA report") -> Page:
    """Assemble the page. Figures whose data is missing are left out; every text from outside is escaped."""
    figures = [f for index, source in enumerate(inputs.traces) for f in trace_figures(source, index)]
    figures += replay_figures(inputs.replays)
    figures += prediction_figure(inputs.predictions)
    figures += sweep_figures(inputs.sweeps, inputs.traces)
    figures += validation_figures(inputs.validations)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        '<p class="lead">Every figure says how far to trust it: '
        f"{legend_of(figure.status_kind for figure in figures)}.</p>",
        _cards(headline_numbers(inputs)),
        *(_section(figure) for figure in figures),
    ]
    for sweep_title, status, rows in what_if_rows(inputs.sweeps):
        reading = "One setting changed at a time from the first row; the last column is tokens/s against that row."
        body.append(_table_section(sweep_title, status, reading, rows))
    errors = model_error_rows(inputs.predictions)
    if len(errors) > 1:
        reading = "Each measured point predicted by the model fitted to all others; relative errors, fit by fit."
        body.append(_table_section("How well the profile's models fit", "measured", reading, errors))
    body.append(
        _table_section(
            "Where these numbers come from", None, "What is needed to make them again.", provenance_rows(inputs)
        )
    )
    return Page(document(title, "".join(body)), [html_id(figure.key) for figure in figures])


def _cards(numbers: Sequence[tuple[str, str]]) -> str:
    cards = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>'
        for value, text in numbers
    )
    return f'<div class="cards">{cards}</div>'


def _header(title: str, status: str | None) -> str:
    return f"<header><h2>{html.escape(title)}</h2>{pill(status_kind(status or ''), str(status))}</header>"


def _section(figure: Figure) -> str:
    reading = f'<p class="reading">{html.escape(figure.how_to_read)}</p>'
    return f"<section>{_header(figure.title, figure.status)}{plot_html(figure.plot, figure.key)}{reading}</section>"


def _table_section(title: str, status: str | None, reading: str, rows: Iterable[Sequence[Any]]) -> str:
    return f'<section>{_header(title, status)}<p class="reading">{html.escape(reading)}</p>{table_html(rows)}</section>'
