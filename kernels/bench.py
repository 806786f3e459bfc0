"""Benchmark the kernels on their own case lists: GB/s, TFLOP/s, share of the ceiling measured in the same run.

Bytes and FLOPs are counted from the case; baselines (torch or vendor) are timed beside where a case has one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nosa_sys.errors import HardwareError
from nosa_sys.kernels.case import Case, Operation
from nosa_sys.kernels.registry import OPERATION_MODULES, load_operation
from nosa_sys.kernels.timing import Timing, device_copy_gbps, environment, time_eager, time_in_graph

HOST_LINK_OPERATIONS = ("block_fetch", "write_back", "bulk_fetch", "dma_fetch")


def ceilings() -> dict[str, float]:
    """Rates that kernels are held against, GB/s, measured now: HBM copy (read + write), SM reads of pinned memory."""
    from nosa_sys.kernels.block_fetch.ceiling import sm_read_ceiling_gbps

    return {"device_copy_gbps": device_copy_gbps(), "sm_read_gbps": sm_read_ceiling_gbps()}


def _timed(
    function: Callable[[dict[str, Any]], Any], inputs: dict[str, Any], *, copies_memory: bool
) -> tuple[Timing, str]:
    """Graph replays where the call can be captured, event-timed eager calls where it cannot."""
    try:
        return time_in_graph(lambda: function(inputs), flush="write" if copies_memory else "read"), "graph"
    except RuntimeError as error:
        torch.cuda.synchronize()
        if "capture" not in str(error).lower() and "graph" not in str(error).lower():
            raise
        return time_eager(lambda: function(inputs)), "eager"


def bench_case(operation: Operation, case: Case, ceiling: dict[str, float], seed: int) -> dict[str, Any]:
    """Time one case and its baselines; returns one flat row."""
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    inputs = operation.make_inputs(case, torch.device("cuda"), generator)
    link = operation.name in HOST_LINK_OPERATIONS
    timing, mode = _timed(operation.launch or operation.fast, inputs, copies_memory=link)
    n_bytes, flops = operation.bytes_moved(case, inputs), operation.flops(case, inputs)
    limit = ceiling["sm_read_gbps" if link else "device_copy_gbps"]
    gbps = n_bytes / timing.median_us / 1e3
    row: dict[str, Any] = {
        "operation": operation.name,
        "case": case.name,
        "dtype": case.dtype,
        "median_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "mode": mode,
        "bytes": n_bytes,
        "flops": flops,
        "gbps": gbps,
        "tflops": flops / timing.median_us / 1e6,
        "ceiling": "sm_read" if link else "device_copy",
        "share_of_ceiling": gbps / limit,
    }
    for name, baseline in operation.baselines.items():
        try:
            base, base_mode = _timed(baseline, inputs, copies_memory=link)
        except (RuntimeError, HardwareError) as error:
            row[f"{name}_error"] = str(error).splitlines()[0][:120]
            continue
        row[f"{name}_us"], row[f"{name}_mode"] = base.median_us, base_mode
    return row


def bench_kernels(
    names: tuple[str, ...] = OPERATION_MODULES, *, seed: int = 0, ceiling: dict[str, float] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the ceilings first (measured now unless given), then one row for every case marked ``bench``."""
    ceiling = ceiling or ceilings()
    yield {"operation": "ceiling", **ceiling}
    for name in names:
        for operation in load_operation(name):
            for index, case in enumerate(c for c in operation.cases() if "bench" in c.uses):
                yield bench_case(operation, case, ceiling, seed + index)
                torch.cuda.empty_cache()


def format_row(row: dict[str, Any]) -> str:
    """One line of a bench table."""
    if row["operation"] == "ceiling":
        return f"ceilings: device copy {row['device_copy_gbps']:.0f} GB/s, SM reads {row['sm_read_gbps']:.2f} GB/s"
    baselines = "  ".join(f"{key} {value:.1f}" for key, value in row.items() if key.endswith("_us") and key[:1] != "p")
    return (
        f"{row['operation']:24s} {row['case']:32s} {row['dtype']:9s} {row['median_us']:9.1f} us "
        f"{row['gbps']:8.1f} GB/s "
        f"{row['share_of_ceiling']:6.1%} of {row['ceiling']:11s} {row['tflops']:7.1f} TFLOP/s  {baselines}"
    )


def main(arguments: list[str] | None = None) -> int:
    """``python -m nosa_sys.kernels.bench --ops a,b --out FILE``: the table, and every row as JSON."""
    parser = argparse.ArgumentParser(description="benchmark the kernels of this machine's GPU")
    parser.add_argument("--ops", default=",".join(OPERATION_MODULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: kernel benchmarks need one", file=sys.stderr)
        return 2
    rows = []
    for row in bench_kernels(tuple(options.ops.split(",")), seed=options.seed):
        rows.append(row)
        print(format_row(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
