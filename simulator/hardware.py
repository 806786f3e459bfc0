"""Hardware profiles: bundles of numbers with a source each, loaded by name or from a directory.

A bundle is ``meta.json`` (what the device is, how far to trust it) and ``models.json`` (one entry for each number:
``{"value": ..., "source": "..."}``). A missing or unknown entry is an error, never an invention.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosa_sys.errors import HardwareError
from nosa_sys.simulator.bundle_tables import NO_TABLES, BundleTables, FitError, read_bundle_tables
from nosa_sys.simulator.engine_terms import EngineTerms, read_engine_terms
from nosa_sys.simulator.json_file import read_json_object
from nosa_sys.simulator.link import LINK_NUMBERS, MAX_NUMBER, OWN_LINK, LinkDescription, load_link
from nosa_sys.simulator.rates import LinkSharing

PROFILE_SCHEMA_VERSION = 1
PROFILE_STATUSES = ("measured", "validated", "projected")
MAX_PROFILE_BYTES = 2**20
MIN_GBPS = 1e-9  # slower than a byte a second, times overflow; likewise for TFLOP/s
_BUILT_IN = Path(__file__).parent / "profiles"

# null in models.json: "not limited by this" for speeds and memory; for h2d_gbps "the caller has to give it".
_MAY_BE_NULL = (
    "h2d_gbps",
    "d2h_gbps",
    "hbm_gbps",
    "key_gbps",
    "gemm_weight_gbps",
    "gemv_weight_gbps",
    "gemm_tflops",
    "gpu_memory_bytes",
    "host_memory_bytes",
)
_POSITIVE = (*_MAY_BE_NULL, "duplex_factor", "beside_compute_factor", "compute_beside_copy_factor")
_NOT_NUMBERS = ("name", "device", "status", "sources", "engine", "link", "tables")
# Bundles that were made before something was measured may leave it out.
_DEFAULTS = {"compute_beside_copy_factor": (1.0, "not in the bundle: compute is taken not to be slowed by fetches")}


@dataclass(frozen=True)
class HardwareProfile:
    """Numbers of one machine. GB/s are decimal; ``inf`` means that the thing costs nothing or has no limit.

    h2d and d2h: one transfer of n bytes alone on the link takes ``fixed_us + n / gbps``. Every other ``*_fixed_us`` is
    likewise the part of one operation that its size does not change; docs/simulator.md has the formulas. ``engine``:
    terms of a CUDA engine's step; with them a step is priced as the engine runs it, without them by its kernels.
    ``link``: name of the link that the h2d, d2h and duplex numbers describe, "own" for the one that was measured here.
    """

    name: str
    device: str
    status: str
    h2d_fixed_us: float
    h2d_gbps: float | None
    d2h_fixed_us: float
    d2h_gbps: float
    duplex_factor: float
    beside_compute_factor: float
    compute_beside_copy_factor: float
    attention_fixed_us: float
    hbm_gbps: float
    key_gbps: float
    gemm_fixed_us: float
    gemm_weight_gbps: float
    gemv_weight_gbps: float
    gemm_tflops: float
    gemm_overlap: float
    select_fixed_us: float
    select_us_per_row: float
    topk_fixed_us: float
    topk_us_per_element: float
    topk_us_per_block: float
    host_per_layer_us: float
    host_per_step_us: float
    gpu_memory_bytes: float
    host_memory_bytes: float
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    engine: EngineTerms | None = None
    link: str = OWN_LINK
    tables: BundleTables = NO_TABLES

    @property
    def sharing(self) -> LinkSharing:
        return LinkSharing(self.duplex_factor, self.beside_compute_factor, self.compute_beside_copy_factor)

    @property
    def link_gbps(self) -> float:
        """Host-to-device bandwidth; HardwareError where neither the profile nor the caller gave one."""
        if self.h2d_gbps is None:
            raise HardwareError(f"hardware {self.name} has no link bandwidth of its own; give --h2d-gbps (h2d_gbps=)")
        return self.h2d_gbps

    def with_h2d_gbps(self, h2d_gbps: float | None) -> HardwareProfile:
        """The same machine at another host-to-device bandwidth, thereby a projection; None leaves it as it is."""
        if h2d_gbps is None:
            return self
        value = check_gbps(h2d_gbps)
        sources = {**self.sources, "h2d_gbps": "given by the caller"}
        engine = self.engine
        if engine is not None and self.h2d_gbps is not None:  # its fetches were timed at the profile's own bandwidth
            engine = engine.with_fetch_scaled(self.h2d_gbps / value)
        return dataclasses.replace(self, h2d_gbps=value, status="projected", sources=sources, engine=engine)

    def with_link(self, link: str | Path | LinkDescription | None) -> HardwareProfile:
        """The same device on another link, thereby a projection; None or "own" leaves it as it is.

        ``duplex_factor`` is at most the device's ``beside_compute_factor``, which `rates` asks for. With engine terms,
        megabytes are scaled by the bandwidths' ratio and launches shifted by the difference of the fixed parts.
        """
        if link is None or link == OWN_LINK:
            return self
        given = load_link(link)
        profile = self.with_h2d_gbps(given.h2d_gbps)
        engine = profile.engine
        if engine is not None:
            engine = engine.with_link(given.h2d_fixed_us - self.h2d_fixed_us, given.duplex_factor)
        sources = {**self.sources, **{name: f"link {given.name}: {given.sources[name]}" for name in LINK_NUMBERS}}
        memory = given.host_memory_bytes
        if memory is not None:
            sources["host_memory_bytes"] = f"link {given.name}: {given.sources['host_memory_bytes']}"
        return dataclasses.replace(
            profile,
            h2d_fixed_us=given.h2d_fixed_us,
            d2h_fixed_us=given.d2h_fixed_us,
            d2h_gbps=given.d2h_gbps,
            duplex_factor=min(given.duplex_factor, self.beside_compute_factor),
            host_memory_bytes=self.host_memory_bytes if memory is None else memory,
            sources=sources,
            engine=engine,
            link=given.name,
        )

    def model_errors(self) -> tuple[FitError, ...]:
        """Leave-one-out errors of the fits behind the numbers that a step is priced with, as far as the bundle tells.

        With engine terms these are the engine's own fits, elsewhere those of kernels and links.
        """
        engine = tuple(fit for fit in self.tables.fits if fit.name.startswith("engine_"))
        return engine if self.engine is not None and engine else self.tables.fits

    def extrapolating(self) -> HardwareProfile:
        """The same machine whose tables go on beyond their last point as a line, instead of refusing."""
        return self if self.engine is None else dataclasses.replace(self, engine=self.engine.extrapolating())


def check_gbps(value: Any) -> float:
    """A bandwidth that a user gave, as a float; HardwareError unless it is finite and above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise HardwareError(f"h2d_gbps={value!r} must be a finite number of GB/s above 0")
    if value < MIN_GBPS:
        raise HardwareError(f"h2d_gbps={value!r} is below the limit of {MIN_GBPS:g} GB/s, one byte a second")
    return float(value)


def known_profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(p.parent.name for p in _BUILT_IN.glob("*/meta.json"))


def load_hardware(hardware: str | Path | HardwareProfile) -> HardwareProfile:
    """A profile by its name, by the directory of its bundle, or itself.

    Raises HardwareError naming the file and the key at fault.

    >>> load_hardware("ideal").status
    'projected'
    """
    if isinstance(hardware, HardwareProfile):
        return hardware
    directory = profile_directory(hardware)
    return _parse(_read(directory / "meta.json"), _read(directory / "models.json"), directory)


def profile_directory(hardware: str | Path) -> Path:
    """The directory of a profile by its name, or of a bundle. HardwareError for neither."""
    directory = _BUILT_IN / str(hardware) if str(hardware) in known_profiles() else Path(hardware)
    if not directory.is_dir():
        raise HardwareError(
            f"unknown hardware {str(hardware)!r}; known: {', '.join(known_profiles())}, or the directory of a bundle"
        )
    return directory


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HardwareError(f"hardware profile: {path} is missing")
    return read_json_object(path, MAX_PROFILE_BYTES)


def _parse(meta: dict[str, Any], models: dict[str, Any], directory: Path) -> HardwareProfile:
    where = directory / "meta.json"
    if meta.get("schema_version") != PROFILE_SCHEMA_VERSION:
        raise HardwareError(
            f"{where}: schema_version={meta.get('schema_version')!r} must be {PROFILE_SCHEMA_VERSION}; "
            "profile the device again or upgrade nosa-sys"
        )
    _need_keys(meta, ("schema_version", "name", "device", "status", "notes"), where)
    for key in ("name", "device"):
        if not isinstance(meta[key], str):
            raise HardwareError(f"{where}: {key}={meta[key]!r} must be a text")
    if meta["status"] not in PROFILE_STATUSES:
        raise HardwareError(f"{where}: status={meta['status']!r} must be one of {', '.join(PROFILE_STATUSES)}")
    where = directory / "models.json"
    numbers = tuple(f.name for f in dataclasses.fields(HardwareProfile) if f.name not in _NOT_NUMBERS)
    for key, (value, source) in _DEFAULTS.items():
        models.setdefault(key, {"value": value, "source": source})
    _need_keys(models, numbers, where)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in numbers:
        entry = models[key]
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise HardwareError(f'{where}: {key} must be {{"value": number, "source": "text"}}')
        values[key], sources[key] = _number(key, entry["value"], where), entry["source"]
    profile = HardwareProfile(
        meta["name"],
        meta["device"],
        meta["status"],
        **values,
        sources=sources,
        engine=read_engine_terms(directory),
        tables=read_bundle_tables(directory),
    )
    try:
        _ = profile.sharing
    except HardwareError as error:
        raise HardwareError(f"{where}: {error}") from None
    return profile


def _need_keys(data: dict[str, Any], keys: tuple[str, ...], where: Path) -> None:
    for key in data:
        if key not in keys:
            raise HardwareError(f"{where}: unknown key {key!r}; known: {', '.join(keys)}")
    for key in keys:
        if key not in data:
            raise HardwareError(f"{where}: key {key!r} is missing")


def _number(key: str, value: Any, where: Path) -> float | None:
    if value is None and key in _MAY_BE_NULL:
        return None if key == "h2d_gbps" else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HardwareError(f"{where}: {key}={value!r} must be a finite number")
    if value > MAX_NUMBER:
        unlimited = "; null means no limit" if key in _MAY_BE_NULL and key != "h2d_gbps" else ""
        raise HardwareError(f"{where}: {key}={value!r} is above the limit of {MAX_NUMBER:g}{unlimited}")
    if key.endswith(("_gbps", "_tflops")) and 0 < value < MIN_GBPS:
        raise HardwareError(f"{where}: {key}={value!r} is below the limit of {MIN_GBPS:g}")
    if value < 0 or (value == 0 and key in _POSITIVE):
        raise HardwareError(f"{where}: {key}={value!r} must be {'above 0' if key in _POSITIVE else '>= 0'}")
    if key == "gemm_overlap" and value > 1:
        raise HardwareError(
            f"{where}: gemm_overlap={value!r} must be <= 1: the share of the shorter bound that is hidden"
        )
    return float(value)
