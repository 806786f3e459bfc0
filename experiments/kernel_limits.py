"""Kernels against their limits on one GPU: checks, benchmark table, fetch fit, one decode plan, overlap.

    python -m nosa_sys.experiments.kernel_limits --out experiments/results/h200/kernel_limits [--skip-checks]

Writes ``checks.json``, ``bench.json``, ``limits.json`` (raw rows) and ``summary.json`` (each target with what was
reached). Every number is measured on the device named in the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.kernels.bench import ceilings, format_row
from nosa_sys.kernels.launch import NO_TRITON, has_triton
from nosa_sys.kernels.registry import OPERATION_MODULES
from nosa_sys.kernels.timing import environment, time_in_graph
from nosa_sys.methods import get_method
from nosa_sys.profiling.fits import fit_linear
from nosa_sys.sparse_config import SparseConfig

FETCH_COUNTS = (64, 256, 1024, 2048, 4096, 8192)


def fetch_fit(ceiling_gbps: float) -> Iterator[dict[str, Any]]:
    """Slope and fixed cost of the gather over 64 to 8,192 runs, and 64 runs alone, by run size; 16 CTAs.

    Launches follow one another in a graph without a flush between them: the data comes over the link whatever the L2
    holds, and a flush's own tail would be counted as fixed cost. Each launch of a graph takes other rows.
    """
    from nosa_sys.kernels.block_fetch.cases import make_inputs
    from nosa_sys.kernels.block_fetch.triton import copy_runs
    from nosa_sys.kernels.case import Case

    for head_dim, run_bytes in ((64, 16384), (128, 32768)):
        params = {"block": 64, "head_dim": head_dim, "n_runs": 8192, "n_listed": -1, "skip_every": 0, "n_ctas": 16}
        params |= {"n_host_rows": 16384, "n_slot_rows": 16384}
        generator = torch.Generator(device="cuda").manual_seed(0)
        case = Case("fit", "bfloat16", params, frozenset({"bench"}))
        inputs = make_inputs(case, torch.device("cuda"), generator)
        sizes, times = [], []
        for n in FETCH_COUNTS:
            count = torch.tensor([n], dtype=torch.int32, device="cuda")
            launches = [
                partial(
                    copy_runs,
                    inputs["host"],
                    inputs["slots"],
                    inputs["host_rows"].roll(-turn * n)[:n].contiguous(),
                    inputs["slot_rows"].roll(-turn * n)[:n].contiguous(),
                    count,
                    n_ctas=16,
                )
                for turn in range(4)
            ]

            def fetches(launches: list[Any] = launches) -> None:
                for launch in launches:
                    launch()

            timing = time_in_graph(fetches, copies=4 if n <= 256 else 1, n_replays=11, flush="none")
            microseconds = timing.median_us / len(launches)
            row = {"what": "fetch", "run_bytes": run_bytes, "n_runs": n, "bytes": n * run_bytes}
            yield {**row, "median_us": microseconds, "n_replays": timing.n_replays}
            sizes.append(n * run_bytes)
            times.append(microseconds)
            if n == 64:
                limit = 1.1 * (2.9 + n * run_bytes / ceiling_gbps / 1e3)
                yield {"what": "fetch_64", "run_bytes": run_bytes, "median_us": microseconds, "limit_us": limit}
        fit = fit_linear(["bytes"], np.array(sizes)[:, None], np.array(times))
        yield {
            "what": "fetch_fit",
            "run_bytes": run_bytes,
            "fixed_us": fit.fixed_us,
            "slope_gbps": fit.gbps(),
            "share_of_ceiling": fit.gbps() / ceiling_gbps,
        }


def decode_plan(batch: int, context: int, means: torch.dtype, n_kv_heads: int = 2, group: int = 16) -> dict[str, Any]:
    """Scoring, pooling, selection and set difference of one layer in one graph, the last fed by the one before."""
    from nosa_sys.kernels.block_selection.triton import score_and_select
    from nosa_sys.kernels.set_difference.triton import update_slots

    cfg, method, dim = SparseConfig(), get_method("nosa"), 128
    windows, blocks = cfg.n_windows(context), cfg.n_blocks(context)
    generator = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q = normal(batch, n_kv_heads * group, dim, dtype=torch.bfloat16)
    key_means = normal(batch, n_kv_heads, windows, dim, dtype=means)
    beta_means = normal(batch, n_kv_heads, windows)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    rows = batch * n_kv_heads
    resident = torch.rand((rows, blocks), generator=generator, device="cuda").argsort(dim=1)[:, : cfg.topk]
    slot_blocks = resident.int().contiguous()
    rank = torch.zeros((rows, cfg.topk), dtype=torch.float32, device="cuda")

    def plan() -> object:
        chosen = score_and_select(q, key_means, beta_means, lengths, blocks, cfg, method)
        return update_slots(slot_blocks, chosen.block_ids.view(rows, -1), rank, False)

    timing = time_in_graph(plan, copies=8, n_replays=15)
    return {
        "what": "decode_plan",
        "batch": batch,
        "context": context,
        "n_kv_heads": n_kv_heads,
        "group": group,
        "key_mean_dtype": str(means).removeprefix("torch."),
        "key_mean_bytes": key_means.numel() * key_means.element_size(),
        **dataclasses.asdict(timing),
    }


def overlaps() -> Iterator[dict[str, Any]]:
    """Fetch beside compute, the whole scan once and the paths in use twice more: where CTAs land differs by run."""
    from nosa_sys.kernels.block_fetch.overlap import measure_overlap

    for repeat in range(3):
        for compute in ("gemm", "attention"):
            rows = (
                measure_overlap(compute)
                if repeat == 0
                else measure_overlap(compute, uva_ctas=(8,), bulk_ctas=(2, 3, 4), seed=repeat)
            )
            for row in rows:
                yield {"what": "overlap", "repeat": repeat, **dataclasses.asdict(row), "slowdown": row.slowdown}


def run_checks(out: Path) -> bool:
    """Every case of every operation, one process an operation (compilation dominates)."""
    processes = [
        (
            name,
            subprocess.Popen(
                [sys.executable, "-m", "nosa_sys.kernels.gpu_check", "--ops", name, "--out", str(out / f"{name}.part")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ),
        )
        for name in OPERATION_MODULES
    ]
    rows: list[dict[str, Any]] = []
    ok = True
    for name, process in processes:
        output, _ = process.communicate()
        ok &= process.returncode == 0
        part = out / f"{name}.part"
        if part.exists():
            rows += json.loads(part.read_text())["rows"]
            part.unlink()
        else:
            print(output[-2000:])
    (out / "checks.json").write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        if not row["ok"]:
            print("FAIL", json.dumps(row))
    print(f"{len(rows)} cases checked, {sum(not row['ok'] for row in rows)} failed", flush=True)
    return ok


def bench_rows(ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    from nosa_sys.kernels.bench import bench_kernels

    for row in bench_kernels(ceiling=ceiling):
        print(format_row(row), flush=True)
        yield row


def summary(ceiling: dict[str, float], bench: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets with what was reached."""
    from nosa_sys.kernels.block_fetch.bulk import DEFAULT_BULK_CTAS

    found: list[dict[str, Any]] = []

    def add(what: str, reached: float, target: float, *, at_most: bool) -> None:
        met = reached <= target if at_most else reached >= target
        found.append({"what": what, "reached": reached, "target": target, "at_most": at_most, "met": met})

    for row in rows:
        if row["what"] == "fetch_fit":
            name = f"fetch of {row['run_bytes'] // 1024} KiB runs"
            add(f"{name}: slope over ceiling", row["share_of_ceiling"], 0.98, at_most=False)
            add(f"{name}: fixed cost, us", row["fixed_us"], 4.0, at_most=True)
        elif row["what"] == "fetch_64" and row["run_bytes"] == 32768:
            add("fetch of 64 runs of 32 KiB, us", row["median_us"], row["limit_us"], at_most=True)
        elif row["what"] == "decode_plan" and row["context"] == 16384:
            add(f"decode plan at 16K, {row['key_mean_dtype']} means, us", row["median_us"], 35.0, at_most=True)
    for compute in ("gemm", "attention"):
        slowdowns = [
            row["slowdown"]
            for row in rows
            if row["what"] == "overlap"
            and (row["path"], row["n_ctas"], row["compute"]) == ("bulk", DEFAULT_BULK_CTAS, compute)
        ]
        if slowdowns:
            name = f"fetch ({DEFAULT_BULK_CTAS} bulk-copy CTAs) beside {compute}, over the longer, worst of three"
            add(name, max(slowdowns), 1.05, at_most=True)
    for row in bench:
        if (row["operation"], row.get("case")) in (
            ("sparse_decode_attention", "b64-hkv2"),
            ("sparse_decode_attention", "b64-hkv8"),
            ("paged_decode_attention", "16K-b16-hkv2"),
            ("paged_decode_attention", "16K-b16-hkv8"),
        ):
            share = row["gbps"] / ceiling["device_copy_gbps"]
            add(f"{row['operation']} {row['case']}: share of the device copy rate", share, 0.8, at_most=False)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="kernels against their limits on this machine's GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-bench", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: kernel limits are measured on one", file=sys.stderr)
        return 2
    if not has_triton():
        print(NO_TRITON, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    ok = options.skip_checks or run_checks(options.out)
    ceiling = ceilings()
    rows: list[dict[str, Any]] = [{"what": "ceilings", **ceiling}]
    for context, batch in ((16384, 64), (131072, 16)):
        for means in (torch.float32, torch.bfloat16):
            rows.append(decode_plan(batch, context, means))
            print(json.dumps(rows[-1]), flush=True)
    for source in (fetch_fit(ceiling["sm_read_gbps"]), overlaps()):
        for row in source:
            rows.append(row)
            print(json.dumps(row), flush=True)
    bench = [] if options.skip_bench else list(bench_rows(ceiling))
    results = summary(ceiling, bench, rows)
    stamp = {"environment": environment(), "status": "measured"}
    for name, data in (("limits", rows), ("bench", bench), ("summary", results)):
        (options.out / f"{name}.json").write_text(json.dumps({**stamp, "rows": data}, indent=1) + "\n")
    for row in results:
        target = f"{'<=' if row['at_most'] else '>='} {row['target']:.3f}"
        print(f"{'met ' if row['met'] else 'MISS'} {row['what']}: {row['reached']:.3f} (target {target})")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
