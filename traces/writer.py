"""TraceWriter: streams rows of a run into parquet parts, each renamed into place when it is whole."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.errors import TraceError
from nosa_sys.traces.schema import META_FILE, REQUIRED_TABLES, SCHEMAS, TIMELINE_FILE, TraceMeta
from nosa_sys.work_thread import WorkThread

# Parts are flushed together in this order: a step counts as whole only when its `steps` row is on disk, so that
# row goes last and everything else about the step is already there.
_FLUSH_ORDER = ("prefill", "betas", "scores", "selections", "steps")
# Nearly all of a trace is these lists. Split into byte planes they take half the processor time that a dictionary
# takes, and a quarter more disk.
_SPLIT_COLUMNS = {"selections": ("block_ids", "origins")}
_ZSTD_LEVEL = 1
# Where size counts and time does not: a twelfth less disk for half a minute a trace, on top of a better order of rows.
SMALLEST_LEVEL = 19
_SPLIT_SMALLEST = _SPLIT_COLUMNS | {"scores": ("window_scores",), "betas": ("beta_mean",)}
_SMALLEST_PAGE_BYTES = 16 * 2**20
_VALUES_AT_ONCE = 65536  # an eighth less processor time than arrow's 1024
_MAX_PENDING_FLUSHES = 2


@dataclass(frozen=True, eq=False)
class FlatLists:
    """A list column in one piece: row i holds ``values[offsets[i] : offsets[i + 1]]``.

    ``values`` is one-dimensional; ``offsets`` int [rows + 1] ascends from 0 to len(values).
    """

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_padded(cls, padded: np.ndarray, counts: np.ndarray) -> FlatLists:
        """The first ``counts[i]`` values of every row i of ``padded`` [rows, width]."""
        n_rows, width = padded.shape
        offsets = np.zeros(n_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        if offsets[-1] == padded.size:  # nothing is padding
            return cls(padded.reshape(-1), offsets)
        return cls(padded[np.arange(width) < np.asarray(counts)[:, None]], offsets)


def part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


Column = Sequence[Any] | np.ndarray | FlatLists


class TraceWriter:
    """Writes one trace directory; meta.json says ``complete: false`` until `close`.

    As a context manager it closes the trace on success; after an exception the rows so far are kept on disk and
    the trace stays incomplete, for `Trace.recover`.

    Args:
        directory: created when missing. A trace that is there already is refused unless ``overwrite``.
        meta: the record to write; ``complete`` is ignored.
        rows_per_part: every table is flushed when one of them has buffered this many rows.
        smallest: spend time on small files; for traces that are rewritten to be kept.
        background: a thread of its own writes what is flushed, two flushes behind at most; its error is raised by the
            next flush. `close` and `abandon` try again what it could not write.
    """

    def __init__(
        self,
        directory: str | Path,
        meta: TraceMeta,
        *,
        rows_per_part: int = 65536,
        overwrite: bool = False,
        smallest: bool = False,
        background: bool = False,
    ) -> None:
        if rows_per_part < 1:
            raise TraceError(f"rows_per_part={rows_per_part} must be >= 1")
        self.directory = Path(directory)
        self.meta = dataclasses.replace(meta, complete=False)
        self._rows_per_part, self._smallest = rows_per_part, smallest
        self._buffers: dict[str, list[pa.RecordBatch]] = {name: [] for name in _FLUSH_ORDER}
        self._buffered_rows = dict.fromkeys(_FLUSH_ORDER, 0)
        self._n_parts = dict.fromkeys(_FLUSH_ORDER, 0)
        self._steps_seen: set[int] = set()
        self._flushed: deque[dict[str, list[pa.RecordBatch]]] = deque()
        self._closed = False
        try:
            self._prepare(overwrite)
            self.meta.save(self.directory)
        except OSError as error:
            raise TraceError(f"cannot write a trace to {self.directory}: {error.strerror or error}") from None
        self._thread: WorkThread | None = None
        if background:
            for table, schema in SCHEMAS.items():  # what is set up on first use: not in the middle of a run
                _write_parquet(table, schema.empty_table(), io.BytesIO())
            self._thread = WorkThread("trace writer", _MAX_PENDING_FLUSHES)

    def _prepare(self, overwrite: bool) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        old = [self.directory / name for name in (META_FILE, TIMELINE_FILE, *SCHEMAS)]
        there = [path for path in old if path.exists()]
        if there and not overwrite:
            raise TraceError(f"{self.directory} already holds a trace ({there[0].name}); choose another or overwrite")
        for path in there:  # meta.json is the first of them: from here on no reader takes the rest for a trace
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def add(self, table: str, columns: Mapping[str, Column]) -> None:
        """Append rows: ``columns`` maps each column of the table to equally many values, which are copied.

        List columns take a sequence of 1-d arrays, or FlatLists. Nullable columns may be left out, or hold None or NaN
        (null). Raises TraceError naming the table and column for unknown or missing columns, unequal lengths, other
        types, and integers beyond the column's type.
        """
        if self._closed:
            raise TraceError(f"trace {self.directory} is closed; no rows can be added")
        if table not in SCHEMAS:
            raise TraceError(f"unknown trace table {table!r}; known: {', '.join(SCHEMAS)}")
        batch = _record_batch(table, columns)
        if not batch.num_rows:
            return
        if table == "steps":
            self._steps_seen.update(batch.column("step").unique().to_pylist())
        self._buffers[table].append(batch)
        self._buffered_rows[table] += batch.num_rows
        if self._buffered_rows[table] >= self._rows_per_part:
            self.flush()

    def add_table(self, table: str, rows: pa.Table) -> None:
        """Write a whole table of the schema as one part, after what was added before."""
        self.flush()
        if rows.num_rows:
            self._buffers[table] = rows.cast(SCHEMAS[table]).to_batches()
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one more part of each table that has rows."""
        full = {table: self._buffers[table] for table in _FLUSH_ORDER if self._buffers[table]}
        for table in full:
            self._buffers[table] = []
            self._buffered_rows[table] = 0
        if full:
            self._flushed.append(full)
        if self._thread is None:
            self._write_flushed()
        elif full:
            self._thread.submit(self._write_flushed)

    def _flush_all(self) -> None:
        """Write all that is left in this thread, once the other one has ended: what it failed at, too."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
        self.flush()

    def close(self, **meta_changes: Any) -> None:
        """Flush and mark the trace complete; keyword arguments replace meta fields (sequences, n_steps, ...).

        ``n_steps`` defaults to the number of distinct steps added to the ``steps`` table. Closing twice is harmless.
        """
        if self._closed:
            return
        self._flush_all()
        for table in REQUIRED_TABLES:
            if not self._n_parts[table]:
                self._write_part(table, SCHEMAS[table].empty_table())
        changes = {"n_steps": len(self._steps_seen), **meta_changes, "complete": True}
        try:
            self.meta = dataclasses.replace(self.meta, **changes)
        except TypeError as error:
            raise TraceError(f"trace meta: {error}") from None
        TraceMeta.from_dict(self.meta.to_dict())
        self.meta.save(self.directory)
        self._closed = True

    def abandon(self) -> None:
        """Write the rows so far and end here: the trace stays incomplete, for `Trace.recover`."""
        if not self._closed:
            self._closed = True
            self._flush_all()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _write_flushed(self) -> None:
        """Write what was flushed, oldest first. What an error or an interrupt leaves is written the next time."""
        while self._flushed:
            parts = self._flushed[0]
            for table in list(parts):
                self._write_part(table, pa.Table.from_batches(parts[table], schema=SCHEMAS[table]))
                del parts[table]
            self._flushed.popleft()

    def _write_part(self, table: str, rows: pa.Table) -> None:
        folder = self.directory / table
        path = folder / part_name(self._n_parts[table])
        partial = path.with_name(path.name + ".partial")
        try:
            folder.mkdir(exist_ok=True)
            _write_parquet(table, rows, partial, smallest=self._smallest)
            with open(partial, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise TraceError(f"cannot write {path}: {error.strerror or error}") from None
        self._n_parts[table] += 1


def _write_parquet(table: str, rows: pa.Table, where: Path | io.BytesIO, *, smallest: bool = False) -> None:
    split = (_SPLIT_SMALLEST if smallest else _SPLIT_COLUMNS).get(table, ())
    others = [name for name in rows.column_names if name not in split]
    lists = {field.name for field in rows.schema if pa.types.is_list(field.type)}
    paths = [f"{name}.list.element" if name in lists else name for name in split]
    pq.write_table(
        rows,
        where,
        compression="zstd",
        compression_level=SMALLEST_LEVEL if smallest else _ZSTD_LEVEL,
        use_dictionary=others,
        column_encoding=dict.fromkeys(paths, "BYTE_STREAM_SPLIT") or None,
        write_statistics=False if smallest else others,
        write_page_checksum=True,
        write_batch_size=_VALUES_AT_ONCE,
        data_page_size=_SMALLEST_PAGE_BYTES if smallest else None,
    )


def _record_batch(table: str, columns: Mapping[str, Column]) -> pa.RecordBatch:
    schema = SCHEMAS[table]
    unknown = [name for name in columns if name not in schema.names]
    if unknown:
        raise TraceError(f"trace table {table}: unknown column {unknown[0]!r}; known: {', '.join(schema.names)}")
    missing = [field.name for field in schema if field.name not in columns and not field.nullable]
    if missing:
        raise TraceError(f"trace table {table}: column {missing[0]!r} is missing")
    lengths = {name: len(values) for name, values in columns.items()}
    n_rows = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != n_rows:
            raise TraceError(f"trace table {table}: column {name!r} has {length} rows, the first one {n_rows}")
    arrays = [
        pa.nulls(n_rows, field.type)
        if field.name not in columns
        else _column(f"trace table {table}, column {field.name!r}", columns[field.name], field)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(where: str, values: Column, field: pa.Field) -> pa.Array:
    if pa.types.is_list(field.type):
        lists = values if isinstance(values, FlatLists) else _flatten(where, values, field.type.value_type)
        offsets = np.asarray(lists.offsets)
        steps = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(lists.values) or (steps < 0).any():
            raise TraceError(f"{where}: offsets must ascend from 0 to the {len(lists.values)} values there are")
        if offsets[-1] > np.iinfo(np.int32).max:
            raise TraceError(f"{where}: {offsets[-1]} list values in one call exceed 2^31 - 1; add fewer rows at once")
        inner = _flat(where, lists.values, field.type.value_type, False)
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), inner)
    if isinstance(values, FlatLists):
        raise TraceError(f"{where}: values must be single ones, not lists")
    return _flat(where, values, field.type, field.nullable)


def _flatten(where: str, values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> FlatLists:
    lists = [np.asarray(v) for v in values]
    if any(v.ndim != 1 for v in lists):
        raise TraceError(f"{where}: every entry must be a one-dimensional list")
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(v) for v in lists], out=offsets[1:])
    filled = [v for v in lists if len(v)]
    return FlatLists(np.concatenate(filled) if filled else np.zeros(0, dtype=kind.to_pandas_dtype()), offsets)


def _flat(where: str, values: Sequence[Any] | np.ndarray, kind: pa.DataType, nullable: bool) -> pa.Array:
    if pa.types.is_floating(kind):
        if not nullable and isinstance(values, np.ndarray) and values.dtype == kind.to_pandas_dtype():
            return pa.array(values.copy(), type=kind)
        try:
            numbers = np.asarray(values, dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError):
            raise TraceError(f"{where}: values must be numbers") from None
        mask = np.isnan(numbers) if nullable else None
        return pa.array(numbers.astype(kind.to_pandas_dtype()), type=kind, mask=mask)
    data = np.asarray(values)
    if not len(data):
        return pa.array([], type=kind)
    if pa.types.is_boolean(kind):
        if data.dtype != np.bool_:
            raise TraceError(f"{where}: values must be true or false, not {data.dtype}")
        return pa.array(data, type=kind)
    if data.dtype.kind not in "iu":
        raise TraceError(f"{where}: values must be whole numbers without nulls, not {data.dtype}")
    limits = np.iinfo(kind.to_pandas_dtype())
    if not np.can_cast(data.dtype, limits.dtype) and (data.min() < limits.min or data.max() > limits.max):
        raise TraceError(f"{where}: value {data.min()} or {data.max()} is outside [{limits.min}, {limits.max}]")
    return pa.array(data.astype(kind.to_pandas_dtype()), type=kind)
