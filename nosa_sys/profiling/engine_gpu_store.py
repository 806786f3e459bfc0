"""Engine runs of a GPU on disk, so that terms can be fitted and cells predicted again without the machine."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.profiling.engine_gpu_run import GpuRun
from nosa_sys.profiling.engine_gpu_setting import GpuSetting
from nosa_sys.traces.miss_table import LayerStepMisses

RUNS_FILE = "runs.json.gz"
MAX_RUNS_BYTES = 2**28  # unpacked
_LOADS = ("loads", "first_half")


def save_runs(
    directory: Path, calibration: Sequence[GpuRun], validation: Sequence[GpuRun], points: Sequence[dict[str, Any]]
) -> None:
    """Everything measured, in one file."""
    data = {
        "calibration": [_plain(run) for run in calibration],
        "validation": [_plain(run) for run in validation],
        "matrices": list(points),
    }
    text = json.dumps(data, allow_nan=False) + "\n"
    (directory / RUNS_FILE).write_bytes(gzip.compress(text.encode(), mtime=0))


def load_runs(directory: Path) -> tuple[list[GpuRun], list[GpuRun], list[dict[str, Any]]]:
    """(calibration, validation, matrix points) of a directory. HardwareError where there are none."""
    path = directory / RUNS_FILE
    if not path.is_file():
        raise HardwareError(f"{path} is missing; measure on a GPU first")
    try:
        with gzip.open(path) as file:
            text = file.read(MAX_RUNS_BYTES + 1)
        if len(text) > MAX_RUNS_BYTES:
            raise HardwareError(f"{path} unpacks to more than the limit of {MAX_RUNS_BYTES} bytes")
        data = json.loads(text)
        return [_run(r) for r in data["calibration"]], [_run(r) for r in data["validation"]], data["matrices"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise HardwareError(f"{path} is not a file of engine runs: {error}") from None


def _plain(run: GpuRun) -> dict[str, Any]:
    data = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    data["setting"] = dataclasses.asdict(run.setting)
    for name in _LOADS:
        loads = data[name]
        data[name] = None if loads is None else {k: np.asarray(v).tolist() for k, v in vars(loads).items()}
    return data


def _run(data: dict[str, Any]) -> GpuRun:
    made = dict(data)
    made["setting"] = GpuSetting(**data["setting"])
    made["fetch_us_mb"] = None if data["fetch_us_mb"] is None else tuple(data["fetch_us_mb"])
    for name in _LOADS:
        if data[name] is not None:
            made[name] = LayerStepMisses(**{k: np.array(v) for k, v in data[name].items()})
    return GpuRun(**made)
