"""Profile a CUDA device: every grid, the fits, and the numbers that the simulator prices with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from nosa_sys.kernels.bench import ceilings
from nosa_sys.kernels.timing import environment, time_in_graph
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.bundle import write_bundle
from nosa_sys.profiling.choices import fetch_choices
from nosa_sys.profiling.fits import LinearFit, fit_linear
from nosa_sys.profiling.kernel_grid import grids, measure
from nosa_sys.profiling.link import contention_points, duplex_points, run_points
from nosa_sys.profiling.matrices import elementwise_points, gemm_points
from nosa_sys.profiling.overheads import cuda_overhead_points

Rows = list[dict[str, Any]]
Progress = Callable[[str, dict[str, Any]], None]
_SQUARE = 8192


def _time(work: Callable[[], object]) -> dict[str, Any]:
    return dataclasses.asdict(time_in_graph(work, copies=4, n_replays=7))


def _gemms(shapes: list[ModelShape]) -> Iterator[dict[str, Any]]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    for shape in shapes:
        yield from gemm_points(shape, _time, device, dtype)
    a, b = (torch.randn(_SQUARE, _SQUARE, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    row = {"model_shape": "", "matrix": "square", "m": _SQUARE, "n": _SQUARE, "k": _SQUARE}
    yield {**row, "bytes": 6 * _SQUARE**2, "flops": 2 * _SQUARE**3, **_time(lambda: torch.mm(a, b, out=out))}


def _tables(shapes: list[ModelShape]) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    yield "link_runs", run_points()
    yield "link_duplex", duplex_points()
    yield "link_contention", contention_points()
    yield "overheads", cuda_overhead_points()
    yield "gemm", _gemms(shapes)
    device, dtype = torch.device("cuda"), torch.bfloat16
    yield "elementwise", (row for shape in shapes for row in elementwise_points(shape, _time, device, dtype))
    for grid in grids():
        yield grid.operation, measure(grid)


def _column(rows: Rows, *names: str) -> np.ndarray:
    return np.array([[float(row[name]) for name in names] for row in rows])


def fit_tables(tables: dict[str, Rows]) -> dict[str, LinearFit]:
    """Linear models of the measured points; knees (paths, run sizes, block sizes) are kept apart, not fitted across."""
    fits: dict[str, LinearFit] = {}

    def fit(name: str, rows: Rows, *features: str) -> None:
        fits[name] = fit_linear(features, _column(rows, *features), _column(rows, "median_us")[:, 0])

    links = tables["link_runs"]
    for direction, path, n_ctas in (("h2d", "uva", 16), ("h2d", "bulk", 4)):
        for run_bytes in (16384, 32768, 65536):
            key = (direction, path, n_ctas, run_bytes)
            rows = [r for r in links if (r["direction"], r["path"], r["n_ctas"], r["run_bytes"]) == key]
            if rows:
                fit(f"{direction}_{path}_{run_bytes}", rows, "bytes")
    # Short write-backs are posted: the kernel ends before the last bytes have crossed, so they say nothing of the rate.
    fit("d2h_uva", [r for r in links if (r["direction"], r["path"]) == ("d2h", "uva") and r["bytes"] >= 2**20], "bytes")
    for kernel in ("sparse_decode_attention", "paged_decode_attention"):
        fit(kernel, [r for r in tables[kernel] if r["block"] == 64 and r["batch"] > 1], "bytes")
    fit("gemm", [r for r in tables["gemm"] if r["matrix"] != "square" and 1 < r["m"] <= 64], "bytes")
    fit("gemv", [r for r in tables["gemm"] if r["m"] == 1], "bytes")
    for means in (0, 1):
        rows = [
            r for r in tables["score_and_select"] if r["fp32_means"] == means and r["block"] == 64 and r["batch"] > 1
        ]
        fit(f"score_and_select_{'fp32' if means else 'bf16'}_means", rows, "bytes", "blocks")
    fit("slot_plan", [{**r, "cells": r["n_rows"] * r["slots"]} for r in tables["slot_plan"]], "cells")
    fit("append_token", [{**r, "heads": r["batch"] * r["kv_heads"]} for r in tables["append_token"]], "heads")
    return fits


def simulator_numbers(
    tables: dict[str, Rows], fits: dict[str, LinearFit], *, gpu_memory_bytes: float, host_memory_bytes: float
) -> dict[str, tuple[float | None, str]]:
    """The values of models.json, each with how it comes from the tables beside it."""
    up, down = fits["h2d_uva_32768"], fits["d2h_uva"]
    big = max(tables["link_duplex"], key=lambda row: row["bytes_each_way"])
    longer, shorter = max(big["h2d_us"], big["d2h_us"]), min(big["h2d_us"], big["d2h_us"])
    duplex = float(np.clip(shorter / (big["both_us"] - longer + shorter), 0.5, 1.0))
    contention = pd.DataFrame(tables["link_contention"])
    kept = (contention["fetch_us"] / contention["both_us"]).groupby(contention["compute"]).max()
    beside_factor = float(np.clip(kept.min(), duplex, 1.0))
    kept_compute = (contention["compute_us"] / contention["both_us"]).groupby(contention["compute"]).max()
    attention = fits["sparse_decode_attention"]
    gemm = fits["gemm"]
    square = next(r for r in tables["gemm"] if r["matrix"] == "square")
    select, plan = fits["score_and_select_fp32_means"], fits["slot_plan"]
    overheads = {r["what"]: r["median_us"] for r in tables["overheads"]}
    replay = overheads["graph_replay_and_sync_1"]
    return {
        "h2d_fixed_us": (up.fixed_us, "fit of link_runs: uva, 16 CTAs, 32 KiB runs"),
        "h2d_gbps": (up.gbps(), "the same fit"),
        "d2h_fixed_us": (down.fixed_us, "fit of link_runs: device to host, uva, 16 CTAs, 1 MiB and up"),
        "d2h_gbps": (down.gbps(), "the same fit"),
        "duplex_factor": (duplex, "link_duplex: both at this share of their speed until the shorter one ends"),
        "beside_compute_factor": (
            beside_factor,
            "link_contention: best path and CTAs beside each kind of compute, the smaller of the two",
        ),
        "compute_beside_copy_factor": (
            float(np.clip(kept_compute.min(), 0.5, 1.0)),
            "link_contention: compute alone over compute beside a fetch, best path and CTAs beside each kind, the "
            "smaller of the two",
        ),
        "attention_fixed_us": (attention.fixed_us, "fit of sparse_decode_attention, blocks of 64"),
        "hbm_gbps": (attention.gbps(), "the same fit"),
        "key_gbps": (
            select.gbps(),
            "slope of the fit of score_and_select with fp32 means, which the simulator assumes",
        ),
        "gemm_fixed_us": (gemm.fixed_us, "fit of gemm: products of 2 to 64 rows, all shapes; a product"),
        "gemm_weight_gbps": (gemm.gbps(), "the same fit"),
        "gemv_weight_gbps": (fits["gemv"].gbps(), "slope of the fit of gemm at one row"),
        "gemm_tflops": (square["flops"] / square["median_us"] / 1e6, f"gemm: {_SQUARE} cubed"),
        "gemm_overlap": (1.0, "roofline: reading weights and multiplying run at the same time, the longer one counts"),
        "select_fixed_us": (fits["append_token"].fixed_us, "fit of append_token; the slot plan is in topk_fixed_us"),
        "select_us_per_row": (fits["append_token"].per_unit_us[0], "the same fit, a KV head of a sequence"),
        "topk_fixed_us": (
            (select.fixed_us + plan.fixed_us) / 2,
            "half the fixed parts of score_and_select (fp32 means) and slot_plan: the simulator charges two passes",
        ),
        "topk_us_per_element": (0.0, "rows run side by side: the length of one row is what counts"),
        "topk_us_per_block": (select.per_unit_us[1] / 2, "half the per-block part of score_and_select"),
        "host_per_layer_us": (0.0, "the step runs as one graph: launch gaps are part of the kernels' times"),
        "host_per_step_us": (replay, "overheads: replay of a graph of one kernel, and its synchronisation"),
        "gpu_memory_bytes": (gpu_memory_bytes, "reported by the driver"),
        "host_memory_bytes": (host_memory_bytes, "reported by the operating system"),
    }


def profile_cuda(directory: Path, name: str, shapes: list[ModelShape], progress: Progress) -> None:
    """Measure everything and write the bundle; ``progress(table, row)`` hears of every point."""
    rates = ceilings()
    tables: dict[str, Rows] = {"ceilings": [dict(rates)]}
    for table, points in _tables(shapes):
        for row in points:
            tables.setdefault(table, []).append(row)
            progress(table, row)
        torch.cuda.empty_cache()
    fits = fit_tables(tables)
    about = environment()
    write_bundle(
        directory,
        name=name,
        device=about["device"],
        status="measured",
        notes=(
            f"torch {about['torch']}, triton {about['triton']}, CUDA {about['cuda']}; graph replays, L2 flushed; "
            "whole predictions made from it are projections until validated"
        ),
        tables=tables,
        fits=fits,
        models=simulator_numbers(
            tables,
            fits,
            gpu_memory_bytes=float(torch.cuda.get_device_properties(0).total_memory),
            host_memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        ),
        environment=about,
        choices=fetch_choices(tables["link_runs"], tables["link_contention"]),
    )
