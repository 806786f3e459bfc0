"""Calibrate a profile on the CUDA engine: which settings it runs, the matrices it times, and the bundle they make."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nosa_sys.model_shape import DTYPE_BYTES, ModelShape
from nosa_sys.profiling.engine_gpu_fit import Rows, calibrate
from nosa_sys.profiling.engine_gpu_run import GpuRun, Length
from nosa_sys.profiling.engine_gpu_setting import GpuSetting, slots_for
from nosa_sys.profiling.fits import LinearFit
from nosa_sys.profiling.matrices import gemm_points
from nosa_sys.simulator.engine_terms import ENGINE_FILE, EngineTerms, MatrixTimes
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware

STEPS_TABLE, MATRICES_TABLE = "engine_steps", "engine_gemm"
# Calibration runs are many; noise of one of them averages out in the fits.
CALIBRATION_LENGTH = Length(windows=2, steps=10, part_steps=6)
MATRIX_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
# A graph serves contexts up to a multiple of 32 blocks: rows end so far below one that no step captures another.
SPARE_TOKENS = 512
# shape -> (method, batch, context in 1024 tokens, block, k in tokens, slots / k, misses a head and step)
CALIBRATION: dict[str, tuple[tuple[str, int, int, int, int, float, float], ...]] = {
    "nosa-8b": (
        ("nosa", 64, 16, 64, 4096, 1.0, 4),
        ("nosa", 1, 32, 64, 4096, 1.0, 4),
        ("nosa", 96, 8, 64, 2048, 1.5, 2),
        ("nosa", 24, 16, 32, 8192, 1.0, 10),
        ("infllmv2", 24, 32, 128, 4096, 2.0, 4),
        ("dma", 48, 8, 64, 2048, 1.0, 0),
        ("nosa", 4, 96, 64, 1024, 2.0, 1),
        ("nosa", 12, 16, 32, 8192, 2.0, 3),
        ("nosa", 112, 8, 32, 1024, 1.25, 0.5),
        ("nosa", 16, 32, 128, 8192, 1.5, 2),
        ("dma", 6, 48, 64, 8192, 1.0, 0),
        ("full", 8, 16, 64, 4096, 1.0, 0),
    ),
    "llama-3-8b": (
        ("nosa", 32, 8, 64, 4096, 1.0, 4),
        ("nosa", 12, 16, 128, 2048, 1.0, 1),
        ("nosa", 2, 24, 32, 2048, 1.25, 1),
        ("infllmv2", 5, 16, 64, 8192, 1.5, 1),
        ("full", 4, 32, 64, 4096, 1.0, 0),
    ),
    "tiny": (
        ("nosa", 4, 1, 16, 128, 1.0, 1),
        ("nosa", 1, 1, 16, 128, 1.0, 1),
        ("nosa", 2, 1, 32, 256, 1.5, 1),
        ("infllmv2", 3, 1, 64, 512, 1.0, 1),
        ("dma", 4, 1, 16, 128, 2.0, 0),
        ("nosa", 6, 1, 16, 256, 1.0, 1),
        ("infllmv2", 5, 1, 32, 256, 1.0, 2),
        ("full", 2, 1, 16, 128, 1.0, 0),
    ),
}


def context_of(kilotokens: float) -> int:
    """Tokens of the longest row for a nominal context in 1024 tokens."""
    return max(1, round(kilotokens)) * 1024 - SPARE_TOKENS


def calibration_settings(shape: ModelShape, seed: int) -> list[GpuSetting]:
    """The settings that a shape is calibrated on; none for a shape without any."""
    found = []
    for method, batch, kilotokens, block, k_tokens, factor, misses in CALIBRATION.get(shape.name, ()):
        topk = k_tokens // block
        found.append(
            GpuSetting(
                shape.name, method, batch, context_of(kilotokens), block, topk, slots_for(topk, factor), float(misses),
                seed=seed,
            )
        )  # fmt: skip
    return found


def time_matrices(
    shape: ModelShape, time: Callable[[Callable[[], object]], Any], device: torch.device, rows: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Every matrix of a shape alone, at every number of rows."""
    assert shape.dtype in DTYPE_BYTES
    return gemm_points(shape, time, device, getattr(torch, shape.dtype), rows)


def matrix_times(points: Sequence[Mapping[str, Any]]) -> list[MatrixTimes]:
    """Points by matrix; a time never falls with rows, so that noise does not make more work cheaper."""
    table: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        table.setdefault((int(point["n"]), int(point["k"])), {})[int(point["m"])] = float(point["median_us"])
    found = []
    for (n, k), by_rows in table.items():
        rows = sorted(by_rows)
        us = pd.Series([by_rows[m] for m in rows]).cummax()
        found.append(MatrixTimes(n, k, tuple(rows), tuple(float(x) for x in us)))
    return found


def calibrated_keys(bundle: Path) -> list[dict[str, Any]]:
    """Settings that a bundle's engine terms were fitted to; none without engine steps of a GPU."""
    table = bundle / f"{STEPS_TABLE}.parquet"
    names = [f.name for f in dataclasses.fields(GpuSetting) if f.name != "seed"]
    if not table.is_file():
        return []
    frame = pd.read_parquet(table)
    if not set(names) <= set(frame.columns):
        return []
    return [{str(k): None if pd.isna(v) else v for k, v in row.items()} for row in frame[names].to_dict("records")]


def write_engine_bundle(
    directory: Path,
    base: Path,
    runs: Sequence[GpuRun],
    shapes: Mapping[str, ModelShape],
    points: Sequence[Mapping[str, Any]],
    *,
    device: str,
) -> HardwareProfile:
    """A copy of the bundle ``base`` with terms of the engine's step, their fits and the rows behind them.

    Raises HardwareError where the runs are too few for a fit.
    """
    terms, fits, rows = calibrate(runs, shapes, matrix_times(points), load_hardware(base))
    shutil.copytree(base, directory, dirs_exist_ok=True)
    _write(directory, terms, fits, rows, points)
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    meta["notes"] = f"{meta['notes']}; engine.json: {len(rows)} settings of the CUDA engine on {device}"
    (directory / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return load_hardware(directory)


def _write(
    directory: Path,
    terms: EngineTerms,
    fits: Mapping[str, LinearFit],
    rows: Rows,
    points: Sequence[Mapping[str, Any]],
) -> None:
    (directory / ENGINE_FILE).write_text(
        json.dumps(terms.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    known = json.loads((directory / "fits.json").read_text(encoding="utf-8"))
    known |= {f"engine_{name}": fit.to_dict() for name, fit in fits.items()}
    (directory / "fits.json").write_text(json.dumps(known, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for name, table in ((STEPS_TABLE, rows), (MATRICES_TABLE, points)):
        pd.DataFrame(list(table)).to_parquet(directory / f"{name}.parquet", compression="zstd", index=False)
