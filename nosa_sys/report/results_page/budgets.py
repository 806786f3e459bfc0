"""The query-agnostic share k_e / k: gamma and misses of replayed real traces, and the tokens/s they are worth."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.experiments.nosi_scale import FULL
from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.files import ResultRows, Row, merged, simulated
from nosa_sys.report.results_page.pricing import EVEN_RULE, Priced, Situation, best_of, outside_note
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.simulator.hardware import HardwareProfile

COMMAND = (
    "make demo && python -m nosa_sys.experiments.budget_replays --trace out/demo/trace "
    "--out experiments/results/cpu/budgets"
)
_COLUMNS = ("topk", "k_e", "misses_per_head_step", "gamma_macro")


def priced_at(ratio: float, method: str, block_size: int = FULL.sparse.block_size) -> Situation:
    """The 8B shape at the experiment's batch and context with a trace's misses, as a share of k."""
    sparse = FULL.sparse.with_block_size(block_size)
    return Situation(FULL.shape, sparse, method, FULL.batch, FULL.contexts[0], ratio * sparse.topk)


def missed_share(row: Row) -> float:
    """Misses a head and step over k."""
    return float(row["misses_per_head_step"] / row["topk"])


@dataclass(frozen=True)
class _Point:
    topk: int
    share: float  # k_e / k
    gamma: float
    missed: float  # of k
    priced: Priced

    @property
    def tokens_per_s(self) -> float | None:
        return self.priced.tokens_per_s


def _points(rows: list[Row], profile: HardwareProfile) -> list[_Point]:
    """One for each row, by k and k_e."""
    rows = sorted(rows, key=lambda row: (row["topk"], row["k_e"]))
    priced = best_of([priced_at(missed_share(row), str(row["method"])) for row in rows], [profile] * len(rows))
    return [
        _Point(int(row["topk"]), row["k_e"] / row["topk"], float(row["gamma_macro"]), missed_share(row), point)
        for row, point in zip(rows, priced, strict=True)
    ]


def k_e_sweep(stage: ResultRows, profile: HardwareProfile) -> Section:
    """One line for each k of the replays; InfLLMv2 of the same trace as a level."""
    key, title = "k-e", "Gamma and tokens/s against k_e / k"
    rows = stage.having(*_COLUMNS, axis="k_e")
    own = _points([row for row in rows if row.get("method") == "nosa"], profile)
    if not own:
        return missing(key, title, "no replay over k_e", COMMAND)
    other = _points([row for row in rows if row.get("method") == "infllmv2"], profile)[:1]
    plot = make_subplots(
        1, 3, subplot_titles=("gamma, replayed", "misses / k, replayed", f"tokens/s, simulated at batch {FULL.batch}")
    )
    values = (lambda p: p.gamma, lambda p: p.missed, lambda p: p.tokens_per_s)
    for colour, k in zip(COLOURS, sorted({point.topk for point in own}), strict=False):
        line = [point for point in own if point.topk == k]
        for column, value in enumerate(values, 1):
            plot.add_trace(
                go.Scatter(
                    x=[p.share for p in line], y=[value(p) for p in line], name=f"k = {k}", legendgroup=str(k),
                    showlegend=column == 1, mode="lines+markers", line={"color": colour},
                ),
                row=1, col=column,
            )  # fmt: skip
    ends = [min(p.share for p in own), max(p.share for p in own)]
    dashes = {"color": COLOURS[6], "dash": "dash"}
    plot.add_trace(go.Scatter(x=ends, y=ends, name="guaranteed", mode="lines", line=dashes), row=1, col=1)
    for level in other:
        for column, value in enumerate(values, 1):
            plot.add_trace(
                go.Scatter(
                    x=ends, y=[value(level)] * 2, name=f"InfLLMv2, k = {level.topk}", legendgroup="infllmv2",
                    showlegend=column == 1, mode="lines", line={"color": COLOURS[1], "dash": "dot"},
                ),
                row=1, col=column,
            )  # fmt: skip
    styled(plot, height=420)
    plot.update_layout(margin={"t": 90}, legend={"y": 1.14})
    plot.update_xaxes(title="k_e / k")
    for column in (2, 3):
        plot.update_yaxes(rangemode="tozero", col=column)
    notes = (EVEN_RULE, f"a share of k missed in the trace is the same share of k = {FULL.sparse.topk} there")
    return Section(
        key,
        title,
        _headline(own, other),
        f"Selections of a real text ({stage.document.get('context_tokens', '?')} tokens) chosen again from recorded "
        "scores with another split of the same k: queries are taken not to change. Slots are k. Right: these misses on "
        f"the 8B shape at {FULL.contexts[0] // 1024}K. Quality is not in this figure.",
        merged(
            [*stage.origins(rows), simulated(profile, *notes, outside_note([point.priced for point in [*own, *other]]))]
        ),
        (plot,),
    )


def _headline(own: list[_Point], other: list[_Point]) -> str:
    line = [point for point in own if point.topk == own[0].topk]
    low, middle = line[0], min(line, key=lambda point: abs(point.share - FULL.sparse.guaranteed_gamma))
    text = (
        f"With k_e / k = {middle.share:.2f} gamma is {middle.gamma:.3f} and {middle.missed:.1%} of k is loaded a step; "
        f"with {low.share:.2f} it is {low.gamma:.3f} and {low.missed:.1%}."
    )
    if middle.tokens_per_s and low.tokens_per_s:
        text += f" The first is worth {middle.tokens_per_s / low.tokens_per_s:.2f} x the tokens/s (projected)."
    if other and middle.missed > 0:
        text += (
            f" InfLLMv2 loads {other[0].missed:.1%} on the same text, {other[0].missed / middle.missed:.1f} x as much."
        )
    return text
