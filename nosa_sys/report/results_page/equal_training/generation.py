"""Long generation after equal training: dense-model perplexity of the written text by its parts, and repetition."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.report.figure import styled
from nosa_sys.report.inputs import read_parquet
from nosa_sys.report.results_page.equal_training.evaluations import (
    FOLDER,
    error_bars,
    gap,
    read_evaluation,
    run_with,
    setting_name,
    shared_means,
)
from nosa_sys.report.results_page.files import Row, merged
from nosa_sys.report.results_page.section import Section

_STAGES = ("generation", "16k-tasks")
_LOOP = 0.5  # of the 4-grams distinct
_COLUMNS = ("dense_perplexity", "distinct_4_grams")


def long_generation(root: Path) -> Section:
    """A row of two panels for each evaluation: perplexity under the dense model, and share of distinct 4-grams."""
    key, title = "quality-generation", "Quality against transfers: long generation"
    stages = {name: read_evaluation(root, name) for name in _STAGES}
    rows = {name: stage.having(*_COLUMNS, kind="generation") for name, stage in stages.items()}
    parts = {name: [row for row in found if _first(row) is not None] for name, found in rows.items()}
    shown = [name for name in _STAGES if parts[name]]
    lacks = tuple(gap(name) for name in _STAGES if not parts[name])
    if not shown:
        return Section(key, title, missing=lacks)
    titles = [
        f"{_setting(parts[name])}: {what}" for name in shown for what in ("dense-model perplexity", "distinct 4-grams")
    ]
    plot = make_subplots(len(shown), 2, subplot_titles=titles, vertical_spacing=0.14)
    named: set[str] = set()
    for index, name in enumerate(shown, 1):
        _draw(plot, index, parts[name], named)
    styled(plot, height=110 + 330 * len(shown), barmode="group")
    plot.update_layout(margin={"t": 50, "b": 80}, legend={"y": -0.1, "yanchor": "top"})
    plot.update_xaxes(title="tokens written", type="category")
    plot.update_yaxes(rangemode="tozero", col=1)
    low = min(float(row["distinct_4_grams"]) for name in shown for row in parts[name])
    plot.update_yaxes(tickformat=".0%", range=[math.floor(20 * low - 0.2) / 20, 1.005], col=2)
    return Section(
        key,
        title,
        _headline([rows[name] for name in shown]),
        " ".join(
            text
            for text in (
                _reading([row for name in shown for row in parts[name]]),
                *(_looping(rows[name], _loops(root, name)) for name in shown),
                run_with(shown),
            )
            if text
        ),
        merged([origin for name in shown for origin in stages[name].origins(parts[name])]),
        (plot,),
        missing=lacks,
    )


def _first(row: Row) -> int | None:
    """The first token of a part such as 1024-2047; None for all and for second half."""
    found = re.fullmatch(r"(\d+)-\d+", str(row.get("part")))
    return int(found[1]) if found else None


def _draw(plot: go.Figure, line: int, rows: list[Row], named: set[str]) -> None:
    for label, seed in dict.fromkeys((row["label"], row["seed"]) for row in rows):
        own = sorted(
            (row for row in rows if (row["label"], row["seed"]) == (label, seed)), key=lambda r: _first(r) or 0
        )
        colour, x = own[0]["colour"], [row["part"] for row in own]
        legend: dict[str, Any] = {"name": label, "legendgroup": label}
        plot.add_trace(
            go.Bar(
                x=x, y=[row["dense_perplexity"] for row in own], marker={"color": colour},
                error_y={**error_bars(own, colour, "dense_perplexity"), "color": "#1f2933"},
                showlegend=label not in named, **legend,
            ),
            row=line, col=1,
        )  # fmt: skip
        plot.add_trace(
            go.Scatter(
                x=x, y=[row["distinct_4_grams"] for row in own], mode="lines+markers", line={"color": colour},
                showlegend=False, **legend,
            ),
            row=line, col=2,
        )  # fmt: skip
        named.add(label)


def _setting(rows: list[Row]) -> str:
    """Context and budget, as every row of an evaluation has them."""
    return setting_name(int(rows[0]["context"]), rows[0]["budget_k"])


def _loops(root: Path, name: str) -> dict[str, tuple[int, int]]:
    """By subject, how many texts repeat themselves in their second half (fewer than ``_LOOP`` of the 4-grams distinct),
    and of how many; from the evaluation's rows, a file beside its figures."""
    file = root / FOLDER / "eval" / f"{name}.parquet"
    if not file.is_file():
        return {}
    rows = read_parquet(file)
    if not {"kind", "part", "subject", "distinct_4_grams"} <= set(rows.columns):
        return {}
    half = rows[(rows["kind"] == "generation") & (rows["part"] == "second half")]
    shares = {str(subject): group["distinct_4_grams"].dropna() for subject, group in half.groupby("subject")}
    return {subject: (int((share < _LOOP).sum()), len(share)) for subject, share in shares.items()}


def _headline(stages: list[list[Row]]) -> str:
    """The second half of what was written, for the subjects of every setting."""
    shares: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in (row for rows in stages for row in rows if row.get("part") == "second half"):
        of = shares.setdefault((int(row["context"]), int(row["budget_k"])), {})
        of.setdefault(row["label"], []).append(float(row["distinct_4_grams"]))
    text = shared_means(shares, ".0%")
    return f"Distinct 4-grams in the second half of what was written: {text}." if text else ""


def _looping(rows: list[Row], loops: dict[str, tuple[int, int]]) -> str:
    """A sentence on the subjects of an evaluation that fell into loops; empty for none."""
    labels = {str(row["subject"]): row["label"] for row in rows}
    named = [
        f"{label} in {loops[name][0]} of {loops[name][1]} texts"
        for name, label in labels.items()
        if name in loops and loops[name][0]
    ]
    return f"Loops in the second half at {_setting(rows)}: {', '.join(named)}." if named else ""


def _reading(rows: list[Row]) -> str:
    """How to tell a good text from a loop, with the worst part by distinct 4-grams."""
    documents = sorted({int(row["documents"]) for row in rows})
    seeds = sorted({int(row["seed"]) for row in rows})
    worst = min(rows, key=lambda row: float(row["distinct_4_grams"]))
    return (
        "Each subject goes on with held-out texts, sampled with the same seeds; the dense model of the same training "
        "then reads what it wrote. Low perplexity is good only while 4-grams stay distinct: a text that repeats itself "
        f"is easy to predict, and counts as a loop where fewer than {_LOOP:.0%} are distinct. Fewest are distinct with "
        f"{worst['label']}, tokens {worst['part']}: {worst['distinct_4_grams']:.0%} at a perplexity of "
        f"{worst['dense_perplexity']:.1f}. {' or '.join(map(str, documents))} texts, seed "
        f"{' and '.join(map(str, seeds))}; bars are 95 % over texts."
    )
