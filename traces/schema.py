"""Trace schema 1, frozen: table columns, origins, and the meta.json record (docs/trace-format.md).

A trace is a directory: ``meta.json`` plus one folder of ``part-NNNNN.parquet`` files for each table.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from nosa_sys.errors import NosaError, TraceError
from nosa_sys.methods import HEADS, METHODS
from nosa_sys.model_shape import DTYPE_BYTES, ModelShape
from nosa_sys.sparse_config import SparseConfig

SCHEMA_VERSION = 1
META_FILE = "meta.json"
TIMELINE_FILE = "timeline.json.gz"
MAX_META_BYTES = 64 * 2**20

ORIGIN_SINK, ORIGIN_WINDOW, ORIGIN_QUERY, ORIGIN_AGNOSTIC, ORIGIN_DENSE = range(5)
ORIGIN_NAMES = ("sink", "window", "query-aware", "query-agnostic", "dense")

# What stands in a trace's status, alone or before ": LABEL" (as in "injected: 2 misses a head").
STATUSES = ("measured", "validated", "projected", "injected")
POLICIES = ("exact", "lru", "beta", "belady")
# auto: an engine that tried several while it ran and went on with the fastest.
SCHEDULES = ("serial", "fused_kv", "split_merge", "two_batch", "prefetch", "auto")

_I8, _I16, _I32, _I64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
_F32, _F64 = pa.float32(), pa.float64()


def _table(*columns: tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(c[0], c[1], nullable=bool(c[2]) if len(c) > 2 else False) for c in columns])


_ROW = (("step", _I32), ("sequence", _I32), ("layer", _I16), ("kv_head", _I16))
SCHEMAS: dict[str, pa.Schema] = {
    "selections": _table(
        ("step", _I32),
        ("position", _I32),
        ("sequence", _I32),
        ("layer", _I16),
        ("kv_head", _I16),
        ("block_ids", pa.list_(_I32)),
        ("origins", pa.list_(_I8)),
        ("n_misses", _I32),
        ("h2d_bytes", _I64),
        ("gamma", _F64, True),
        ("cold", pa.bool_()),
    ),
    "steps": _table(
        ("step", _I32),
        ("layer", _I16),
        ("n_sequences", _I32),
        ("n_misses", _I64),
        ("h2d_bytes", _I64),
        ("d2h_bytes", _I64),
        ("prefetch_bytes", _I64),
        ("wasted_prefetch_bytes", _I64),
        ("time_us", _F64, True),
        ("select_us", _F64, True),
        ("h2d_us", _F64, True),
        ("attention_us", _F64, True),
        ("other_us", _F64, True),
    ),
    "scores": _table(*_ROW, ("window_scores", pa.list_(_F32))),
    "betas": _table(("sequence", _I32), ("layer", _I16), ("kv_head", _I16), ("window", _I32), ("beta_mean", _F32)),
    "prefill": _table(
        ("sequence", _I32),
        ("layer", _I16),
        ("n_tokens", _I32),
        ("h2d_bytes", _I64),
        ("d2h_bytes", _I64),
        ("time_us", _F64, True),
    ),
}
REQUIRED_TABLES = ("selections", "steps")
WHOLE_STEP_LAYER = -1


@dataclass(frozen=True)
class SequenceInfo:
    """One sequence of a trace: its id is never reused within the trace."""

    id: int
    prompt_tokens: int
    prompt_sha256: str = ""
    new_tokens: int = 0


@dataclass(frozen=True)
class TraceMeta:
    """meta.json. ``slots`` counts every resident block of one head; for method full it is the longest N."""

    model: ModelShape
    sparse: SparseConfig
    method: str = "nosa"
    head: str = "ed_dma"
    schedule: str = "serial"
    slots: int = 0
    policy: str = "exact"
    kv_dtype: str = "float32"
    host_kv_dtype: str = "float32"
    key_means_dtype: str = "float32"
    sequences: tuple[SequenceInfo, ...] = ()
    device: str = ""
    driver: str = ""
    pcie: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    forced_tokens: dict[str, Any] = field(default_factory=dict)
    git_revision: str = ""
    seed: int = 0
    status: str = "measured"
    n_steps: int = 0
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    @property
    def injected(self) -> bool:
        """Whether the selections were given to the run: no method chose them, so no guarantee holds for them."""
        return status_kind(self.status) == "injected"

    @property
    def block_bytes(self) -> int:
        """Bytes one missed block moves: 2 * block * D * e_host."""
        return self.model.kv_block_bytes(self.sparse.block_size, self.host_kv_dtype)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["model"], data["sparse"] = self.model.to_dict(), self.sparse.to_dict()
        data["sequences"] = [dataclasses.asdict(s) for s in self.sequences]
        return data

    @classmethod
    def from_dict(cls, data: Any, source: str = META_FILE) -> TraceMeta:
        """Build from parsed JSON; every fault is a TraceError that names the key."""
        if not isinstance(data, dict):
            raise TraceError(f"{source}: must hold a JSON object")
        version = data.get("schema_version")
        if isinstance(version, bool) or not isinstance(version, int):
            raise TraceError(f"{source}: schema_version={version!r} must be a whole number")
        if version > SCHEMA_VERSION:
            raise TraceError(
                f"{source}: schema_version={version} is newer than this program reads ({SCHEMA_VERSION}); "
                "upgrade nosa-sys"
            )
        if version < SCHEMA_VERSION:
            raise TraceError(
                f"{source}: schema_version={version} is older than {SCHEMA_VERSION}; capture the trace again"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        for key in ("model", "sparse", "method", "slots", "policy", "host_kv_dtype", "sequences"):
            if key not in values:
                raise TraceError(f"{source}: key {key!r} is missing")
        for key, kind in (
            ("model", dict),
            ("sparse", dict),
            ("sequences", list),
            ("versions", dict),
            ("forced_tokens", dict),
        ):
            if key in values and not isinstance(values[key], kind):
                raise TraceError(f"{source}: {key} must be a JSON {'object' if kind is dict else 'list'}")
        try:
            values["model"] = ModelShape.from_dict(values["model"])
            values["sparse"] = SparseConfig.from_dict(values["sparse"])
            values["sequences"] = tuple(SequenceInfo(**s) for s in values["sequences"])
            meta = cls(**values)
        except (NosaError, TypeError) as error:
            raise TraceError(f"{source}: {error}") from None
        meta._check(source)
        return meta

    def _check(self, source: str) -> None:
        for name, value, allowed in (
            ("method", self.method, tuple(METHODS)),
            ("head", self.head, HEADS),
            ("schedule", self.schedule, SCHEDULES),
            ("policy", self.policy, POLICIES),
            ("kv_dtype", self.kv_dtype, tuple(DTYPE_BYTES)),
            ("host_kv_dtype", self.host_kv_dtype, tuple(DTYPE_BYTES)),
            ("key_means_dtype", self.key_means_dtype, tuple(DTYPE_BYTES)),
        ):
            if value not in allowed:
                raise TraceError(f"{source}: {name}={value!r} must be one of {', '.join(allowed)}")
        if not isinstance(self.status, str) or status_kind(self.status) not in STATUSES:
            raise TraceError(
                f"{source}: status={self.status!r} must be one of {', '.join(STATUSES)}, alone or before ': LABEL'"
            )
        if not isinstance(self.complete, bool):
            raise TraceError(f"{source}: complete={self.complete!r} must be true or false")
        for name, count in (("slots", self.slots), ("n_steps", self.n_steps), ("seed", self.seed)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise TraceError(f"{source}: {name}={count!r} must be a whole number >= 0")
        seen: set[int] = set()
        for sequence in self.sequences:
            for name in ("id", "prompt_tokens", "new_tokens"):
                value = getattr(sequence, name)
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise TraceError(f"{source}: sequences: {name}={value!r} must be a whole number >= 0")
            if sequence.id in seen:
                raise TraceError(f"{source}: sequence id {sequence.id} appears twice")
            seen.add(sequence.id)

    def save(self, directory: Path) -> None:
        """Write meta.json whole or not at all."""
        write_text_whole(directory / META_FILE, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, directory: Path) -> TraceMeta:
        path = Path(directory) / META_FILE
        if not path.is_file():
            raise TraceError(f"{directory} is no trace: {META_FILE} is missing")
        if path.stat().st_size > MAX_META_BYTES:
            raise TraceError(f"{path} has {path.stat().st_size} bytes, more than the limit of {MAX_META_BYTES}")
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} is not valid JSON: {error}") from None
        return cls.from_dict(data, str(path))


def status_kind(status: str) -> str:
    """What stands before ": LABEL"."""
    return status.partition(":")[0]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def write_text_whole(path: Path, text: str) -> None:
    """Write a text file through a temporary neighbour, so that a reader sees the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)


def finite(value: float | None) -> float | None:
    """None for anything that JSON cannot carry."""
    return value if value is not None and math.isfinite(value) else None
