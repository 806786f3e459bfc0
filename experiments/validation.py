"""Measure engine cells that calibration did not use, predict each from its own misses, and compare."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from nosa_sys.engine.memory_plan import device_bytes, required_bytes
from nosa_sys.engine.phases import ATTENTION, H2D, OTHER, SELECT
from nosa_sys.errors import CapacityError, NosaError
from nosa_sys.experiments.capture import device_name
from nosa_sys.experiments.validation_recipe import ValidationRecipe
from nosa_sys.machine import versions
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import load_model
from nosa_sys.models.random import random_model
from nosa_sys.profiling.cpu_engine import CELL_KEYS, cell_key, float32_shape
from nosa_sys.profiling.cpu_profile import profile_cpu
from nosa_sys.profiling.engine_cell import CellRun, EngineCell, measure_cells, traffic
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware
from nosa_sys.simulator.memory import memory_use
from nosa_sys.simulator.prediction import Prediction
from nosa_sys.simulator.simulate import simulate

VALIDATION_FILE = "validation.json"
CELLS_FILE = "cells.parquet"
PROFILE_DIRECTORY = "profile"
# What the eager engine does, though it calls it serial: one operation moves K and V, as its profile's fetch does.
SCHEDULE = "fused_kv"
PARTS = ("select", "h2d", "attention", "other")
# (stage, done, total)
Progress = Callable[[str, int, int], None]


def validate(
    recipe: ValidationRecipe, directory: Path, progress: Progress, *, hardware: str | None = None
) -> dict[str, Any]:
    """Run a recipe into ``directory`` (there already) and return its document, also left there as validation.json.

    Without hardware, given here or in the recipe, this machine is profiled first. A cell that fails keeps its row, with
    the reason. Raises NosaError only for what concerns all cells.
    """
    torch.set_num_threads(recipe.threads)
    model = _model(recipe)
    place = hardware or recipe.hardware
    if place is None:
        place = str(_profile(directory, model.shape, recipe.seed, progress))
    profile = load_hardware(place)
    rows = _rows(recipe, model, profile, calibrated_cells(Path(place)), progress)
    document = _document(recipe, rows, profile, model.shape)
    pd.DataFrame(rows).to_parquet(directory / CELLS_FILE, compression="zstd", index=False)
    text = json.dumps(document, indent=1, allow_nan=False)
    (directory / VALIDATION_FILE).write_text(text + "\n", encoding="utf-8")
    return document


def _model(recipe: ValidationRecipe) -> LlamaModel:
    if recipe.model is not None:
        return load_model(recipe.model, dtype="float32").model
    shape = float32_shape(ModelShape.resolve(recipe.model_shape))
    if recipe.n_layers is not None:
        shape = dataclasses.replace(shape, n_layers=recipe.n_layers)
    return random_model(shape, recipe.seed)


def _profile(directory: Path, shape: ModelShape, seed: int, progress: Progress) -> Path:
    bundle = directory / PROFILE_DIRECTORY
    bundle.mkdir()
    n_points = 0

    def heard(table: str, row: dict[str, Any]) -> None:
        nonlocal n_points
        n_points += 1
        progress("profile", n_points, 0)

    profile_cpu(bundle, "this-machine", shape, heard, seed=seed)
    return bundle


def calibrated_cells(bundle: Path) -> set[tuple[Any, ...]]:
    """Cells that a bundle's engine numbers were fitted to; none for bundles without engine steps."""
    table = bundle / "engine_steps.parquet"
    if not table.is_file():
        return set()
    return set(pd.read_parquet(table, columns=list(CELL_KEYS)).itertuples(index=False, name=None))


def _rows(
    recipe: ValidationRecipe,
    model: LlamaModel,
    profile: HardwareProfile,
    seen: set[tuple[Any, ...]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """A row a cell, measured and predicted; ``failed`` says why one has no comparison, or that its bytes differ."""
    rows: list[dict[str, Any]] = []
    cells: dict[int, EngineCell] = {}
    for index, given in enumerate(recipe.cells):
        cell = EngineCell(
            given.sparse(), given.method, given.batch, given.context, given.n_slots(), given.policy, recipe.steps
        )
        row = {"cell": index, **cell_key(cell), "policy": given.policy, "failed": None}
        rows.append(row)
        if tuple(row[name] for name in CELL_KEYS) in seen:
            row["failed"] = "calibration used this cell, so it validates nothing; change its batch, k or context"
            continue
        try:
            row |= _capacity(cell, model.shape, profile)
            cells[index] = cell
        except CapacityError as error:
            row["failed"] = str(error)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure_cells(
            model,
            list(cells.values()),
            Path(scratch),
            runs=recipe.runs,
            seed=recipe.seed,
            heard=lambda n_done: progress("cells", n_done, recipe.runs * len(cells)),
        )
        for index, run in zip(cells, found, strict=True):
            try:
                if isinstance(run, NosaError):
                    raise run
                rows[index] |= compare(run, simulate(run.trace, hardware=profile, schedule=SCHEDULE, extrapolate=True))
            except NosaError as error:
                rows[index]["failed"] = str(error)
    return rows


def _capacity(cell: EngineCell, shape: ModelShape, profile: HardwareProfile) -> dict[str, Any]:
    """Predicted bytes of the cell beside those of the engine's own plan, and the batch that fits, before anything runs.

    CapacityError where they exceed the profile's memory, or where prediction and plan differ.
    """
    block_bytes = shape.kv_block_bytes(cell.sparse.block_size)
    use = memory_use(
        shape,
        cell.sparse,
        cell.method,
        slots=cell.slots or 1,
        batch=cell.batch,
        context_tokens=cell.context + cell.steps + 1,
        host_block_bytes=block_bytes,
        device_block_bytes=block_bytes,
    )
    limits = use.limits(profile)
    if limits:
        raise CapacityError("; ".join(limits))
    method = get_method(cell.method)
    plan = required_bytes(
        shape,
        cell.sparse,
        method,
        n_slots=cell.slots or 1,
        offload=not method.dense,
        lanes=cell.batch,
        tokens_a_lane=cell.context + cell.steps + 1,
    )
    planned = (device_bytes(plan) + shape.weight_bytes, plan["host_pool_bytes"])
    if planned != (use.gpu_bytes, use.host_pool_bytes):
        raise CapacityError(
            f"predicted bytes (device, host) {(use.gpu_bytes, use.host_pool_bytes)} differ from the engine's plan "
            f"{planned}"
        )
    return {
        "predicted_gpu_bytes": use.gpu_bytes,
        "predicted_host_pool_bytes": use.host_pool_bytes,
        "planned_gpu_bytes": planned[0],
        "planned_host_pool_bytes": planned[1],
        "predicted_batch_that_fits": use.batch_that_fits(profile),
    }


def compare(run: CellRun, prediction: Prediction) -> dict[str, Any]:
    """Measured against predicted: microseconds a warm step, parts as the trace's steps table has them, bytes.

    ``other`` is all but selection, fetch and attention: matrices, host overhead, embedding, output head.
    """
    times, phases = run.times, run.times.phase_us
    measured = {
        "step": times.step_us,
        "select": phases[SELECT],
        "h2d": phases[H2D],
        "attention": phases[ATTENTION],
        "other": phases[OTHER] + times.rest_us,
    }
    predicted = {
        "step": prediction.step_time_us,
        "select": prediction.select_us,
        "h2d": prediction.h2d_exposed_us,
        "attention": prediction.attention_us,
        "other": prediction.gemm_us + prediction.host_overhead_us + prediction.d2h_exposed_us,
    }
    row: dict[str, Any] = {}
    for name in ("step", *PARTS):
        row[f"measured_{name}_us"], row[f"predicted_{name}_us"] = measured[name], predicted[name]
    row["error"] = predicted["step"] / measured["step"] - 1.0
    row["slowest_over_fastest_run"] = max(times.run_us) / times.step_us
    moved, expected = traffic(run.trace), (prediction.h2d_bytes_total, prediction.d2h_bytes_total)
    row |= {
        "misses_per_head_step": prediction.misses_per_head_step,
        "measured_h2d_bytes": moved[0],
        "predicted_h2d_bytes": expected[0],
        "measured_d2h_bytes": moved[1],
        "predicted_d2h_bytes": expected[1],
        "allocated_slot_bytes": run.allocated["slot_bytes"],
        "allocated_context_bytes": run.allocated["context_bytes"],
        "allocated_host_pool_bytes": run.allocated["host_pool_bytes"],
    }
    if moved != expected:
        row["failed"] = f"predicted bytes (h2d, d2h) {expected} differ from the measured {moved}"
    return row


def summarise(rows: list[dict[str, Any]], limits: dict[str, float | None]) -> dict[str, Any]:
    """Median, p90 and worst absolute error of the cells compared, of every part, and which thresholds are passed."""
    compared = [row for row in rows if row.get("error") is not None]
    errors = np.abs([row["error"] for row in compared])
    found: dict[str, float | None] = dict.fromkeys(("median", "p90", "worst"))
    if len(errors):
        found = {
            "median": float(np.median(errors)),
            "p90": float(np.quantile(errors, 0.9)),
            "worst": float(errors.max()),
        }
    parts = {}
    for part in PARTS:
        relative = [
            abs(row[f"predicted_{part}_us"] / row[f"measured_{part}_us"] - 1.0)
            for row in compared
            if row[f"measured_{part}_us"] > 0
        ]
        parts[part] = float(np.median(relative)) if relative else None
    passed = [
        f"{name} error {found[name]:.1%} exceeds {limit:.1%}"
        for name, limit in limits.items()
        if limit is not None and (value := found[name]) is not None and not value <= limit
    ]
    if not compared:
        passed.append("no cell was compared")
    failed = sum(row["failed"] is not None for row in rows)
    if failed:
        passed.append(f"{failed} of {len(rows)} cells failed")
    return {
        "n_cells": len(rows),
        "n_failed": failed,
        "errors": found,
        "median_part_errors": parts,
        "thresholds": limits,
        "exceeded": passed,
        "ok": not passed,
    }


def _document(
    recipe: ValidationRecipe, rows: list[dict[str, Any]], profile: HardwareProfile, shape: ModelShape
) -> dict[str, Any]:
    summary = summarise(rows, recipe.thresholds.model_dump())
    return {
        "kind": "validation",
        "name": recipe.name,
        "measured_status": "measured",
        # predictions earn the word only where every cell kept within the thresholds, and for these cells alone
        "status": "validated" if summary["ok"] else "projected",
        "device": device_name("cpu"),
        "schedule": SCHEDULE,
        "hardware": profile.name,
        "hardware_device": profile.device,
        "model_shape": shape.name,
        "weights": recipe.model or "random",
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        **summary,
        "cells": rows,
    }
