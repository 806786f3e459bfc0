"""NOSI on a GPU against what people use: schedules, hot buffer, methods, the paper's cells, peers, crossover, recorder.

    python -m nosa_sys.experiments.nosi_bench --out DIR --stages schedules,methods [--trace nosa=DIR]
    python -m nosa_sys.experiments.nosi_bench --out DIR --shape tiny --device cpu   (dry run: the same code, no figures)

One model of random weights and one arena of pinned memory serve all stages. Each stage leaves STAGE.parquet and
STAGE.json with its raw rows and the machine's facts, also when it is stopped half-way; what a killed process had is in
STAGE.jsonl, a row a line. No cell begins once a stage has taken --stage-seconds: `methods`, `prefill` and `crossover`
are best run for one of --contexts at a time. Figures are injected or measured as each row's ``status`` says; a cell
that does not fit keeps a row that says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.decode_bench import facts
from nosa_sys.experiments.decode_bench_rates import Rates
from nosa_sys.experiments.decode_bench_request import make_arena, write_rows
from nosa_sys.experiments.decode_bench_run import Workbench
from nosa_sys.experiments.nosi_lab import Lab
from nosa_sys.experiments.nosi_scale import SCALES
from nosa_sys.experiments.nosi_schedules import schedules, schedules_means
from nosa_sys.experiments.nosi_stages import crossover, hot_buffer, methods, paper, peers, prefill, recorder
from nosa_sys.models.random import random_model

STAGES: dict[str, Callable[[Lab], None]] = {
    "schedules": schedules,
    "schedules_means": schedules_means,
    "hot_buffer": hot_buffer,
    "methods": methods,
    "prefill": prefill,
    "paper": paper,
    "crossover": crossover,
    "recorder": recorder,
    "peers": peers,  # last: it needs room for two more models
}


def main(arguments: list[str] | None = None) -> int:
    """Run the stages asked for; 0 when all ran, 1 when one failed, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--shape", choices=tuple(SCALES), default="nosa-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schedule", default="auto", help="for stages that do not compare schedules")
    parser.add_argument("--slot-factor", type=float, default=1.25, help="slots / k of the hot-buffer variants")
    parser.add_argument("--arena-gib", type=float, default=100.0, help="pinned host memory; 0 for none")
    parser.add_argument("--trace", action="append", default=[], metavar="METHOD=DIRECTORY")
    parser.add_argument("--contexts", help="tokens, comma separated, in place of the scale's own")
    parser.add_argument("--stage-seconds", type=float, default=170.0, help="no cell of a stage begins after these")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        lab = _lab(options)
        names = [name for name in STAGES if name in options.stages.split(",")]
        if unknown := set(options.stages.split(",")) - set(names):
            raise ConfigError(f"unknown stage {min(unknown)!r}; known: {', '.join(STAGES)}")
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    head = {"kind": "nosi bench", "facts": facts(lab.bench.model), "rates": vars(lab.bench.rates)}
    print(json.dumps(head["rates"]), flush=True)
    failed = False
    for name in names:
        failed |= not _run(lab, name, head, options.stage_seconds)
    return int(failed)


def _lab(options: argparse.Namespace) -> Lab:
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("no CUDA device: the figures need one; --shape tiny --device cpu is a dry run")
    traces = {}
    for text in options.trace:
        method, _, directory = text.partition("=")
        if not directory:
            raise ConfigError(f"--trace {text!r} must be METHOD=DIRECTORY")
        traces[method] = Path(directory)
    options.out.mkdir(parents=True, exist_ok=True)
    scale = SCALES[options.shape]
    if options.contexts:
        scale = dataclasses.replace(scale, contexts=tuple(int(c) for c in options.contexts.split(",")))
    model = random_model(scale.shape, options.seed, device=options.device)
    arena_bytes = int(options.arena_gib * 2**30) if model.device.type == "cuda" else 0
    bench = Workbench(model, Rates.measure(model.device), make_arena(arena_bytes))
    return Lab(
        bench=bench,
        scale=scale,
        out=options.out,
        schedule=options.schedule,
        slot_factor=options.slot_factor,
        host_bytes=arena_bytes or float("inf"),
        seed=options.seed,
        traces=traces,
    )


def _run(lab: Lab, name: str, head: dict[str, Any], limit_s: float) -> bool:
    """One stage; its rows are written whatever happens. False where it broke off."""
    lab.rows, lab.journal = [], lab.out / f"{name}.jsonl"
    lab.journal.unlink(missing_ok=True)
    start = time.monotonic()
    lab.ends_at_s = start + limit_s
    error = ""
    try:
        STAGES[name](lab)
    except Exception as failure:  # the next stage may run all the same, and a machine is lent for minutes
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
        print(f"{name}: broke off: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
    finally:
        wall_s = time.monotonic() - start
        if lab.rows:
            write_rows(lab.out / f"{name}.parquet", lab.rows)
        document = {**head, "stage": name, "wall_s": wall_s, "error": error, "rows": lab.rows}
        (lab.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        lab.journal.unlink(missing_ok=True)
        print(f"{name}: {len(lab.rows)} rows in {wall_s:.0f} s", flush=True)
    return not error


if __name__ == "__main__":
    sys.exit(main())
