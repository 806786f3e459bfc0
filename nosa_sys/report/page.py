"""The HTML page: headline numbers, figures with their reading, what-if and provenance tables, plotly.js once."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plotly.offline import get_plotlyjs

from nosa_sys import __version__
from nosa_sys.report.figure import FONT, Figure
from nosa_sys.report.headline import headline_numbers
from nosa_sys.report.inputs import ReportInputs
from nosa_sys.report.provenance import provenance_rows
from nosa_sys.report.replay_figures import replay_figures
from nosa_sys.report.sweep_figures import sweep_figures
from nosa_sys.report.time_figures import prediction_figure
from nosa_sys.report.trace_figures import trace_figures
from nosa_sys.report.validation_figures import validation_figures
from nosa_sys.report.what_if import what_if_rows
from nosa_sys.traces.schema import status_kind

_STATUS_TEXT = {
    "measured": "recorded from a real run on the device named below, or counted exactly from its record",
    "validated": "predicted, and checked against runs that calibration never saw",
    "projected": "predicted by the model, not checked against a run",
    "injected": "a real run whose selections were given from outside",
}

_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #f5f7fa; color: #1f2933; font: 16px/1.55 {FONT}; }}
main {{ max-width: 1060px; margin: 0 auto; padding: 32px 20px 64px; }}
h1 {{ font-size: 30px; margin: 0 0 4px; letter-spacing: -0.01em; }}
h2 {{ font-size: 19px; margin: 0; }}
.lead {{ color: #52606d; margin: 0 0 24px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; margin-bottom: 28px; }}
.card, section {{ background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; }}
.card {{ padding: 14px 16px; }}
.card b {{ display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums; }}
.card span {{ color: #52606d; font-size: 14px; }}
section {{ padding: 20px 22px 14px; margin-bottom: 22px; }}
header {{ display: flex; gap: 12px; align-items: baseline; justify-content: space-between; }}
.status {{ font-size: 12px; font-weight: 600; text-transform: uppercase; letter-spacing: 0.05em; padding: 2px 9px;
  border-radius: 10px; white-space: nowrap; }}
.measured {{ background: #d9f2e6; color: #05603a; }} .validated {{ background: #dbeafe; color: #1e40af; }}
.projected {{ background: #fdebd0; color: #8a4b08; }} .injected {{ background: #ece4fb; color: #5b21b6; }}
.reading {{ color: #52606d; margin: 4px 0 6px; font-size: 15px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; margin: 8px 0; }}
th {{ text-align: left; color: #52606d; font-weight: 600; }}
th, td {{ padding: 6px 10px 6px 0; border-bottom: 1px solid #eef1f4; vertical-align: top; overflow-wrap: anywhere; }}
td.n, th.n {{ text-align: right; white-space: nowrap; }}
td.n + td:not(.n), th.n + th:not(.n) {{ padding-left: 14px; }}
footer {{ color: #7b8794; font-size: 14px; }}
"""


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
        + "; ".join(
            f'<span class="status {status}">{status}</span> {html.escape(_STATUS_TEXT[status])}'
            for status in _STATUS_TEXT
            if any(figure.status_kind == status for figure in figures)
        )
        + ".</p>",
        _cards(headline_numbers(inputs)),
        *(_section(figure) for figure in figures),
    ]
    for sweep_title, status, rows in what_if_rows(inputs.sweeps):
        reading = "One setting changed at a time from the first row; the last column is tokens/s against that row."
        body.append(_table_section(sweep_title, status, reading, rows))
    body.append(
        _table_section(
            "Where these numbers come from", None, "What is needed to make them again.", provenance_rows(inputs)
        )
    )
    body.append(f"<footer>Made by nosa-sys {__version__}. This file loads nothing from outside.</footer>")
    document = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )
    return Page(document, [html_id(figure.key) for figure in figures])


def html_id(key: str) -> str:
    """A figure's key as an element id: plotly writes it into HTML and scripts as it is, and names come from outside.

    What is no plain character becomes its number, so that different keys stay different.
    """
    return re.sub(r"[^A-Za-z0-9.-]", lambda found: f"_{ord(found[0])}_", key)


def _cards(numbers: Sequence[tuple[str, str]]) -> str:
    cards = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>'
        for value, text in numbers
    )
    return f'<div class="cards">{cards}</div>'


def _header(title: str, status: str | None) -> str:
    kind = status_kind(status or "")
    label = f'<span class="status {kind}">{html.escape(str(status))}</span>' if kind in _STATUS_TEXT else ""
    return f"<header><h2>{html.escape(title)}</h2>{label}</header>"


def _section(figure: Figure) -> str:
    plot = figure.plot.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=html_id(figure.key),
        config={"displayModeBar": False, "responsive": True},
    )
    reading = f'<p class="reading">{html.escape(figure.how_to_read)}</p>'
    return f"<section>{_header(figure.title, figure.status)}{plot}{reading}</section>"


def _table_section(title: str, status: str | None, reading: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table whose first row is its head; cells that are numbers are right-aligned."""
    head, *rest = [list(row) for row in rows]
    lines = ["<tr>" + "".join(f"<th{_align(rest, i)}>{html.escape(str(c))}</th>" for i, c in enumerate(head)) + "</tr>"]
    for row in rest:
        lines.append("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>")
    table = f'<div class="scroll"><table>{"".join(lines)}</table></div>'
    return f'<section>{_header(title, status)}<p class="reading">{html.escape(reading)}</p>{table}</section>'


def _align(rows: list[list[Any]], column: int) -> str:
    numeric = any(isinstance(row[column], (int, float)) for row in rows)
    return ' class="n"' if numeric else ""


def _cell(value: Any) -> str:
    if value is None:
        return '<td class="n">-</td>'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}")
        return f'<td class="n">{text}</td>'
    return f"<td>{html.escape(str(value))}</td>"
