"""Reading a sweep's rows: which settings vary, the baseline, and the rows that differ from it in one setting only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

# Setting columns of results.parquet, in the order in which the report speaks of them.
SETTINGS = (
    "model_shape",
    "hardware",
    "method",
    "block_size",
    "topk",
    "k_e",
    "context_tokens",
    "slots_over_k",
    "policy",
    "h2d_gbps",
    "batch",
)
NAMES = {
    "model_shape": "model",
    "topk": "k",
    "k_e": "k_e",
    "context_tokens": "context",
    "h2d_gbps": "link GB/s",
    "block_size": "block",
}


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that were priced and fit the memory of device and host, with a ``slots_over_k`` column."""
    if "refused" in rows.columns:
        rows = rows[rows["refused"].fillna("") == ""]
    if "limits" in rows.columns:
        rows = rows[rows["limits"].fillna("") == ""]
    if {"slots", "topk"} <= set(rows.columns):
        return rows.assign(slots_over_k=rows["slots"] / rows["topk"])
    return rows


def varying(rows: pd.DataFrame) -> list[str]:
    """Settings with more than one value."""
    return [name for name in SETTINGS if name in rows.columns and rows[name].nunique(dropna=False) > 1]


def by_model(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(model shape, its rows) in the order of first appearance."""
    if "model_shape" not in rows.columns:
        yield "model", rows
        return
    for name in rows["model_shape"].drop_duplicates():
        yield str(name), rows[rows["model_shape"] == name]


def baseline(rows: pd.DataFrame) -> dict[str, Any]:
    """The first row's settings, but the middle batch: what the what-if table compares with."""
    first = rows.iloc[0]
    base = {name: first[name] for name in SETTINGS if name in rows.columns}
    if "batch" in base:
        batches = sorted(rows["batch"].unique())
        base["batch"] = batches[len(batches) // 2]
    return base


def matching(rows: pd.DataFrame, values: dict[str, Any], *, but: tuple[str, ...] = ()) -> pd.DataFrame:
    """Rows whose settings equal ``values`` except for the settings in ``but``."""
    for name, value in values.items():
        if name not in but and name in rows.columns:
            rows = rows[rows[name] == value] if not pd.isna(value) else rows[rows[name].isna()]
    return rows


def text_of(name: str, value: Any) -> str:
    """A setting in words."""
    if name == "slots_over_k":
        return f"slots {value:g} k"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{NAMES.get(name, name)} {shown}"
