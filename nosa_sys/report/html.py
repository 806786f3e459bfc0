"""Pieces of every HTML page here: its style, the document around a body, labels, tables, and plots drawn offline."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from nosa_sys import __version__
from nosa_sys.report.figure import FONT

STATUS_TEXT = {
    "measured": "recorded from a real run on the device named below, or counted exactly from its record",
    "validated": "predicted, and checked against runs that calibration never saw",
    "projected": "predicted by the model, not checked against a run",
    "injected": "a real run whose selections were given from outside",
}

STYLE = f"""
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
details {{ color: #52606d; font-size: 14px; margin-top: 4px; }}
summary {{ cursor: pointer; }}
code {{ font-size: 13px; overflow-wrap: anywhere; }}
"""


def document(title: str, body: str) -> str:
    """A whole page that loads nothing from outside; plotly.js is inside once."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><main>{body}<footer>Made by nosa-sys {__version__}. This file loads nothing from outside.</footer>"
        "</main></body></html>\n"
    )


def legend_of(kinds: Iterable[str]) -> str:
    """What the labels used on a page mean, in the order of STATUS_TEXT."""
    used = set(kinds)
    return "; ".join(f"{pill(kind, kind)} {html.escape(text)}" for kind, text in STATUS_TEXT.items() if kind in used)


def pill(kind: str, text: str) -> str:
    """A label in the colour of its kind; nothing for a kind that is none of STATUS_TEXT."""
    return f'<span class="status {kind}">{html.escape(text)}</span>' if kind in STATUS_TEXT else ""


def html_id(key: str) -> str:
    """A figure's key as an element id: plotly writes it into HTML and scripts as it is, and names come from outside.

    What is no plain character becomes its number, so that different keys stay different.
    """
    return re.sub(r"[^A-Za-z0-9.-]", lambda found: f"_{ord(found[0])}_", key)


def plot_html(plot: go.Figure, key: str) -> str:
    """A plot as a part of a page that holds plotly.js already."""
    config = {"displayModeBar": False, "responsive": True}
    return str(plot.to_html(full_html=False, include_plotlyjs=False, div_id=html_id(key), config=config))


def table_html(rows: Iterable[Sequence[Any]]) -> str:
    """A table whose first row is its head; cells that are numbers are right-aligned, None is a dash."""
    head, *rest = [list(row) for row in rows]
    lines = ["<tr>" + "".join(f"<th{_align(rest, i)}>{html.escape(str(c))}</th>" for i, c in enumerate(head)) + "</tr>"]
    for row in rest:
        lines.append("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


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
