"""Fitted locality models: one score process a block size, with where it came from, as a small JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality.process import N_WEIGHTS, TIME_SCALES, ScoreProcess, ScoreStream
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.playback import heads_in_turn, layers_by_depth

SCHEMA_VERSION = 1
MAX_BYTES = 2**20
_MAX_HEADS = 2**14
_FOLDER = Path(__file__).parent / "models"
# name -> (columns, least, most); columns 0: one number a head
_COLUMNS = {
    "weights": (N_WEIGHTS, 0.0, 1.001),
    "recency": (0, -10.0, 10.0),
    "beta_correlation": (0, -1.0, 1.0),
    "wildness": (0, 0.0, 3.0),
}
_DIGITS = 4


@dataclass(frozen=True, eq=False)
class FittedLocality:
    """``processes`` by block size in tokens. ``provenance``: model, documents with hashes, command, revision.

    ``contexts``: the shortest and the longest context in tokens that it was fitted at.
    """

    name: str
    model: str
    contexts: tuple[int, int]
    processes: Mapping[int, ScoreProcess]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def scores(self, shape: ModelShape, sparse: SparseConfig, tokens: int, rng: np.random.Generator) -> ScoreStream:
        """A sequence of up to ``tokens`` tokens; another model's layers follow by relative depth, its heads in turn.

        ConfigError for a block size that was not fitted.
        """
        process = self.process(sparse.block_size)
        if (shape.n_layers, shape.n_kv_heads) != (process.n_layers, process.n_kv_heads):
            process = process.for_heads(
                layers_by_depth(shape.n_layers, process.n_layers), heads_in_turn(shape.n_kv_heads, process.n_kv_heads)
            )
        return ScoreStream(process, -(-tokens // sparse.block_size), sparse.block_size, rng)

    def process(self, block_size: int) -> ScoreProcess:
        if block_size not in self.processes:
            known = ", ".join(map(str, sorted(self.processes)))
            raise ConfigError(
                f"block_size={block_size} was not fitted in locality model {self.name} (fitted: {known}); "
                "fit it with nosa locality fit --block-sizes"
            )
        return self.processes[block_size]

    def describe(self) -> str:
        low, high = self.contexts
        return (
            f"{self.name}, fitted to {self.model} at {low} to {high} tokens of context; other contexts, models and "
            "windows below 512 tokens are assumed to behave alike"
        )

    def to_json(self) -> str:
        """The text of a model file, numbers rounded to 4 digits."""
        document = {
            "kind": "locality",
            "schema_version": SCHEMA_VERSION,
            "status": "projected",
            "name": self.name,
            "model": self.model,
            "contexts": list(self.contexts),
            "time_scales": list(TIME_SCALES),
            "provenance": dict(self.provenance),
            "processes": {str(size): _plain(process) for size, process in sorted(self.processes.items())},
        }
        return json.dumps(document, allow_nan=False) + "\n"


def load_fitted(path: str | Path) -> FittedLocality:
    """Read a file of `FittedLocality.to_json`; ConfigError names what is wrong with it."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, more than the limit of {MAX_BYTES}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read locality model {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    try:
        return _parsed(data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no locality model: {what}") from None


def fitted_names() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def packaged_path(name: str) -> Path:
    return _FOLDER / f"{name}.json"


def _plain(process: ScoreProcess) -> dict[str, Any]:
    return {
        "n_layers": process.n_layers,
        "n_kv_heads": process.n_kv_heads,
        "shared_by_all": round(process.shared_by_all, _DIGITS),
        "shared_by_layer": round(process.shared_by_layer, _DIGITS),
        **{name: np.round(getattr(process, name).astype(np.float64), _DIGITS).tolist() for name in _COLUMNS},
    }


def _parsed(data: Any) -> FittedLocality:
    if not isinstance(data, dict) or data.get("kind") != "locality":
        raise ConfigError('its "kind" is not "locality"')
    if data["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"schema_version={data['schema_version']!r}, known here: {SCHEMA_VERSION}")
    if tuple(data["time_scales"]) != TIME_SCALES:
        raise ConfigError(f"time_scales={data['time_scales']!r} differ from {list(TIME_SCALES)}; fit it again")
    low, high = (int(_number(f"contexts[{i}]", data["contexts"][i], 1, 2**40)) for i in range(2))
    processes = {int(size): _process(size, raw) for size, raw in data["processes"].items()}
    if not processes:
        raise ConfigError("it holds no process")
    return FittedLocality(str(data["name"]), str(data["model"]), (low, high), processes, dict(data["provenance"]))


def _process(size: str, raw: Mapping[str, Any]) -> ScoreProcess:
    layers, heads = (int(_number(name, raw[name], 1, _MAX_HEADS)) for name in ("n_layers", "n_kv_heads"))
    if layers * heads > _MAX_HEADS:
        raise ConfigError(f"{layers} layers x {heads} KV heads exceed the limit of {_MAX_HEADS}")
    columns: dict[str, Any] = {}
    for name, (width, least, most) in _COLUMNS.items():
        values = np.array(raw[name], dtype=np.float64)
        expected = (layers * heads, width) if width else (layers * heads,)
        if values.shape != expected:
            raise ConfigError(f"block size {size}: {name} is of shape {values.shape}, not {expected}")
        if not np.all((values >= least) & (values <= most)):
            raise ConfigError(f"block size {size}: {name} must lie in [{least:g}, {most:g}]")
        columns[name] = values
    total = columns["weights"].sum(axis=1, keepdims=True)
    if not np.all(np.abs(total - 1.0) < 0.01):
        raise ConfigError(f"block size {size}: the weights of a head must add up to 1")
    columns["weights"] = columns["weights"] / total
    by_all, by_layer = (_number(name, raw[name], 0.0, 1.0) for name in ("shared_by_all", "shared_by_layer"))
    if by_all + by_layer > 1.0:
        raise ConfigError(f"block size {size}: shared_by_all + shared_by_layer exceed 1")
    return ScoreProcess(layers, heads, **columns, shared_by_all=by_all, shared_by_layer=by_layer)


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a number")
    if not least <= value <= most:
        raise ConfigError(f"{name}={value!r} must lie in [{least:g}, {most:g}]")
    return value
