"""What a report is made of: traces, replays, predictions, sweeps and validations found in the directories given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.errors import TraceError
from nosa_sys.report.time_figures import PARTS
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import META_FILE

CAPTURE_FILE = "capture.json"
VALIDATION_FILE = "validation.json"
_CELL_KEYS = ("method", "batch", "topk", "context", "slots", "measured_step_us", "predicted_step_us")
_MAX_JSON_BYTES = 64 * 2**20
_MAX_DEPTH = 3
# of the keys that the figures read
_RESULT_TYPES: dict[type | tuple[type, ...], tuple[str, ...]] = {
    dict: ("sparse", "settings"),
    list: ("assumptions", "rules"),
    (int, float): (
        *("slots_over_k", "misses_per_head_step", "miss_ratio", "gamma_macro", "h2d_bytes_per_step"),
        *(column for column, _, _ in PARTS),
    ),
}


@dataclass(frozen=True)
class TraceInput:
    """A trace with the document that ``nosa capture`` left beside it (empty for foreign traces)."""

    trace: Trace
    capture: dict[str, Any]

    @property
    def label(self) -> str:
        meta = self.trace.meta
        return f"{meta.model.name}, {meta.method}, k={meta.sparse.topk}"


@dataclass(frozen=True)
class SweepInput:
    """Rows of results.parquet with the sweep's summary.json."""

    path: Path
    rows: pd.DataFrame
    summary: dict[str, Any]


@dataclass
class ReportInputs:
    """Everything found, in the order of the directories given."""

    traces: list[TraceInput] = field(default_factory=list)
    replays: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    sweeps: list[SweepInput] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.traces or self.replays or self.predictions or self.sweeps or self.validations)


def load_inputs(paths: Iterable[Path]) -> ReportInputs:
    """Read every output at or below the directories; TraceError names one that is missing, empty or broken."""
    inputs = ReportInputs()
    for path in paths:
        path = Path(path)
        if not path.is_dir():
            raise TraceError(f"no such directory: {path}")
        before = _count(inputs)
        _collect(path, inputs, 0)
        if _count(inputs) == before:
            raise TraceError(f"{path} holds no trace, replay, prediction, sweep or validation")
    return inputs


def _count(inputs: ReportInputs) -> int:
    return sum(len(getattr(inputs, f.name)) for f in dataclasses.fields(inputs))


def _collect(path: Path, inputs: ReportInputs, depth: int) -> None:
    if (path / META_FILE).is_file():
        capture = path / CAPTURE_FILE
        inputs.traces.append(TraceInput(Trace.open(path), read_json(capture) if capture.is_file() else {}))
        return
    found = True
    if (path / "replay.json").is_file():
        inputs.replays.append(_read_result(path / "replay.json"))
    elif (path / "prediction.json").is_file():
        inputs.predictions.append(_read_result(path / "prediction.json"))
    elif (path / VALIDATION_FILE).is_file():
        inputs.validations.append(read_validation(path / VALIDATION_FILE))
    elif (path / "results.parquet").is_file():
        summary = path / "summary.json"
        inputs.sweeps.append(
            SweepInput(path, read_parquet(path / "results.parquet"), read_json(summary) if summary.is_file() else {})
        )
    else:
        found = False
    if not found and depth < _MAX_DEPTH:
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith(".") and not child.name.endswith(".partial"):
                _collect(child, inputs, depth + 1)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise TraceError(f"{path} has {path.stat().st_size} bytes, more than the limit of {_MAX_JSON_BYTES}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise TraceError(f"{path} must hold a JSON object")
    return data


def _read_result(path: Path) -> dict[str, Any]:
    """A replay or prediction; keys without a value are left out, one of another type than the figures need is named."""
    data = {key: value for key, value in read_json(path).items() if value is not None}
    for kind, names in _RESULT_TYPES.items():
        for name in names:
            value = data.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise TraceError(f"{path}: {name}={str(value)[:80]!r} has type {type(value).__name__}")
    return data


def read_validation(path: Path) -> dict[str, Any]:
    """A validation whose compared cells have what the figure needs; TraceError names what is missing."""
    data = read_json(path)
    cells = data.get("cells")
    if not isinstance(cells, list) or not isinstance(data.get("errors"), dict):
        raise TraceError(f"{path} needs a list of cells and a mapping of errors")
    for row in cells:
        if not isinstance(row, dict):
            raise TraceError(f"{path}: a cell must be a mapping")
        if row.get("error") is None:
            continue
        missing = [key for key in _CELL_KEYS if row.get(key) is None]
        if missing:
            raise TraceError(f"{path}: a compared cell lacks {missing[0]}")
    return data


def read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pq.read_table(path).to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
