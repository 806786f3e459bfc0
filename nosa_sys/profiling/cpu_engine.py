"""Calibrate the CPU engine's decode step: its phases over a few cells, and what it costs on a model of next to nothing.

A kernel timed alone finds its data in the processor's caches; in a decode step every layer finds them cold. So the
numbers come from the engine's own phases, in its own shapes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.engine.phases import ATTENTION, H2D, OTHER, SELECT
from nosa_sys.errors import NosaError
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.profiling.engine_cell import CellRun, EngineCell, measure_cells
from nosa_sys.profiling.fits import LinearFit, fit_linear
from nosa_sys.simulator.cost_model import LAYER_PRODUCTS
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.schema import WHOLE_STEP_LAYER

Rows = list[dict[str, Any]]
# (batch, topk, context, slots, method). Validation refuses these: calibration has seen them.
CALIBRATION_CELLS = (
    (1, 8, 512, 8, "nosa"),
    (1, 24, 1664, 24, "nosa"),
    (2, 16, 1024, 16, "infllmv2"),
    (4, 8, 512, 16, "nosa"),
    (4, 24, 1664, 24, "nosa"),
    (8, 16, 1024, 16, "infllmv2"),
    (16, 8, 512, 8, "nosa"),
    (16, 16, 1024, 16, "nosa"),
)
CELL_KEYS = ("batch", "topk", "block_size", "context", "slots", "method")
_STEPS = 4
_RUNS = 5
# What is left after taking the overhead of a small model off may be noise alone where the model itself is small.
_LEAST_SHARE = 0.01


def calibration_cell(batch: int, topk: int, context: int, slots: int, method: str) -> EngineCell:
    sparse = SparseConfig(topk=topk, window_size=128, select_blocks=topk // 4)
    return EngineCell(sparse, method, batch, context, slots, None, _STEPS)


def small_shape(shape: ModelShape) -> ModelShape:
    """As many layers as ``shape``, with matrices, heads and a vocabulary that cost next to nothing."""
    return ModelShape("small", shape.n_layers, 1, 1, 16, 16, 16, 64, dtype=shape.dtype)


def engine_points(shape: ModelShape, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(table, row) of every calibration cell: ``engine_overhead`` on the small model, then ``engine_steps``."""
    for table, sizes, values in (
        ("engine_overhead", small_shape(shape), CALIBRATION_CELLS[:1]),
        ("engine_steps", shape, CALIBRATION_CELLS),
    ):
        model = random_model(sizes, seed)
        cells = [calibration_cell(*value) for value in values]
        with tempfile.TemporaryDirectory() as scratch:
            for cell, run in zip(cells, measure_cells(model, cells, Path(scratch), runs=_RUNS, seed=seed), strict=True):
                if isinstance(run, NosaError):
                    raise run
                yield table, engine_row(model, cell, run)


def engine_row(model: LlamaModel, cell: EngineCell, run: CellRun) -> dict[str, Any]:
    """Means over warm steps and layers of one cell, microseconds a layer, and the sizes that they depend on.

    ``h2d_us`` and ``h2d_bytes`` are of layers with a miss (0 where there is none), ``no_miss_us`` of those without.
    """
    layers = run.trace.table("steps").to_pandas()
    loads = MissTable.from_trace(run.trace).per_layer_step()
    warm = ~loads.cold
    layers = layers[(layers["layer"] != WHOLE_STEP_LAYER) & layers["step"].isin(loads.steps[warm])]
    missing = layers[layers["n_misses"] > 0]
    idle = layers[(layers["n_misses"] == 0) & (layers["d2h_bytes"] == 0)]
    shape, n_layers = model.shape, model.n_layers
    elements = float(loads.context_tokens[warm].mean()) / cell.sparse.block_size * shape.n_kv_heads
    return {
        **cell_key(cell),
        "model_shape": shape.name,
        "n_layers": n_layers,
        "select_us": run.times.phase_us[SELECT] / n_layers,
        "attention_us": run.times.phase_us[ATTENTION] / n_layers,
        "other_us": run.times.phase_us[OTHER] / n_layers,
        "h2d_us": float(missing[H2D].mean()) if len(missing) else 0.0,
        "h2d_bytes": float(missing["h2d_bytes"].mean()) if len(missing) else 0.0,
        "no_miss_us": float(idle[H2D].mean()) if len(idle) else 0.0,
        "rest_us": run.times.rest_us,
        "rows": cell.batch * shape.n_kv_heads,
        "elements": elements,
        "attended_bytes": float(loads.attended_blocks[warm].mean()) * shape.kv_block_bytes(cell.sparse.block_size),
        "step_us": run.times.step_us,
        "slowest_run_us": max(run.times.run_us),
        "n_runs": len(run.times.run_us),
    }


def cell_key(cell: EngineCell) -> dict[str, Any]:
    """What tells one cell from another."""
    sparse = cell.sparse
    slots = sparse.topk if cell.slots is None else cell.slots
    return dict(
        zip(CELL_KEYS, (cell.batch, sparse.topk, sparse.block_size, cell.context, slots, cell.method), strict=True)
    )


def engine_fits(shape: ModelShape, steps: Rows, overhead: dict[str, Any]) -> dict[str, LinearFit]:
    """Fits of selection, attention and matrices to the engine's phases."""

    def fit(name: str, *features: str) -> LinearFit:
        values = np.array([[float(row[f]) for f in features] for row in steps])
        return fit_linear(features, values, np.array([row[name] for row in steps]))

    products, times = [], []
    sizes = (
        ("other_us", shape.layer_params, LAYER_PRODUCTS),
        ("rest_us", shape.vocab_size * shape.hidden_size, 1),
    )
    for row in steps:
        for name, parameters, n_products in sizes:
            n_bytes, rows = parameters * shape.dtype_bytes, row["batch"]
            one = rows == 1
            products.append([n_products, n_bytes * one, n_bytes * (not one), 2.0 * parameters * rows])
            times.append(max(row[name] - overhead[name], _LEAST_SHARE * row[name]))
    return {
        "engine_select": fit("select_us", "rows", "elements"),
        "engine_attention": fit("attention_us", "attended_bytes"),
        "engine_matrices": fit_linear(
            ("products", "bytes_of_one_row", "bytes", "flops"), np.array(products), np.array(times), through_zero=True
        ),
    }


def fetch_fixed_us(steps: Rows, h2d_gbps: float) -> float:
    """Median over cells of what a layer's fetch takes beyond its bytes and beyond a layer without a miss."""
    extra = [
        row["h2d_us"] - row["no_miss_us"] - row["h2d_bytes"] / (h2d_gbps * 1e3) for row in steps if row["h2d_bytes"]
    ]
    return max(0.0, float(np.median(extra))) if extra else 0.0


def float32_shape(shape: ModelShape) -> ModelShape:
    """The CPU engine runs in single precision."""
    return dataclasses.replace(shape, dtype="float32")
