"""What a profile knows of the CUDA engine's step: numbers fitted to calibration runs, and times of matrices.

A bundle keeps them in ``engine.json``; profiles without it are priced by kernels alone. Formulas are in
simulator.engine_cost.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.simulator.json_file import read_json_object
from nosa_sys.simulator.link import MAX_NUMBER
from nosa_sys.simulator.rates import LinkSharing
from nosa_sys.simulator.step_times import Floats

ENGINE_FILE = "engine.json"
MAX_ENGINE_BYTES = 2**20
_TABLES = ("matrices", "sources")


@dataclass(frozen=True)
class MatrixTimes:
    """Times ``us`` of one matrix product [rows, k] x [k, n] alone in a graph, by ascending ``rows``."""

    n: int
    k: int
    rows: tuple[int, ...]
    us: tuple[float, ...]

    def extended(self) -> MatrixTimes:
        """The same times, and beyond the last row as much more as there are more rows."""
        far = 2**20
        return MatrixTimes(self.n, self.k, (*self.rows, self.rows[-1] * far), (*self.us, self.us[-1] * far))

    def at(self, rows: np.ndarray) -> Floats:
        """Microseconds at any number of rows by linear interpolation, 0 for none; HardwareError beyond the last one."""
        if rows.size and int(rows.max()) > self.rows[-1]:
            raise HardwareError(
                f"{int(rows.max())} rows exceed the {self.rows[-1]} that the matrix {self.n} x {self.k} was timed at; "
                "calibrate the profile with more rows, lower the batch, or --extrapolate"
            )
        return np.where(rows > 0, np.interp(rows, self.rows, self.us), 0.0)


@dataclass(frozen=True)
class EngineTerms:
    """Numbers of one device. ``*_us_per_mb``: microseconds a decimal megabyte; ``*_fixed_us``: a launch or a layer.

    ``alone`` and ``beside`` are the two ways of fetching: in line with compute, and next to it, which costs compute
    ``fork_us`` a fetch whatever is fetched (two streams part and meet). ``attention_places``: CTAs that run at once.
    """

    append_us: float
    select_fixed_us: float
    select_score_us: float
    select_us_per_head: float
    select_us_per_block: float
    select_us_per_compare: float
    select_us_per_mb: float
    attention_fixed_us: float
    dense_attention_fixed_us: float
    attention_us_per_cta: float
    attention_us_per_mb: float
    attention_us_per_small_mb: float
    merge_fixed_us: float
    rest_fixed_us: float
    rest_matrix_scale: float
    rest_us_per_mb: float
    step_fixed_us: float
    step_head_scale: float
    step_us_per_mb: float
    fetch_alone_fixed_us: float
    fetch_alone_layer_us: float
    fetch_alone_us_per_mb: float
    fork_us: float
    fetch_beside_fixed_us: float
    fetch_beside_us_per_mb: float
    duplex_factor: float
    beside_compute_factor: float
    compute_beside_copy_factor: float
    attention_places: float
    matrices: tuple[MatrixTimes, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def sharing(self) -> LinkSharing:
        return LinkSharing(self.duplex_factor, self.beside_compute_factor, self.compute_beside_copy_factor)

    def fetch(self, *, beside: bool) -> tuple[float, float, float]:
        """Microseconds of a fetch's launch, of a layer that missed something, and of a megabyte."""
        if beside:
            return self.fetch_beside_fixed_us, 0.0, self.fetch_beside_us_per_mb
        return self.fetch_alone_fixed_us, self.fetch_alone_layer_us, self.fetch_alone_us_per_mb

    def with_fetch_scaled(self, factor: float) -> EngineTerms:
        """The same engine where a fetched megabyte takes ``factor`` times as long: another link, launches unchanged."""
        return dataclasses.replace(
            self,
            fetch_alone_us_per_mb=self.fetch_alone_us_per_mb * factor,
            fetch_beside_us_per_mb=self.fetch_beside_us_per_mb * factor,
        )

    def extrapolating(self) -> EngineTerms:
        """The same engine whose matrices go on beyond their last measured row."""
        return dataclasses.replace(self, matrices=tuple(m.extended() for m in self.matrices))

    def with_link(self, fixed_us: float, duplex_factor: float) -> EngineTerms:
        """The same engine where a fetch's launch takes ``fixed_us`` more (or less), and both directions share so."""
        return dataclasses.replace(
            self,
            fetch_alone_fixed_us=max(0.0, self.fetch_alone_fixed_us + fixed_us),
            fetch_beside_fixed_us=max(0.0, self.fetch_beside_fixed_us + fixed_us),
            duplex_factor=min(duplex_factor, self.beside_compute_factor),
        )

    def matrix(self, n: int, k: int) -> MatrixTimes | None:
        """The times of a matrix of these sizes, None where it was not measured."""
        return next((m for m in self.matrices if (m.n, m.k) == (n, k)), None)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``engine.json``."""
        terms = {name: {"value": getattr(self, name), "source": self.sources.get(name, "")} for name in term_names()}
        return {"terms": terms, "matrices": [dataclasses.asdict(m) for m in self.matrices]}


def term_names() -> tuple[str, ...]:
    """Names of all numbers, in the order of the file."""
    return tuple(f.name for f in dataclasses.fields(EngineTerms) if f.name not in _TABLES)


def read_engine_terms(directory: Path) -> EngineTerms | None:
    """The terms of a bundle, None where it has none. HardwareError naming the file and the key at fault."""
    path = directory / ENGINE_FILE
    if not path.is_file():
        return None
    data = read_json_object(path, MAX_ENGINE_BYTES)
    if set(data) != {"terms", "matrices"}:
        raise HardwareError(f"{path} must hold exactly the keys terms and matrices")
    values = _terms(data["terms"], path)
    places = values["attention_places"][0]
    if places < 1:
        raise HardwareError(f"{path}: attention_places={places:g} must be >= 1")
    terms = EngineTerms(
        **{name: value for name, (value, _) in values.items()},
        matrices=tuple(_matrix(entry, path) for entry in _listed(data["matrices"], path)),
        sources={name: source for name, (_, source) in values.items()},
    )
    try:
        _ = terms.sharing
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from None
    return terms


def _listed(entries: Any, path: Path) -> list[Any]:
    if not isinstance(entries, list):
        raise HardwareError(f"{path}: matrices must be a list")
    return entries


def _terms(entries: Any, path: Path) -> dict[str, tuple[float, str]]:
    names = term_names()
    if not isinstance(entries, dict) or set(entries) != set(names):
        wrong = sorted(set(entries) ^ set(names)) if isinstance(entries, dict) else names
        raise HardwareError(f"{path}: terms must have exactly the keys {', '.join(names)}; at fault: {wrong[0]}")
    found = {}
    for name in names:
        entry = entries[name]
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise HardwareError(f'{path}: {name} must be {{"value": number, "source": "text"}}')
        found[name] = (_number(entry["value"], f"{path}: {name}"), entry["source"])
    return found


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise HardwareError(f"{what}={value!r} must be a finite number >= 0")
    if value > MAX_NUMBER:
        raise HardwareError(f"{what}={value!r} is above the limit of {MAX_NUMBER:g}")
    return float(value)


def _matrix(entry: Any, path: Path) -> MatrixTimes:
    if not isinstance(entry, dict) or set(entry) != {"n", "k", "rows", "us"}:
        raise HardwareError(f"{path}: a matrix must have exactly the keys n, k, rows, us")
    n, k = (int(_number(entry[name], f"{path}: {name}")) for name in ("n", "k"))
    rows = tuple(int(_number(r, f"{path}: rows")) for r in _listed(entry["rows"], path))
    us = tuple(_number(u, f"{path}: us") for u in _listed(entry["us"], path))
    if not rows or len(rows) != len(us) or any(a >= b for a, b in pairwise(rows)):
        raise HardwareError(f"{path}: matrix {n} x {k} needs ascending rows and a time for each")
    return MatrixTimes(n, k, rows, us)
