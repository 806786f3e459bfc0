"""Block size and the fragment cliff: link rate against the size of a run, and what block sizes are worth with it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nosa_sys.experiments.nosi_scale import FULL
from nosa_sys.report.figure import COLOURS, styled
from nosa_sys.report.results_page.budgets import COMMAND, missed_share, priced_at
from nosa_sys.report.results_page.files import Origin, ResultRows, Row, merged, simulated
from nosa_sys.report.results_page.pricing import EVEN_RULE, Priced, best_of, outside_note
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.simulator.hardware import HardwareProfile

# K of one token and one head: what a (batch, token, head, channel) layout moves at a time.
TOKEN_BYTES = FULL.shape.head_dim * FULL.shape.dtype_bytes
_PATHS = {
    "uva": ("gather kernel", COLOURS[0]),
    "bulk": ("bulk-copy kernel", COLOURS[4]),
    "dma": ("one batched copy call", COLOURS[1]),
    "calls": ("one copy call a run", COLOURS[6]),
}
_WHOLE = {"uva": "whole blocks, gather kernel", "dma": "whole blocks, batched copy"}
# (name, path, dash) of a line -> tokens a block -> tokens/s
_Lines = dict[tuple[str, str, str], dict[int, Priced]]


@dataclass(frozen=True)
class Run:
    """The fastest measured transfer of runs of one size by one path."""

    path: str
    run_bytes: int
    gbps: float
    us_per_run: float


def fastest_runs(link: ResultRows, bench: ResultRows) -> list[Run]:
    """By path and run size: of a profile's ``link_runs`` and, for one call a run, of the kernels' own bench."""
    points = [
        (str(row["path"]), int(row["run_bytes"]), int(row["n_runs"]), float(row["median_us"]))
        for row in link.having("run_bytes", "n_runs", "median_us", direction="h2d")
        if row.get("path") in _PATHS
    ]
    for row in bench.having("naive_us"):
        size = re.match(r"(\d+)x(\d+)KiB", str(row.get("case")))
        if size and int(size[1]) > 0:
            points.append(("calls", int(size[2]) * 1024, int(size[1]), float(row["naive_us"])))
    best: dict[tuple[str, int], Run] = {}
    for path, run_bytes, n_runs, us in points:
        run = Run(path, run_bytes, run_bytes * n_runs / us / 1e3, us / n_runs)
        if run.gbps > best.get((path, run_bytes), run).gbps or (path, run_bytes) not in best:
            best[path, run_bytes] = run
    return [best[key] for key in sorted(best)]


def token_gbps(runs: list[Run], path: str) -> float | None:
    """GB/s in runs of one token: each takes what a run of the smallest measured size takes, as calls below it cost
    alike; None without any row."""
    own = [run for run in runs if run.path == path]
    return TOKEN_BYTES / own[0].us_per_run / 1e3 if own else None


def fragments(link: ResultRows, bench: ResultRows, budgets: ResultRows, profile: HardwareProfile) -> Section:
    """Rates by run size on the left; tokens/s by block size on the right where replays over block sizes are there."""
    key, title = "fragments", "Block size, and the cliff of small fragments"
    runs = fastest_runs(link, bench)
    if not runs:
        command = "nosa profile --out DIR on the GPU, kept as a profile of the simulator,"
        return missing(key, title, "no measured transfers by run size", command)
    plot = make_subplots(1, 2, subplot_titles=("link rate by run size", f"tokens/s, simulated at batch {FULL.batch}"))
    for path, (name, colour) in _PATHS.items():
        own = [run for run in runs if run.path == path]
        if own:
            plot.add_trace(
                go.Scatter(
                    x=[run.run_bytes for run in own], y=[run.gbps for run in own], name=name, mode="lines+markers",
                    line={"color": colour},
                ),
                row=1, col=1,
            )  # fmt: skip
    smallest, token = min(run.run_bytes for run in runs), token_gbps(runs, "dma")
    if token is not None and smallest > TOKEN_BYTES:
        first = next(run for run in runs if run.path == "dma")
        plot.add_trace(
            go.Scatter(
                x=[TOKEN_BYTES, first.run_bytes], y=[token, first.gbps], mode="lines",
                line={"color": _PATHS["dma"][1], "dash": "dash"}, name="batched copy, projected at its cost a run",
            ),
            row=1, col=1,
        )  # fmt: skip
    block = FULL.shape.kv_block_bytes(FULL.sparse.block_size)
    for size, text in ((TOKEN_BYTES, "K of a token"), (block, f"block of {FULL.sparse.block_size}")):
        plot.add_vline(x=size, line={"dash": "dot", "color": "#9aa5b1"}, row=1, col=1)
        plot.add_annotation(x=math.log10(size), y=0.02, yref="y domain", text=text, showarrow=False, row=1, col=1)
    replayed = budgets.having("topk", "block_size", "misses_per_head_step", axis="block_size", method="nosa")
    lines = _by_block_size(runs, replayed, profile)
    for (name, path, dash), line in lines.items():
        plot.add_trace(
            go.Scatter(
                x=list(line), y=[point.tokens_per_s for point in line.values()], name=name, mode="lines+markers",
                line={"color": _PATHS[path][1], "dash": dash},
            ),
            row=1, col=2,
        )  # fmt: skip
    tokens = sorted({size for line in lines.values() for size in line})
    styled(plot, height=460)
    plot.update_layout(margin={"t": 130}, legend={"y": 1.16})
    plot.update_xaxes(type="log", title="bytes of a run", row=1, col=1)
    plot.update_xaxes(type="log", title="tokens a block", row=1, col=2, tickvals=tokens)
    plot.update_yaxes(type="log", title="GB/s", dtick=1, row=1, col=1)
    plot.update_yaxes(rangemode="tozero", row=1, col=2)
    notes = (
        EVEN_RULE,
        "misses: a replay's share of k at each block size, equal budgets in tokens",
        f"{TOKEN_BYTES} B: as many microseconds a run as the smallest one measured",
    )
    origins: list[Origin] = [link.origin("measured")]
    if any(run.path == "calls" for run in runs):
        origins.append(bench.origin("measured"))
    lacks = []
    if smallest > TOKEN_BYTES:
        lacks.append(
            f"transfers in runs of {TOKEN_BYTES} B (the smallest measured: {smallest} B): with {TOKEN_BYTES} among "
            "RUN_BYTES of nosa_sys/profiling/link.py, nosa profile --out DIR on the GPU measures them"
        )
    if not lines:
        lacks.append(f"replays over block sizes; {COMMAND} makes them")
    origins += budgets.origins(replayed)
    return Section(
        key,
        title,
        _headline(runs, lines, token),
        "Left: the fastest measured point of each path at each run size, many runs at once. Right: misses of a real "
        "text replayed at each block size (equal budgets in tokens), fetched at the rates on the left: K and V of a "
        "block as one run, or token by token.",
        merged(
            [*origins, simulated(profile, *notes, outside_note([p for line in lines.values() for p in line.values()]))]
        ),
        (plot,),
        missing=tuple(lacks),
    )


def _by_block_size(runs: list[Run], replayed: list[Row], profile: HardwareProfile) -> _Lines:
    found: list[tuple[tuple[str, str, str], int, float, HardwareProfile]] = []
    token = token_gbps(runs, "dma")
    for row in sorted(replayed, key=lambda row: int(row["block_size"])):
        size = int(row["block_size"])
        for run in runs:
            if run.path in _WHOLE and run.run_bytes == FULL.shape.kv_block_bytes(size):
                found.append(((_WHOLE[run.path], run.path, "solid"), size, missed_share(row), _at(profile, run)))
        if token is not None:
            name = f"{TOKEN_BYTES} B runs, batched copy"
            found.append(((name, "dma", "dash"), size, missed_share(row), _at_rate(profile, token)))
    situations = [priced_at(ratio, "nosa", size) for _, size, ratio, _ in found]
    priced = best_of(situations, [machine for *_, machine in found])
    lines: _Lines = {}
    for (line, size, *_), point in zip(found, priced, strict=True):
        lines.setdefault(line, {})[size] = point
    return lines


def _at(profile: HardwareProfile, run: Run) -> HardwareProfile:
    """The profile with whole blocks fetched by a path; its own numbers are the gather kernel's, by run size."""
    return profile if run.path == "uva" else _at_rate(profile, run.gbps)


def _at_rate(profile: HardwareProfile, gbps: float) -> HardwareProfile:
    return dataclasses.replace(profile.with_h2d_gbps(gbps), tables=dataclasses.replace(profile.tables, runs=None))


def _headline(runs: list[Run], lines: _Lines, token: float | None) -> str:
    block = FULL.shape.kv_block_bytes(FULL.sparse.block_size)
    parts = [f"{_PATHS[run.path][0]} {run.gbps:.1f}" for run in runs if run.run_bytes == block]
    text = f"GB/s of a {FULL.sparse.block_size}-token block as one run of {block // 1024} KiB: {', '.join(parts)}."
    if token is not None:
        text += f" In {TOKEN_BYTES} B fragments a batched copy would give {token:.2f} (projected)."
    whole = lines.get((_WHOLE["uva"], "uva", "solid"), {})
    known = {size: point.tokens_per_s for size, point in whole.items() if point.tokens_per_s is not None}
    if known:
        best = max(known, key=lambda size: known[size])
        text += f" Of the block sizes replayed, {best} tokens is fastest if a kernel gathers whole blocks (projected)."
    return text
