"""Figures out of replays: what spare slots and better eviction would save."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import plotly.graph_objects as go

from nosa_sys.report.figure import COLOURS, Figure, styled

_POLICY_ORDER = ("exact", "beta", "lru", "belady")
_POLICY_STYLE = {
    "exact": (COLOURS[6], "solid", "square"),
    "beta": (COLOURS[2], "dot", "diamond"),
    "lru": (COLOURS[0], "solid", "circle"),
    "belady": (COLOURS[1], "dash", "x"),
}


def replay_figures(replays: list[dict[str, Any]]) -> list[Figure]:
    """One slots figure for every (trace, method, budgets) with two or more slot counts, and a budgets figure."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for replay in replays:
        key = (str(replay.get("trace")), str(replay.get("method")), tuple(sorted((replay.get("sparse") or {}).items())))
        groups[key].append(replay)
    figures = [
        _slots_figure(members, index)
        for index, members in enumerate(groups.values())
        if len({m.get("slots_over_k") for m in members}) > 1
    ]
    # the captured budgets come first: they are the ones replayed at several slot counts
    ordered = sorted(groups.values(), key=len, reverse=True)
    budgets = _budgets_figure([m for members in ordered for m in members])
    return [*figures, *([budgets] if budgets else [])]


def _label(replay: dict[str, Any]) -> str:
    sparse = replay.get("sparse") or {}
    return f"{replay.get('method')}, k={sparse.get('topk')}, block {sparse.get('block_size')}"


def _slots_figure(members: list[dict[str, Any]], index: int) -> Figure:
    plot = go.Figure()
    names = [p for p in _POLICY_ORDER if any(m.get("policy") == p for m in members)]
    for policy in names:
        points = sorted(
            (float(m["slots_over_k"]), m.get("misses_per_head_step"), m.get("miss_ratio"))
            for m in members
            if m.get("policy") == policy and m.get("slots_over_k") is not None
        )
        colour, dash, symbol = _POLICY_STYLE[policy]
        plot.add_trace(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[2] for p in points],
                customdata=[p[1] for p in points],
                name={"belady": "Belady (the bound)", "lru": "LRU"}.get(policy, policy),
                mode="lines+markers",
                line={"color": colour, "dash": dash},
                marker={"symbol": symbol, "size": 9},
                hovertemplate="%{x:.2f} k: %{y:.3%} of selected blocks missed, "
                "%{customdata:.3g} per head and step<extra>%{fullData.name}</extra>",
            )
        )
    styled(plot, x="device slots, multiples of k", y="miss ratio (loaded / selected)")
    plot.update_yaxes(tickformat=".1%", rangemode="tozero")
    reading = (
        "Each point replays the captured selections with more device slots: the drop from 1.0 k is what a hot buffer "
        "buys, and the gap to the dashed line is all that a better eviction policy could still add."
    )
    status = str(members[0].get("status", "measured"))
    return Figure(f"slots-{index}", f"Miss ratio against slots: {_label(members[0])}", status, reading, plot)


def _budgets_figure(replays: list[dict[str, Any]]) -> Figure | None:
    """Bytes per step for every distinct (method, budgets) at slots = k."""
    chosen: dict[str, dict[str, Any]] = {}
    for replay in replays:
        if (
            replay.get("slots_over_k") == 1
            and replay.get("policy") == "exact"
            and replay.get("h2d_bytes_per_step") is not None
        ):
            sparse = replay.get("sparse") or {}
            name = f"{_label(replay)}, select {sparse.get('select_blocks')}"
            chosen.setdefault(name, replay)
    if len(chosen) < 2:
        return None
    first, *others = chosen
    names = [first, *sorted(others, key=lambda name: -chosen[name]["h2d_bytes_per_step"])]
    longest = max(chosen[name]["h2d_bytes_per_step"] for name in names) / 2**20
    plot = go.Figure(
        go.Bar(
            y=names,
            x=[chosen[n]["h2d_bytes_per_step"] / 2**20 for n in names],
            orientation="h",
            marker_color=[COLOURS[0] if chosen[n].get("method") == "nosa" else COLOURS[5] for n in names],
            text=[f"gamma {chosen[n]['gamma_macro']:.3f}" if chosen[n].get("gamma_macro") else "" for n in names],
            textposition="outside",
        )
    )
    styled(plot, height=120 + 42 * len(names), x="MiB over the link per decode step (one sequence, slots = k)")
    plot.update_yaxes(autorange="reversed")
    plot.update_xaxes(range=[0, longest * 1.2 or 1])
    reading = (
        "First the captured budgets, then others re-selected from the recorded scores: shorter is cheaper. "
        "Replay assumes that the queries would not have changed."
    )
    return Figure("budgets", "Traffic under other budgets", "projected", reading, plot)
