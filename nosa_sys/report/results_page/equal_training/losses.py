"""Training: each method's loss above that of dense training with the same seed and the same texts in the same order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.errors import TraceError
from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.inputs import read_json
from nosa_sys.report.results_page.equal_training.evaluations import FOLDER, series, shared_means
from nosa_sys.report.results_page.files import Origin, ResultRows, is_number
from nosa_sys.report.results_page.section import Section

SMOOTHED = 40  # steps
_RUNS = (("runs-8k", "train-low-rank"), ("runs-16k", "train-16k"))  # folder, recipe
_DASHES = ("solid", "dot", "dash", "dashdot")


@dataclass(frozen=True)
class _Run:
    """``losses``: nats a token by step; ``panel``: context in tokens and k in blocks."""

    label: str
    colour: str
    dense: bool
    seed: int
    panel: tuple[int, int]
    losses: dict[int, float]
    document: dict[str, Any]


_Line = tuple[_Run, list[int], list[float]]


def training_losses(root: Path) -> Section:
    """A panel for each context and k, a line for each method and seed."""
    key, title = "training-losses", "Training: loss above dense"
    folders = {folder: _read(root, folder) for folder, _ in _RUNS}
    lines = {folder: _lines(runs) for folder, runs in folders.items()}
    lacks = tuple(_gap(folder, recipe) for folder, recipe in _RUNS if not lines[folder])
    panels = sorted({run.panel for of in lines.values() for run, *_ in of}, key=lambda panel: (panel[0], -panel[1]))
    if not panels:
        return Section(key, title, missing=lacks)
    shown = [line for of in lines.values() for line in of]
    plot = _plot(panels, shown)
    return Section(
        key,
        title,
        _headline(shown),
        f"Dense of the same seed is zero: it reads the same texts in the same order. Means of {SMOOTHED} steps up to "
        "each, on a log axis (what is not above dense is not drawn). What is left at the end is what a method costs "
        "after training for it; the fall before is what training mends. Recipes: "
        + ", ".join(f"experiments/{recipe}.yaml" for folder, recipe in _RUNS if lines[folder])
        + ".",
        tuple(_origin(root, folder, recipe, folders[folder]) for folder, recipe in _RUNS if lines[folder]),
        (plot,),
        missing=lacks,
    )


def _plot(panels: list[tuple[int, int]], lines: list[_Line]) -> go.Figure:
    """The first panel over the whole width, the others side by side below it."""
    columns = max(1, len(panels) - 1)
    grid: list[list[dict[str, int] | None]] = [[{"colspan": columns}, *([None] * (columns - 1))]]
    if len(panels) > 1:
        grid.append([{} for _ in range(columns)])
    titles = [f"{context // 1024}K, k {k}: loss above dense" for context, k in panels]
    plot = make_subplots(len(grid), columns, specs=grid, subplot_titles=titles, vertical_spacing=0.16)
    places = {panel: (1, 1) if index == 0 else (2, index) for index, panel in enumerate(panels)}
    seeds = sorted({run.seed for run, *_ in lines})
    named: set[str] = set()
    for run, steps, above in lines:
        row, column = places[run.panel]
        plot.add_trace(
            go.Scatter(
                x=steps, y=[value if value > 0 else None for value in above], name=run.label, legendgroup=run.label,
                showlegend=run.label not in named, mode="lines",
                line={"color": run.colour, "width": 1.6, "dash": _dash(seeds, run.seed)},
                hovertemplate=f"{run.label}, seed {run.seed}: %{{y:.4f}} at step %{{x}}<extra></extra>",
            ),
            row=row, col=column,
        )  # fmt: skip
        named.add(run.label)
    for seed in seeds:
        line = {"color": COLOURS[6], "dash": _dash(seeds, seed)}
        plot.add_trace(go.Scatter(x=[None], y=[None], name=f"seed {seed}", mode="lines", line=line), row=1, col=1)
    styled(plot, height=150 + 330 * len(grid))
    plot.update_layout(margin={"t": 50, "b": 110}, legend={"y": -0.1, "yanchor": "top"})
    plot.update_xaxes(title="step")
    plot.update_yaxes(type="log", tickvals=[m * 10.0**e for e in range(-5, 1) for m in (1, 2, 3, 5)], tickformat="~g")
    plot.update_yaxes(title="nats a token", col=1)
    return plot


def _dash(seeds: list[int], seed: int) -> str:
    return _DASHES[seeds.index(seed) % len(_DASHES)]


def _read(root: Path, folder: str) -> list[_Run]:
    """Runs of a folder that have a loss log and a summary."""
    runs = []
    for directory in sorted((root / FOLDER / folder).glob("*-seed*")):
        log, summary = directory / "loss.jsonl", directory / "summary.json"
        if not (log.is_file() and summary.is_file()):
            continue
        document = read_json(summary)
        settings = document.get("settings") or {}
        sparse = settings.get("sparse") or {}
        if not (is_number(sparse.get("topk")) and is_number(settings.get("length"))):
            raise TraceError(f"{summary} needs settings with length and sparse.topk")
        style = series(settings, sparse)
        panel = int(settings["length"]), int(sparse["topk"])
        dense, seed = settings.get("method") == "full", int(settings.get("seed", 0))
        runs.append(_Run(style["label"], style["colour"], dense, seed, panel, _losses(log), document))
    return runs


def _losses(log: Path) -> dict[int, float]:
    """By step; a step that was written again after a resumption counts as written last."""
    losses = {}
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            losses[int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{log}, line {number}: needs step and loss ({error})") from None
    return losses


def _lines(runs: list[_Run]) -> list[_Line]:
    """Steps and smoothed differences of every method that has dense of its seed beside it, over the steps of both."""
    dense = {run.seed: run.losses for run in runs if run.dense}
    lines = []
    for run in runs:
        steps = sorted(run.losses.keys() & dense.get(run.seed, {}).keys())
        if run.dense or len(steps) < SMOOTHED:
            continue
        above = [run.losses[step] - dense[run.seed][step] for step in steps]
        smooth = np.convolve(above, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
        lines.append((run, steps[SMOOTHED - 1 :], [float(value) for value in smooth]))
    return lines


def _headline(lines: list[_Line]) -> str:
    """The last mean over seeds, by panel, for the methods of every panel."""
    ends: dict[tuple[int, int], dict[str, list[float]]] = {}
    for run, _, above in lines:
        ends.setdefault(run.panel, {}).setdefault(run.label, []).append(above[-1])
    text = shared_means({panel: ends[panel] for panel in sorted(ends, key=lambda panel: (panel[0], -panel[1]))}, "+.4f")
    return f"Loss above dense in the last {SMOOTHED} steps, nats a token, mean of seeds: {text}." if text else ""


def _origin(root: Path, folder: str, recipe: str, runs: list[_Run]) -> Origin:
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    document = {**runs[0].document, "command": _command(recipe), "seeds": seeds}
    return ResultRows((root / FOLDER / folder / "*/loss.jsonl").as_posix(), [], document).origin("measured")


def _command(recipe: str) -> str:
    return f"nosa train experiments/{recipe}.yaml --texts TEXTS --out out/{recipe} --device cuda --attention triton"


def _gap(folder: str, recipe: str) -> str:
    kept = f"experiments/results/{FOLDER}/{folder}/RUN/"
    return f"loss logs of dense and another method; {_command(recipe)} makes them (loss.jsonl and summary.json: {kept})"
