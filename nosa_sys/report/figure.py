"""One figure of a report: a plotly figure with its title, its trust label and how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from nosa_sys.traces.schema import status_kind

# Colour-blind safe (Okabe and Ito), dark enough on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#444444", "#8B4513")
ORIGIN_COLOURS = ("#444444", "#56B4E9", "#D55E00", "#009E73", "#BBBBBB")
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Figure:
    """``status`` is measured, validated, projected or injected, alone or before ": LABEL"; ``key`` is the id in the
    page."""

    key: str
    title: str
    status: str
    how_to_read: str
    plot: go.Figure

    @property
    def status_kind(self) -> str:
        return status_kind(self.status)


def styled(
    plot: go.Figure, *, height: int = 420, x: str | None = None, y: str | None = None, **layout: Any
) -> go.Figure:
    """The common look: white, light grid, legend above, generous margins."""
    plot.update_layout(
        template="plotly_white",
        height=height,
        font={"family": FONT, "size": 13, "color": "#1f2933"},
        margin={"l": 70, "r": 30, "t": 50, "b": 60},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel={"font": {"family": FONT}},
        colorway=list(COLOURS),
        **layout,
    )
    plot.update_xaxes(title=x, showline=True, linecolor="#9aa5b1", gridcolor="#eef1f4", zeroline=False)
    plot.update_yaxes(title=y, showline=True, linecolor="#9aa5b1", gridcolor="#eef1f4", zeroline=False)
    return plot
