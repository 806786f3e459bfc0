"""The simulator against the CUDA engine: measure calibration runs, fit, measure other settings, predict, compare.

    python -m nosa_sys.experiments.gpu_validation --out DIR --calibrate [--recipe experiments/validate-h200.yaml]
    python -m nosa_sys.experiments.gpu_validation --out DIR --refit OTHER     (fit and predict again; needs no GPU)
    python -m nosa_sys.experiments.gpu_validation --out DIR --calibrate --shape tiny --device cpu   (dry run)

One session and one machine for both; each model is built once. What is not measured when the time is up stays a failed
row. DIR gets validation.json, cells.parquet, runs.json.gz (all that was measured) and profile/ (the calibrated bundle).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.capture import device_name
from nosa_sys.experiments.gpu_validation_clocks import ClockLog
from nosa_sys.experiments.gpu_validation_recipe import GpuRecipe, Ranges, draw_settings, load_gpu_recipe, trace_settings
from nosa_sys.experiments.gpu_validation_rows import orderings, setting_rows
from nosa_sys.experiments.nosi_scale import TINY
from nosa_sys.experiments.validation import CELLS_FILE, PROFILE_DIRECTORY, VALIDATION_FILE, summarise
from nosa_sys.experiments.validation_recipe import Thresholds
from nosa_sys.kernels.timing import time_in_graph
from nosa_sys.machine import nvidia_link, versions
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.profiling.cpu_profile import time_call
from nosa_sys.profiling.engine_gpu import (
    CALIBRATION_LENGTH,
    MATRIX_ROWS,
    calibrated_keys,
    calibration_settings,
    time_matrices,
    write_engine_bundle,
)
from nosa_sys.profiling.engine_gpu_run import GpuRun, measure_setting
from nosa_sys.profiling.engine_gpu_store import load_runs, save_runs
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware, profile_directory

Say = Callable[[str], None]
DEFAULT_RECIPE = Path("experiments/validate-h200.yaml")
DRY_RECIPE = GpuRecipe(
    kind="gpu",
    name="dry",
    settings={"tiny": 3},
    ranges=Ranges(
        batch=(1, 5),
        context=(300, 600),
        k_tokens=(128, 256),
        block_size=(16, 32),
        slot_factor=(1.0, 1.5),
        miss_share=(0.05, 0.2),
    ),
    windows=2,
    steps=3,
    part_steps=2,
    max_minutes=10.0,
    thresholds=Thresholds(median=100.0),
)


@dataclass
class Measured:
    """All runs of a session, and the points of its matrices."""

    calibration: list[GpuRun] = field(default_factory=list)
    validation: list[GpuRun] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)


def shape_of(name: str) -> ModelShape:
    """A model shape by name, the tiny one of dry runs among them."""
    return TINY.shape if name == TINY.shape.name else ModelShape.preset(name)


def validate_gpu(
    recipe: GpuRecipe,
    directory: Path,
    say: Say,
    *,
    hardware: str | None = None,
    device: str = "cuda",
    calibrate: bool = True,
    refit: Path | None = None,
) -> dict[str, Any]:
    """Run a recipe into ``directory`` (there already) and return its document, also left there as validation.json.

    ``calibrate``: terms of the engine's step are fitted in the same session; otherwise ``hardware`` must be a bundle
    that has them. ``refit``: directory of an earlier run whose measurements are used. Raises NosaError only for what
    concerns all cells; what was measured is saved before anything is fitted.
    """
    if device.startswith("cuda") and not torch.cuda.is_available() and refit is None:
        raise ConfigError("no CUDA device: validation needs one; --shape tiny --device cpu is a dry run")
    base = profile_directory(hardware or recipe.hardware)
    profile = load_hardware(base)
    if not calibrate and refit is None and profile.engine is None:
        raise ConfigError(f"hardware {profile.name} has no engine.json; calibrate in the same session (--calibrate)")
    measured, clocks = Measured(), ClockLog(device.startswith("cuda") and refit is None)
    taken = [] if calibrate or refit is not None else calibrated_keys(base)
    try:
        if refit is not None:
            measured = Measured(*load_runs(refit))
        else:
            _measure(recipe, measured, clocks, taken, say, device=device, calibrate=calibrate)
    finally:
        clocks.close()
        save_runs(directory, measured.calibration, measured.validation, measured.points)
    shapes = {name: shape_of(name) for name in recipe.settings}
    name = device_name(device) if refit is None else profile.device
    fault = None
    if measured.calibration:
        say(f"fitting {len(measured.calibration)} calibration settings")
        try:
            bundle = directory / PROFILE_DIRECTORY
            profile = write_engine_bundle(bundle, base, measured.calibration, shapes, measured.points, device=name)
            taken = calibrated_keys(bundle)
        except NosaError as error:  # what was measured is worth keeping, and can be fitted again
            fault = f"calibration failed: {error}"
    rows: list[dict[str, Any]] = []
    for run in measured.validation:
        run.failed = run.failed or fault
        rows += setting_rows(run, shapes[run.setting.model_shape], profile, taken)
    document = _document(recipe, rows, profile, measured, name)
    table = pd.DataFrame([{k: v for k, v in row.items() if k not in ("clocks", "window_us")} for row in rows])
    table.to_parquet(directory / CELLS_FILE, compression="zstd", index=False)
    text = json.dumps(document, indent=1, allow_nan=False)
    (directory / VALIDATION_FILE).write_text(text + "\n", encoding="utf-8")
    return document


def _measure(
    recipe: GpuRecipe,
    measured: Measured,
    clocks: ClockLog,
    taken: list[dict[str, Any]],
    say: Say,
    *,
    device: str,
    calibrate: bool,
) -> None:
    start, limit_s = time.perf_counter(), recipe.max_minutes * 60
    runner = "graph" if device.startswith("cuda") else "kernels"
    arena = _arena(recipe) if runner == "graph" else None
    counts = {name: n + len(calibration_settings(shape_of(name), 0)) * calibrate for name, n in recipe.settings.items()}
    n_before = 0  # settings up to and with this shape: its share of the time
    for name in recipe.settings:
        shape = shape_of(name)
        own = calibration_settings(shape, recipe.seed) if calibrate else []
        drawn = draw_settings(recipe, shape, [*taken, *(setting.key() for setting in own)])
        if len(drawn) < recipe.settings[name]:
            say(f"{name}: only {len(drawn)} of {recipe.settings[name]} settings fit the memory of the recipe")
        drawn += trace_settings(recipe, shape)
        n_before += counts[name]
        share_s = limit_s * n_before / sum(counts.values())
        model = random_model(shape, recipe.seed, device=device)
        if calibrate:
            measured.points += _matrix_points(shape, model)
        for kind, settings, until_s in (("calibration", own, limit_s), ("validation", drawn, share_s)):
            for setting in settings:
                run = GpuRun(setting, failed="the time was up before it")
                elapsed_s = time.perf_counter() - start
                if elapsed_s < until_s:
                    place = clocks.place()
                    calibrates = kind == "calibration"
                    length = CALIBRATION_LENGTH if calibrates and runner == "graph" else recipe.length
                    run = measure_setting(model, setting, length, arena=arena, runner=runner, copies=calibrates)
                    run.clocks = clocks.since(place)
                getattr(measured, kind).append(run)
                say(f"{time.perf_counter() - start:5.0f} s  {kind} {line(run)}")
        del model
        gc.collect()
        if runner == "graph":
            torch.cuda.empty_cache()


def _arena(recipe: GpuRecipe) -> Any:
    from nosa_sys.engine.pinned import PinnedArena

    return PinnedArena(int(recipe.host_gib * 2**30))


def _matrix_points(shape: ModelShape, model: LlamaModel) -> list[dict[str, Any]]:
    def on_gpu(work: Callable[[], object]) -> dict[str, Any]:
        return {"median_us": time_in_graph(work, copies=4, n_replays=7).median_us}

    def on_cpu(work: Callable[[], object]) -> dict[str, Any]:
        return {"median_us": time_call(work, n_calls=3)["median_us"]}

    time_one = on_gpu if model.device.type == "cuda" else on_cpu
    return list(time_matrices(shape, time_one, model.device, MATRIX_ROWS))


def line(run: GpuRun) -> str:
    """One setting on one line."""
    s = run.setting
    head = (
        f"{s.model_shape} {s.method} b{s.batch} context {s.context} block {s.block_size} k{s.topk} slots {s.slots} "
        f"misses {s.misses:g}: {run.wall_s:.1f} s"
    )
    if run.failed:
        return f"{head}  failed: {run.failed}"
    return head + "".join(f"  {name} {run.step_us(name) / 1e3:.3f} ms" for name in run.window_us)


def _document(
    recipe: GpuRecipe, rows: list[dict[str, Any]], profile: HardwareProfile, measured: Measured, device: str
) -> dict[str, Any]:
    noise = [row["noise"] for row in rows if row.get("error") is not None]
    typical = float(np.median(noise)) if noise else None
    limits = recipe.thresholds.model_dump()
    if limits["median"] is not None and typical is not None:
        limits["median"] = max(limits["median"], 2 * typical)  # no error is finer than what repeats
    summary = summarise(rows, limits)
    link = nvidia_link() if torch.cuda.is_available() else None
    return {
        "kind": "validation",
        "name": recipe.name,
        "measured_status": "measured",
        "status": "validated" if summary["ok"] else "projected",
        "device": device,
        "driver": link[0] if link else None,
        "hardware": profile.name,
        "hardware_device": profile.device,
        "model_shape": ", ".join(recipe.settings),
        "weights": "random",
        "selections": "injected",
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "noise_median": typical,
        "orderings": orderings(rows),
        "n_calibration": len(measured.calibration),
        "calibration_failed": [f"{line(run)}" for run in measured.calibration if run.failed],
        **summary,
        "cells": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Status 0 within the thresholds, 1 past them, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=DEFAULT_RECIPE)
    parser.add_argument("--calibrate", action="store_true", help="fit the engine's terms in this session")
    parser.add_argument("--hardware", help="bundle to start from; without --calibrate it must have engine.json")
    parser.add_argument("--refit", type=Path, help="directory of an earlier run: fit and predict again")
    parser.add_argument("--max-minutes", type=float)
    parser.add_argument("--trace", action="append", default=[], help="recorded sets as one more setting; repeatable")
    parser.add_argument("--shape", help="one model shape of the recipe; tiny for the dry run")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    try:
        recipe = DRY_RECIPE if options.shape == TINY.shape.name else load_gpu_recipe(options.recipe)
        changes: dict[str, Any] = {}
        if options.shape:
            if options.shape not in recipe.settings:
                raise ConfigError(f"shape {options.shape!r} is not in the recipe: {', '.join(recipe.settings)}")
            changes["settings"] = {options.shape: recipe.settings[options.shape]}
        if options.max_minutes is not None:
            changes["max_minutes"] = options.max_minutes
        if options.trace:
            changes["traces"] = (*recipe.traces, *options.trace)
        recipe = recipe.model_copy(update=changes)
        options.out.mkdir(parents=True, exist_ok=True)
        document = validate_gpu(
            recipe, options.out, lambda text: print(text, flush=True), hardware=options.hardware,
            device=options.device, calibrate=options.calibrate, refit=options.refit,
        )  # fmt: skip
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    for text in report_lines(document):
        print(text)
    return 0 if document["ok"] else 1


def report_lines(document: dict[str, Any]) -> list[str]:
    """A line a cell, then the errors, parts, orderings and what was exceeded."""
    lines = []
    for row in document["cells"]:
        head = (
            f"{row['model_shape']} {row['method']} b{row['batch']} {row['context']} block {row['block_size']} "
            f"k{row['topk']} slots {row['slots']} {row['schedule']}"
        )
        if row.get("error") is None:
            lines.append(f"{head}  failed: {row['failed']}")
            continue
        measured, predicted = row["measured_step_us"] / 1e3, row["predicted_step_us"] / 1e3
        compute = row["predicted_compute_us"] / row["measured_compute_us"] - 1
        lines.append(
            f"{head}  measured {measured:.3f} ms  predicted {predicted:.3f}  error {row['error']:+.1%}  "
            f"noise {row['noise']:.1%}  compute alone {compute:+.1%}" + (f"  {row['failed']}" if row["failed"] else "")
        )
    for what in ("errors", "median_part_errors"):
        shown = {k: "none" if v is None else f"{v:.1%}" for k, v in document[what].items()}
        lines.append(f"{what}: " + "  ".join(f"{k} {v}" for k, v in shown.items()))
    order = document["orderings"]
    lines.append(f"orders of schedules: {order['agree']} of {order['pairs']} as measured")
    lines += [f"wrong order: {text}" for text in order["wrong"]]
    return [*lines, *(f"calibration: {text}" for text in document["calibration_failed"]),
            *(f"exceeded: {text}" for text in document["exceeded"])]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
