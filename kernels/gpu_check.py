"""Run every kernel case on a GPU against its reference: fresh random inputs, poisoned outputs, fast version first.

    python -m nosa_sys.kernels.gpu_check [--ops a,b] [--uses check|small] [--seed 0] [--out table.json]

Prints one row a case with its error norms and limits; exit code 1 when any case fails.
``compute-sanitizer python -m nosa_sys.kernels.gpu_check --uses small`` runs the same on the small cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from nosa_sys.kernels.case import Case, Operation
from nosa_sys.kernels.registry import OPERATION_MODULES, load_operation
from nosa_sys.kernels.timing import environment


def run_case(operation: Operation, case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """One case: kernel, then reference, then the comparison."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    started = time.perf_counter()
    inputs = operation.make_inputs(case, device, generator)
    fast = operation.fast(inputs)
    torch.cuda.synchronize()
    reference = operation.reference(inputs)
    torch.cuda.synchronize()
    errors = operation.compare(case, inputs, fast, reference)
    ok = bool(errors) and all(error <= limit for error, limit in errors.values())
    return {
        "operation": operation.name,
        "case": case.name,
        "dtype": case.dtype,
        "ok": ok,
        "errors": {name: {"error": error, "limit": limit} for name, (error, limit) in errors.items()},
        "seconds": time.perf_counter() - started,
    }


def format_row(row: dict[str, Any]) -> str:
    errors = "  ".join(f"{k} {v['error']:.2e}<={v['limit']:.0e}" for k, v in row["errors"].items())
    return f"{'ok  ' if row['ok'] else 'FAIL'} {row['operation']:24s} {row['case']:36s} {row['dtype']:9s} {errors}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check every kernel case on a GPU")
    parser.add_argument("--ops", default=",".join(OPERATION_MODULES))
    parser.add_argument("--uses", default="check", choices=("check", "small"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int, default=0, help="at most this many cases an operation (0: all)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check here (the CPU tests run the interpreter instead)", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    for module in options.ops.split(","):
        for operation in load_operation(module):
            cases = [case for case in operation.cases() if options.uses in case.uses]
            for index, case in enumerate(cases[: options.limit or None]):
                try:
                    row = run_case(operation, case, device, options.seed + index)
                except Exception as error:  # a broken case must not hide the others; it is reported as failed
                    traceback.print_exc(limit=6)
                    row = {
                        "operation": operation.name,
                        "case": case.name,
                        "dtype": case.dtype,
                        "ok": False,
                        "errors": {},
                        "exception": f"{type(error).__name__}: {error}"[:300],
                    }
                rows.append(row)
                print(format_row(row) + (f"  {row['exception']}" if "exception" in row else ""), flush=True)
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} cases, {failed} failed")
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
