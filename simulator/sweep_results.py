"""Rows of a sweep, their Parquet schema, and the summary beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.simulator.prediction import Prediction
from nosa_sys.simulator.recipe import Recipe
from nosa_sys.simulator.sweep_plan import Configuration
from nosa_sys.traces.schema import write_text_whole

RESULTS_FILE = "results.parquet"
SUMMARY_FILE = "summary.json"

_TEXT = (
    "refused",
    "model_shape",
    "method",
    "policy",
    "schedule",
    "hardware",
    "link",
    "host_kv_dtype",
    "slots_asked",
    "limited_by",
    "status",
    "limits",
    "extrapolated",
)
_WHOLE = (
    "index", "block_size", "topk", "k_e", "select_blocks", "init_blocks", "window_size", "context_tokens", "slots",
    "batch", "h2d_bytes_total", "h2d_bytes_total_warm", "d2h_bytes_total", "n_steps", "n_cold_steps", "gpu_bytes",
    "host_pool_bytes", "cold_h2d_bytes", "prefetch_bytes_total", "wasted_prefetch_bytes_total", "block_bytes",
    "batch_that_fits",
)  # fmt: skip
_REAL = (
    "h2d_gbps", "step_time_us", "step_time_p50_us", "step_time_p90_us", "select_us", "h2d_exposed_us", "h2d_hidden_us",
    "attention_us", "gemm_us", "host_overhead_us", "d2h_exposed_us", "d2h_hidden_us", "tokens_per_s",
    "tokens_per_s_per_sequence", "misses_per_head_step", "h2d_bytes_per_step", "d2h_bytes_per_step",
    "link_utilisation", "cold_step_time_us", "conversion_us",
)  # fmt: skip
RESULTS_SCHEMA = pa.schema(
    [pa.field(name, pa.int64()) for name in _WHOLE]
    + [pa.field(name, pa.string()) for name in _TEXT]
    + [pa.field(name, pa.float64()) for name in _REAL]
)


def refused_row(configuration: Configuration, reason: str) -> dict[str, Any]:
    """The axis values that were asked for, and why there is no prediction."""
    row: dict[str, Any] = dict.fromkeys(RESULTS_SCHEMA.names)
    values = {("context_tokens" if k == "context" else k): v for k, v in configuration.values.items() if k != "slots"}
    return {**row, **values, **_asked(configuration), "refused": reason}


def predicted_row(configuration: Configuration, prediction: Prediction) -> dict[str, Any]:
    """The resolved settings and the prediction; ``refused`` is empty."""
    settings, memory = prediction.settings, prediction.memory
    row: dict[str, Any] = {**settings["sparse"], **settings, **memory, **prediction.to_dict()}
    row |= {**_asked(configuration), "limits": "; ".join(prediction.limits), "refused": ""}
    row["extrapolated"] = "; ".join(prediction.extrapolated)
    return {name: row[name] for name in RESULTS_SCHEMA.names}


def _asked(configuration: Configuration) -> dict[str, Any]:
    hardware = configuration.hardware
    asked = configuration.values.get("slots")
    return {
        "index": configuration.index,
        "hardware": hardware.name,
        "link": hardware.link,
        "h2d_gbps": hardware.h2d_gbps,
        "slots_asked": None if asked is None else str(asked),
    }


def write_results(out: Path, recipe: Recipe, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write both files, each through a temporary neighbour. Returns the summary."""
    table = pa.Table.from_pylist(rows, schema=RESULTS_SCHEMA)
    partial = out / (RESULTS_FILE + ".partial")
    pq.write_table(table, partial, compression="zstd")
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    summary = _summary(recipe, rows, digest)
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    os.replace(partial, out / RESULTS_FILE)
    write_text_whole(out / SUMMARY_FILE, text)
    return summary


def _summary(recipe: Recipe, rows: list[dict[str, Any]], digest: str) -> dict[str, Any]:
    priced = [row for row in rows if not row["refused"]]
    fitting = [row for row in priced if not row["limits"]]
    named = recipe.names()
    best = max(fitting, key=lambda row: row["tokens_per_s"] or 0.0, default=None)
    return {
        "name": recipe.name,
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "axes": named,
        "n_configurations": len(rows),
        "n_refused": len(rows) - len(priced),
        "refused": dict(sorted(Counter(row["refused"] for row in rows if row["refused"]).items())),
        "n_extrapolated": sum(bool(row["extrapolated"]) for row in priced),
        "n_over_memory": len(priced) - len(fitting),
        "status": dict(sorted(Counter(row["status"] for row in priced).items())),
        "limited_by": dict(sorted(Counter(row["limited_by"] for row in priced).items())),
        "best_tokens_per_s": best,
        "results_sha256": digest,
    }
