"""What a bundle's tables and fits say beside its numbers: where it was measured, how well it fits, runs on the link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.errors import HardwareError
from nosa_sys.simulator.json_file import read_json_object

FITS_FILE, CHOICES_FILE = "fits.json", "choices.json"
BASE_RUN_BYTES = 32768  # the run size that h2d_fixed_us and h2d_gbps of a GPU bundle were fitted at
_MAX_TABLE_BYTES = 2**24

# What a situation may exceed, each in one unit: name -> what it is called in errors.
ROWS, CONTEXT, BLOCKS, BLOCK_SIZE = "batch", "context tokens of a sequence", "blocks of a sequence", "block_size"
K_TOKENS, HEAD_ROWS = "tokens attended a head (topk x block_size)", "batch x KV heads"
ATTENTION_BYTES, DENSE_ATTENTION_BYTES = "bytes of one attention launch", "bytes of one dense attention launch"
FETCH_BYTES, RUN_BYTES = "bytes of one fetch", "bytes of a block on the host"
# Of these a time below the lowest point is no safer than one above the highest: the form itself changes there.
_TWO_SIDED = (BLOCK_SIZE, RUN_BYTES)


@dataclass(frozen=True)
class FitError:
    """Leave-one-out relative errors of one fitted model of a bundle."""

    name: str
    n_points: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True)
class AxisRange:
    """Where a bundle was measured along one axis. Below ``low`` the fixed part bounds the time, unless two-sided."""

    axis: str
    low: float
    high: float
    table: str

    def beyond(self, low: float, high: float) -> str:
        """Which end the values from ``low`` to ``high`` lie beyond, in words; empty for neither."""
        if high > self.high:
            return f"{self.axis} {high:,.0f} is above {self.high:,.0f}, the highest in {self.table}"
        if low < self.low and self.axis in _TWO_SIDED:
            return f"{self.axis} {low:,.0f} is below {self.low:,.0f}, the lowest in {self.table}"
        return ""


@dataclass(frozen=True)
class FetchRuns:
    """The gather kernel by the size of the runs that it copies: ``fixed_us + bytes * us_per_byte`` for each size."""

    run_bytes: tuple[int, ...]
    fixed_us: tuple[float, ...]
    us_per_byte: tuple[float, ...]

    def relative(self, run_bytes: float) -> tuple[float, float]:
        """(us more of fixed part, times as long a byte) of runs of a size against those of 32 KiB, interpolated."""
        sizes, at = np.log2(self.run_bytes), math.log2(run_bytes)
        fixed, slope = (np.interp([at, math.log2(BASE_RUN_BYTES)], sizes, v) for v in (self.fixed_us, self.us_per_byte))
        return float(fixed[0] - fixed[1]), float(slope[0] / slope[1])


@dataclass(frozen=True)
class BundleTables:
    """``ranges``: none where a bundle has no tables, then nothing is refused. ``runs``: None without link tables."""

    fits: tuple[FitError, ...] = ()
    ranges: tuple[AxisRange, ...] = ()
    runs: FetchRuns | None = None


NO_TABLES = BundleTables()


def read_bundle_tables(directory: Path) -> BundleTables:
    """Everything of a bundle's directory that is there. HardwareError names a file that cannot be read."""
    return BundleTables(_fits(directory / FITS_FILE), _ranges(directory), _runs(directory))


def read_table(directory: Path, name: str) -> dict[str, np.ndarray]:
    """Columns of one table of a bundle, empty where it is not there."""
    path = directory / f"{name}.parquet"
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_TABLE_BYTES:
        raise HardwareError(f"{path} has {path.stat().st_size} bytes, more than the limit of {_MAX_TABLE_BYTES}")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise HardwareError(f"{path} cannot be read: {error}") from None
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def read_choices(directory: Path) -> dict[str, Any]:
    """Which fetch path a bundle found best, empty where it says nothing."""
    return _json(directory / CHOICES_FILE)


def _json(path: Path) -> dict[str, Any]:
    return read_json_object(path, _MAX_TABLE_BYTES) if path.is_file() else {}


def _fits(path: Path) -> tuple[FitError, ...]:
    keys = ("n_points", "leave_one_out_median", "leave_one_out_p90", "leave_one_out_max")
    found = []
    for name, entry in _json(path).items():
        values: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in keys]
        if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in values):
            raise HardwareError(f"{path}: {name} must have the numbers {', '.join(keys)}")
        found.append(FitError(name, int(values[0]), *(float(v) for v in values[1:])))
    return tuple(found)


def _ranges(directory: Path) -> tuple[AxisRange, ...]:
    """From the engine's own runs where the bundle was calibrated on some, else from the kernels' grids."""
    steps = read_table(directory, "engine_steps")
    if steps:
        return _engine_ranges(steps)
    found: list[AxisRange] = []

    def add(axis: str, values: np.ndarray | None, table: str) -> None:
        if values is not None and len(values):
            found.append(AxisRange(axis, float(np.min(values)), float(np.max(values)), table))

    matrices = read_table(directory, "gemm")
    if {"m", "matrix"} <= set(matrices):
        add(ROWS, matrices["m"][matrices["matrix"] != "square"], "gemm")
    select, append = read_table(directory, "score_and_select"), read_table(directory, "append_token")
    attention, dense = (read_table(directory, f"{kind}_decode_attention") for kind in ("sparse", "paged"))
    add(BLOCKS, select.get("blocks"), "score_and_select")
    if {"batch", "kv_heads"} <= set(append):
        add(HEAD_ROWS, append["batch"] * append["kv_heads"], "append_token")
    add(BLOCK_SIZE, attention.get("block"), "sparse_decode_attention")
    add(ATTENTION_BYTES, attention.get("bytes"), "sparse_decode_attention")
    add(DENSE_ATTENTION_BYTES, dense.get("bytes"), "paged_decode_attention")
    gather = _gather(directory)
    add(FETCH_BYTES, gather.get("bytes"), "link_runs")
    add(RUN_BYTES, gather.get("run_bytes"), "link_runs")
    return tuple(found)


def _engine_ranges(steps: dict[str, np.ndarray]) -> tuple[AxisRange, ...]:
    needed = {ROWS: "batch", CONTEXT: "context", BLOCK_SIZE: "block_size"}
    if not {*needed.values(), "topk"} <= set(steps):
        return ()
    columns = {axis: steps[name].astype(np.float64) for axis, name in needed.items()}
    columns[K_TOKENS] = steps["topk"].astype(np.float64) * steps["block_size"]
    return tuple(AxisRange(axis, float(v.min()), float(v.max()), "engine_steps") for axis, v in columns.items())


def _gather(directory: Path) -> dict[str, np.ndarray]:
    """Rows of link_runs of the gather kernel as a fetch alone uses it."""
    runs = read_table(directory, "link_runs")
    choice = read_choices(directory).get("alone")
    if not {"direction", "path", "n_ctas"} <= set(runs) or not isinstance(choice, dict):
        return {}
    keep = (
        (runs["direction"] == "h2d") & (runs["path"] == choice.get("path")) & (runs["n_ctas"] == choice.get("n_ctas"))
    )
    return {name: values[keep] for name, values in runs.items()}


def _runs(directory: Path) -> FetchRuns | None:
    gather = _gather(directory)
    sizes = np.unique(gather.get("run_bytes", np.empty(0)))
    if BASE_RUN_BYTES not in sizes:
        return None
    lines = [
        _line(gather["bytes"][gather["run_bytes"] == s], gather["median_us"][gather["run_bytes"] == s]) for s in sizes
    ]
    return FetchRuns(tuple(int(s) for s in sizes), tuple(x for x, _ in lines), tuple(x for _, x in lines))


def _line(n_bytes: np.ndarray, us: np.ndarray) -> tuple[float, float]:
    """Least squares of relative errors of ``us = fixed + bytes * slope``, neither below 0."""
    from scipy.optimize import nnls

    scale = float(n_bytes.max())
    solution, _ = nnls(np.stack([1.0 / us, n_bytes / scale / us], axis=1), np.ones(len(us)))
    return float(solution[0]), float(solution[1] / scale)
