"""Perplexity over dense against host-to-device bytes a step, relative to InfLLMv2, at slots = k and with LRU slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.equal_training.comparison import (
    BYTES,
    COLUMNS,
    OVER_DENSE,
    OVER_INFLLMV2,
    Point,
    levels_of,
    points,
    table,
)
from nosa_sys.report.results_page.equal_training.evaluations import (
    by_seed,
    error_bars,
    gap,
    part_note,
    perplexities,
    read_evaluation,
    recipe_sparse,
    run_with,
    setting_name,
)
from nosa_sys.report.results_page.files import is_number, merged
from nosa_sys.report.results_page.section import Section

_SUBJECTS, _BUDGETS, _TOPKS, _OTHERS = ("low-rank-seeds", "wide"), "ablation-budgets", "ablation-k", ("eighth", "16k")
_SLOTS = ("slots = k", "LRU slots")  # of COLUMNS
_SYMBOLS = ("circle", "diamond-open", "square-open", "triangle-up-open")
_NAMED_BUDGETS = (1, 2, 4, 8, 12, 16, 23)


def quality_against_transfers(root: Path) -> Section:
    """Subjects at one k with both seeds, a line over k_q, lines over k, and a table of all settings."""
    key, title = "quality-transfers", "Quality against transfers: perplexity after equal training"
    stages = {name: read_evaluation(root, name) for name in (*_SUBJECTS, _BUDGETS, _TOPKS, *_OTHERS)}
    rows = {
        name: perplexities(stage, "perplexity", "context", "budget_k", COLUMNS[0]) for name, stage in stages.items()
    }
    levels = levels_of(row for found in rows.values() for row in found)
    subjects = [point for name in _SUBJECTS for point in points(rows[name], levels)]
    budgets = points(rows[_BUDGETS], levels)
    topks = points(rows[_TOPKS], levels, recipe_sparse(stages[_TOPKS]).get("topk"))
    others = [point for name in _OTHERS for point in points(rows[name], levels)]
    plots = [
        *([_at_one_k(subjects, budgets)] if subjects or budgets else []),
        *([_over_k(topks)] if topks else []),
    ]
    lacks = tuple(gap(name) for name, found in rows.items() if not found)
    if not plots:
        return Section(key, title, missing=lacks or (f"InfLLMv2 to hold others against; {gap(_SUBJECTS[0])}",))
    shown = [name for name, found in rows.items() if found]
    return Section(
        key,
        title,
        _headline([*subjects, *others]),
        _reading(subjects, budgets, topks) + " " + run_with(shown),
        merged([origin for name in shown for origin in stages[name].origins(rows[name])]),
        tuple(plots),
        table([*subjects, *others]),
        lacks,
    )


def _panels(shown: Sequence[Point]) -> go.Figure:
    slots = {
        row["hot_slots"] / row["topk"] for row in (p.row for p in shown) if row.get("hot_slots") and row.get("topk")
    }
    hot = " or ".join(f"{ratio:.4g} k" for ratio in sorted(slots)) or "more"
    return make_subplots(
        1, 2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=("slots = k", f"{hot} LRU slots")
    )


def _at_one_k(subjects: list[Point], budgets: list[Point]) -> go.Figure:
    plot = _panels([*subjects, *budgets])
    seeds = sorted({p.row["seed"] for p in subjects})
    for panel in range(len(COLUMNS)):
        if budgets:
            _line(plot, panel, budgets, "NOSA, k_q as written", COLOURS[7], _NAMED_BUDGETS)
        for label, seed in dict.fromkeys((p.row["label"], p.row["seed"]) for p in subjects):
            own = [p for p in subjects if (p.row["label"], p.row["seed"]) == (label, seed)]
            own = sorted((p for p in own if p.loaded[panel] is not None), key=lambda p: p.row.get("select_blocks") or 0)
            colour = own[0].row["colour"] if own else COLOURS[7]
            plot.add_trace(
                go.Scatter(
                    x=[p.loaded[panel] for p in own], y=[p.row["over_dense"] for p in own],
                    error_y=error_bars([p.row for p in own], colour),
                    name=label, legendgroup=label, showlegend=panel == 0 and seed == seeds[0],
                    mode="lines+markers", line={"color": colour, "width": 1},
                    marker={"color": colour, "size": 9, "symbol": _symbol(seeds, seed)},
                    hovertext=[p.text for p in own], hoverinfo="text",
                ),
                row=1, col=panel + 1,
            )  # fmt: skip
        _limits(plot, panel, [p for p in subjects if p.row is p.level])
    for seed in seeds:
        marker = {"color": COLOURS[6], "size": 9, "symbol": _symbol(seeds, seed)}
        plot.add_trace(go.Scatter(x=[None], y=[None], name=f"seed {seed}", mode="markers", marker=marker), row=1, col=1)
    styled(plot, height=600)
    plot.update_layout(margin={"t": 50, "b": 130}, legend={"y": -0.13, "yanchor": "top", "font_size": 12})
    plot.update_xaxes(title="bytes a step, % of InfLLMv2's", range=[-4, 118])
    plot.update_yaxes(title="perplexity over dense, %", col=1)
    return plot


def _symbol(seeds: Sequence[int], seed: int) -> str:
    return _SYMBOLS[seeds.index(seed) % len(_SYMBOLS)]


def _over_k(drawn: list[Point]) -> go.Figure:
    plot = _panels(drawn)
    k = drawn[0].level["budget_k"]
    for panel in range(len(COLUMNS)):
        for label in dict.fromkeys(p.row["label"] for p in drawn):
            own = sorted((p for p in drawn if p.row["label"] == label), key=lambda p: p.row["budget_k"])
            _line(plot, panel, own, f"{label}, k as written", own[0].row["colour"], None)
        _limits(plot, panel, [p for p in drawn if p.row is p.level], f" at k = {k}")
    styled(plot, height=560)
    plot.update_layout(margin={"t": 50, "b": 110}, legend={"y": -0.16, "yanchor": "top", "font_size": 12})
    plot.update_xaxes(title=f"bytes a step, % of InfLLMv2's at k = {k}", range=[-6, 118])
    plot.update_yaxes(type="log", tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
    plot.update_yaxes(title="perplexity over dense, % (log)", col=1)
    return plot


def _line(plot: go.Figure, panel: int, drawn: list[Point], name: str, colour: str, named: Sequence[int] | None) -> None:
    """Points joined in their order, each with its k_q (those of ``named``) or, without, its k."""
    own = [p for p in drawn if p.loaded[panel] is not None]
    texts = [
        f" {p.row['budget_k']} "
        if named is None
        else (str(p.row.get("select_blocks")) if p.row.get("select_blocks") in named else "")
        for p in own
    ]
    loads = [p.loaded[panel] or 0.0 for p in own]
    sides = ["middle left" if x < before else "middle right" for before, x in zip([-1.0, *loads], loads, strict=False)]
    plot.add_trace(
        go.Scatter(
            x=loads, y=[p.row["over_dense"] for p in own],
            error_y=error_bars([p.row for p in own], colour),
            text=texts, textposition="top right" if named else sides, textfont={"color": colour, "size": 12},
            name=name, legendgroup=name, showlegend=panel == 0, mode="lines+markers+text",
            line={"color": colour, "width": 1.5}, marker={"color": colour, "size": 6},
            hovertext=[p.text for p in own], hoverinfo="text",
        ),
        row=1, col=panel + 1,
    )  # fmt: skip


def _limits(plot: go.Figure, panel: int, levels: list[Point], where: str = "") -> None:
    """The limits asked for, after the traces; ``levels`` are InfLLMv2's own points, a line for each."""
    over = [((1 + p.row["over_dense"] / 100) * (1 + OVER_INFLLMV2 / 100) - 1) * 100 for p in levels]
    lines = [("y", OVER_DENSE, f"asked: {OVER_DENSE:g} % over dense", COLOURS[6], "dash")]
    lines += [("y", value, f"asked: {OVER_INFLLMV2:g} % over InfLLMv2{where}", COLOURS[1], "dot") for value in over]
    lines += [("x", BYTES, f"asked: {BYTES:g} % of InfLLMv2's bytes", COLOURS[6], "dashdot")]
    named = set()
    for axis, value, name, colour, dash in lines:
        add = plot.add_hline if axis == "y" else plot.add_vline
        add(
            **{axis: value}, row=1, col=panel + 1, layer="above", opacity=0.7,
            line={"color": colour, "dash": dash, "width": 1.5},
            name=name, legendgroup=name, showlegend=panel == 0 and name not in named,
        )  # fmt: skip
        named.add(name)


def _headline(compared: list[Point]) -> str:
    """NOSA at the largest k of each context, and which settings of the table meet all limits under which seeds."""
    nosa = [p for p in compared if p.row["label"] == "NOSA"]
    if not nosa:
        return ""
    parts = []
    for context in sorted({p.row["context"] for p in nosa}):
        k = max(p.row["budget_k"] for p in nosa if p.row["context"] == context)
        own = {p.row["seed"]: p for p in nosa if (p.row["context"], p.row["budget_k"]) == (context, k)}
        over_dense = by_seed({seed: p.row["over_dense"] for seed, p in own.items()}, ".2f")
        over_infllmv2 = by_seed({seed: p.over_infllmv2 for seed, p in own.items()}, ".2f")
        loaded = []
        for panel, slots in enumerate(_SLOTS):
            known = {seed: share for seed, p in own.items() if (share := p.loaded[panel]) is not None}
            loaded += [f"{by_seed(known, '.0f')} % ({slots})"] if known else []
        parts.append(
            f"at {setting_name(context, k)}, {over_dense} % above dense and {over_infllmv2} % above InfLLMv2, for "
            f"{', '.join(loaded)} of InfLLMv2's bytes a step"
        )
    seeds = sorted({p.row["seed"] for p in nosa})
    limits = f"({OVER_DENSE:g} % above dense, {OVER_INFLLMV2:g} % above InfLLMv2, {BYTES:g} % of its bytes)"
    met = [f"with {slots} by {who}" for panel, slots in enumerate(_SLOTS) if (who := _meeting(compared, panel))]
    end = f"met {', '.join(met)}" if met else "met by no setting of the table"
    return (
        f"NOSA's perplexity (seed {' and '.join(map(str, seeds))}): {'; '.join(parts)}. All limits asked for {limits} "
        f"are {end}."
    )


def _meeting(compared: list[Point], panel: int) -> str:
    """Settings and seeds that meet all limits with the slots of a panel; empty for none."""
    seeds: dict[str, dict[int, float]] = {}
    for p in (p for p in compared if p.meets(panel)):
        setting = setting_name(p.row["context"], p.row["budget_k"])
        name = f"{p.row['label']}, k_q {p.row.get('select_blocks')}, at {setting}"
        seeds.setdefault(name, {})[p.row["seed"]] = p.row["seed"]
    return "; ".join(f"{name} (seed {by_seed(of, 'd')})" for name, of in seeds.items())


def _reading(subjects: list[Point], budgets: list[Point], topks: list[Point]) -> str:
    """What the plots show, with their numbers."""
    text = (
        "Lower left is better. Bars: 95 % over documents; dense and InfLLMv2 are of the same seed, on the same texts. "
        + part_note("the table")
    )
    if subjects:
        row = subjects[0].row
        text += (
            f" A point a subject and seed at {setting_name(row['context'], row['budget_k'])}, on {row.get('documents')}"
            " texts; joined: k_q as in the table."
        )
    lines = [(p, p.loaded[0]) for p in budgets if p.loaded[0] is not None]
    if lines:
        (low, least), (high, most) = (
            end(lines, key=lambda pair: pair[0].row.get("select_blocks") or 0) for end in (min, max)
        )
        ends = [p.row.get("select_blocks") for p in (low, high)]
        text += (
            f" Line: NOSA's k_q from {ends[0]} to {ends[1]} moves its bytes at slots = k from {least:.0f} to {most:.0f}"
            f" % and its distance to dense from {low.row['over_dense']:.2f} to {high.row['over_dense']:.2f} %"
            f" ({low.row.get('documents')} texts, seed {low.row['seed']})."
        )
    if topks:
        level = topks[0].level
        text += (
            f" Second plot: k from {min(p.row['budget_k'] for p in topks)} to {max(p.row['budget_k'] for p in topks)}."
        )
        enough = [p for p in topks if p.row["label"] == "NOSA" and p.meets(1)]
        if enough:
            least_k = min(enough, key=lambda p: p.row["budget_k"])
            text += (
                f" With LRU slots NOSA meets all limits against InfLLMv2 at k = {level['budget_k']} from "
                f"k = {least_k.row['budget_k']} on"
            )
            if is_number(least_k.row.get("gpu_bytes")) and is_number(level.get("gpu_bytes")):
                text += (
                    f", for {least_k.row['gpu_bytes'] / level['gpu_bytes']:.2f} x its GPU memory (both at slots = k)"
                )
            text += "."
    return text
