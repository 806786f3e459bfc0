"""Device slots beyond k at equal GPU bytes: misses against sequences, as measured with recorded selections."""

from __future__ import annotations

from nosa_sys.report.results_page.files import ResultRows, merged, simulated
from nosa_sys.report.results_page.pricing import EVEN_RULE, best_of, outside_note
from nosa_sys.report.results_page.section import Section, missing
from nosa_sys.report.results_page.throughput import NAMES, situation
from nosa_sys.simulator.hardware import HardwareProfile

_COMMAND = (
    "python -m nosa_sys.experiments.nosi_bench --out experiments/results/h200/nosi --stages hot_buffer "
    "--trace nosa=DIR --trace infllmv2=DIR"
)
_COLUMNS = (
    *("slots_over_k", "batch", "context", "topk", "block_size"),
    *("misses_per_head", "tokens_per_s", "step_ms_median"),
)


def hot_buffer_table(stage: ResultRows, profile: HardwareProfile) -> Section:
    """A row for every method and slot count."""
    key, title = "hot-buffer", "A hot buffer: slots beyond k, at equal GPU bytes"
    rows = [row for row in stage.having(*_COLUMNS) if row.get("method")]
    if not rows:
        return missing(key, title, "no measured row of slots", _COMMAND)
    predicted = best_of([situation(row) for row in rows], [profile] * len(rows))
    head = ("method", "slots", "batch", "misses a head", "step ms", "tokens/s", "simulated tokens/s", "schedule")
    body = [
        (
            NAMES.get(str(row["method"]), str(row["method"])),
            f"{row['slots_over_k']:g} k",
            int(row["batch"]),
            float(row["misses_per_head"]),
            float(row["step_ms_median"]),
            float(row["tokens_per_s"]),
            point.tokens_per_s,
            str(row.get("schedule_in_use", "")),
        )
        for row, point in zip(rows, predicted, strict=True)
    ]
    parts = []
    for method in dict.fromkeys(str(row["method"]) for row in rows):
        own = [row for row in rows if row["method"] == method]
        first, best = min(own, key=lambda r: r["slots_over_k"]), max(own, key=lambda r: r["tokens_per_s"])
        parts.append(
            f"{NAMES.get(method, method)} is fastest with {best['slots_over_k']:g} k slots, "
            f"{best['tokens_per_s'] / first['tokens_per_s']:.2f} x its tokens/s with {first['slots_over_k']:g} k "
            f"({first['misses_per_head']:.2f} misses a head become {best['misses_per_head']:.2f})"
        )
    return Section(
        key,
        title,
        "; ".join(parts) + ".",
        "More slots keep blocks that come back, and leave room for fewer sequences in the same bytes. Selections are "
        "those recorded from a real model, played back on the 8B shape.",
        merged([*stage.origins(rows), simulated(profile, EVEN_RULE, outside_note(predicted))]),
        table=(head, *body),
    )
