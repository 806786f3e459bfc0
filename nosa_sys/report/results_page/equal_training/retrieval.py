"""Retrieval after equal training: scores by task and subject as heat maps, one for each context and k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from nosa_sys.report.figure import styled
from nosa_sys.report.results_page.equal_training.evaluations import (
    gap,
    read_evaluation,
    run_with,
    setting_name,
    shared_means,
)
from nosa_sys.report.results_page.files import Row, is_number, merged
from nosa_sys.report.results_page.section import Section

_STAGES = ("tasks", "tasks-1", "wide-tasks", "eighth", "16k-tasks")
_NEEDLES = ("passkey", "needle_single", "needle_multi_key", "needle_multi_value")  # what every setting has
_ROW, _MARGIN = 40, 115  # px: a row of a heat map, and what stands around one


def retrieval(root: Path) -> Section:
    """A heat map a setting; a subject's rows stand together, seed by seed."""
    key, title = "quality-retrieval", "Quality against transfers: retrieval"
    stages = {name: read_evaluation(root, name) for name in _STAGES}
    rows = {name: stage.having("score", "budget_k", "context", kind="task") for name, stage in stages.items()}
    lacks = tuple(gap(name) for name, found in rows.items() if not found)
    settings: dict[tuple[int, int], dict[tuple[str, int, str], Row]] = {}
    for row in (row for found in rows.values() for row in found):
        cells = settings.setdefault((int(row["context"]), int(row["budget_k"])), {})
        cells.setdefault((str(row["label"]), int(row["seed"]), str(row["task"])), row)
    if not settings:
        return Section(key, title, missing=lacks)
    order = sorted(settings, key=lambda setting: (setting[0], -setting[1]))
    shown = [name for name, found in rows.items() if found]
    return Section(
        key,
        title,
        _headline({setting: settings[setting] for setting in order}),
        _reading([row for cells in settings.values() for row in cells.values()]) + " " + run_with(shown),
        merged([origin for name in shown for origin in stages[name].origins(rows[name])]),
        tuple(_heat_map(setting, settings[setting]) for setting in order),
        missing=lacks,
    )


def _heat_map(setting: tuple[int, int], cells: dict[tuple[str, int, str], Row]) -> go.Figure:
    tasks = list(dict.fromkeys(task for *_, task in cells))
    labels = list(dict.fromkeys(label for label, *_ in cells))
    subjects = sorted({(label, seed) for label, seed, _ in cells}, key=lambda pair: (labels.index(pair[0]), pair[1]))
    grid = [[cells.get((*subject, task)) for task in tasks] for subject in subjects]
    plot = go.Figure(
        go.Heatmap(
            x=[task.replace("_", "<br>", 1).replace("_", " ") for task in tasks],
            y=[f"{label}, seed {seed}" for label, seed in subjects],
            z=[[row["score"] if row else None for row in line] for line in grid],
            text=[[_text(row) for row in line] for line in grid],
            texttemplate="%{text}", zmin=0, zmax=1, colorscale="Blues", xgap=2, ygap=2,
            showscale=False, hovertemplate="%{y}<br>%{x}: %{text}<extra></extra>",
        )
    )  # fmt: skip
    context, k = setting
    styled(
        plot, height=_MARGIN + _ROW * len(subjects), title={"text": f"{context // 1024}K, k = {k} blocks", "x": 0.01}
    )
    plot.update_layout(margin={"t": 50, "b": 60, "l": 190})
    plot.update_xaxes(showgrid=False, tickangle=0)
    plot.update_yaxes(showgrid=False, autorange="reversed")
    return plot


def _text(row: Row | None) -> str:
    """Score, and its interval where there is one."""
    if row is None:
        return ""
    if not (is_number(row.get("score_low")) and is_number(row.get("score_high"))):
        return f"{row['score']:.2f}"
    return f"{row['score']:.2f}<br>{row['score_low']:.2f} to {row['score_high']:.2f}"


def _headline(settings: dict[tuple[int, int], dict[tuple[str, int, str], Row]]) -> str:
    """The mean of the needle tasks over seeds, for the subjects of every setting."""
    means: dict[tuple[int, int], dict[str, list[float]]] = {}
    for setting, cells in settings.items():
        of = means.setdefault(setting, {})
        for label, seed in dict.fromkeys((label, seed) for label, seed, _ in cells):
            scores = [cells[label, seed, task]["score"] for task in _NEEDLES if (label, seed, task) in cells]
            if len(scores) == len(_NEEDLES):
                of.setdefault(label, []).append(sum(scores) / len(scores))
    text = shared_means(means, ".2f")
    return f"Mean score of the {len(_NEEDLES)} needle tasks over seeds: {text}." if text else ""


def _reading(rows: list[Row]) -> str:
    lone = [row for row in rows if not is_number(row.get("score_low"))]
    many = [row for row in rows if is_number(row.get("score_low"))]
    text = (
        f"Share of what was asked for that the model wrote, dark is better; {_range(rows, 'rows')} cases a cell. Below "
        "a score: its 95 % interval over the texts that serve as haystack."
    )
    if many:
        text += f" They are {_range(many, 'documents')} where an interval stands."
    if lone:
        where = sorted({setting_name(row["context"], row["budget_k"]) for row in lone})
        text += (
            f" At {' and '.join(where)} one text is the haystack of all cases: there is no interval, and differences "
            "of a few cases mean little."
        )
    return text


def _range(rows: list[Row], column: str) -> str:
    values: list[Any] = sorted({row[column] for row in rows if is_number(row.get(column))})
    return " or ".join(str(value) for value in values)
