"""The what-if table: one setting changed at a time from a sweep's baseline."""

from __future__ import annotations

from typing import Any

import pandas as pd

from nosa_sys.report.inputs import SweepInput
from nosa_sys.report.sweep_rows import baseline, by_model, matching, text_of, usable, varying

# Shares of a step in the words of the glossary.
LIMITS = {"select": "selection", "h2d": "exposed H2D", "gemm": "GEMM", "host": "host overhead", "d2h": "exposed D2H"}


def what_if_rows(sweeps: list[SweepInput]) -> list[tuple[str, str, list[list[Any]]]]:
    """(title, status, head row and rows) for each sweep and model with anything to compare."""
    tables = []
    for sweep in sweeps:
        for model, rows in by_model(usable(sweep.rows)):
            body = _table(rows)
            if body:
                status = str(rows["status"].iloc[0]) if "status" in rows.columns else "projected"
                head = ["change", "tokens/s", "per sequence", "step ms", "link busy", "limited by", "against first row"]
                tables.append((f"What if: {model}", status, [head, *body]))
    return tables


def _table(rows: pd.DataFrame) -> list[list[Any]]:
    if not len(rows) or "tokens_per_s" not in rows.columns:
        return []
    base = baseline(rows)
    start = matching(rows, base)
    if len(start) == 0:
        return []
    first = start.iloc[0]
    axes = [name for name in varying(rows) if name != "model_shape"]
    lines = [_line("as is: " + ", ".join(text_of(n, base[n]) for n in axes), first, first)]
    # slots and their policy change together: spare slots need a policy that uses them
    together = {"slots_over_k": ("slots_over_k", "policy"), "policy": ("slots_over_k", "policy")}
    seen = {start.index[0]}
    for axis in axes:
        free = together.get(axis, (axis,))
        for index, row in matching(rows, base, but=free).sort_values([n for n in free if n in rows]).iterrows():
            if index not in seen:
                seen.add(index)
                changed = [n for n in free if n in rows.columns and row[n] != base.get(n)]
                lines.append(_line(", ".join(text_of(n, row[n]) for n in changed), row, first))
    return lines if len(lines) > 1 else []


def _number(row: pd.Series, name: str) -> float | None:
    value = row.get(name)
    return float(value) if value is not None and pd.notna(value) else None


def _line(change: str, row: pd.Series, first: pd.Series) -> list[Any]:
    speed, before = _number(row, "tokens_per_s"), _number(first, "tokens_per_s")
    step = _number(row, "step_time_us")
    busy = _number(row, "link_utilisation")
    return [
        change,
        speed,
        _number(row, "tokens_per_s_per_sequence"),
        step / 1000 if step is not None else None,
        f"{busy:.0%}" if busy is not None else None,
        LIMITS.get(str(row.get("limited_by")), str(row.get("limited_by", "-"))),
        f"{speed / before:.2f}x" if speed and before else None,
    ]
