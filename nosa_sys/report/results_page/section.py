"""One figure of the results page: its headline, its plots or table, and where every kind of number in it comes from."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from nosa_sys.report.html import html_id, pill, plot_html, table_html
from nosa_sys.report.results_page.files import Origin

_LABELS = {"injected": "measured, block sets injected"}


@dataclass(frozen=True)
class Section:
    """``missing``: what is not there and the command that makes it; a section may have both it and plots."""

    key: str
    title: str
    headline: str = ""
    how_to_read: str = ""
    origins: tuple[Origin, ...] = ()
    plots: tuple[go.Figure, ...] = ()
    table: tuple[tuple[Any, ...], ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.plots or self.table)

    def html(self) -> str:
        """The section; all text is escaped."""
        labels = "".join(
            f"<div>{pill(origin.kind, _LABELS.get(origin.kind, origin.kind))} "
            f"{html.escape(origin.device)}, <code>{html.escape(origin.file)}</code></div>"
            for origin in self.origins
        )
        parts = [
            f'<section id="{html_id(self.key)}-section"><h2>{html.escape(self.title)}</h2>',
            f"<p><b>{html.escape(self.headline)}</b></p>" if self.headline else "",
            *(plot_html(plot, f"{self.key}-{index}") for index, plot in enumerate(self.plots)),
            table_html(self.table) if self.table else "",
            f'<p class="reading">{html.escape(self.how_to_read)}</p>' if self.how_to_read and not self.empty else "",
            *(f'<p class="reading">Not there yet: {html.escape(text)}</p>' for text in self.missing),
            labels,
            _details(self.origins),
            "</section>",
        ]
        return "".join(parts)


def _details(origins: tuple[Origin, ...]) -> str:
    rows = [(o.file, key, value) for o in origins for key, value in {"device": o.device, **o.facts}.items()]
    if not rows:
        return ""
    return (
        f"<details><summary>Versions and commands</summary>{table_html([('source', 'fact', 'value'), *rows])}</details>"
    )


def missing(key: str, title: str, what: str, command: str) -> Section:
    """A section without data that says what makes it."""
    return Section(key, title, missing=(f"{what}; {command} makes it",))
