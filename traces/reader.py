"""Trace: opens a trace directory and hands out validated tables; anything broken is a TraceError naming the file."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.errors import TraceError
from nosa_sys.traces.rows import SelectionRows, list_column, selection_rows
from nosa_sys.traces.schema import ORIGIN_NAMES, REQUIRED_TABLES, SCHEMAS, TraceMeta

MAX_TABLE_BYTES = 3 * 2**30
_PART = re.compile(r"part-(\d{5,9})\.parquet")


class Trace:
    """A captured (or foreign) trace, read lazily: a table is loaded and validated on first use.

    ``notes`` says what `recover` had to leave out. Nothing here holds a file open.

    >>> import tempfile
    >>> from nosa_sys.model_shape import ModelShape
    >>> from nosa_sys.sparse_config import SparseConfig
    >>> from nosa_sys.traces.writer import TraceWriter
    >>> meta = TraceMeta(model=ModelShape.preset("smollm2-135m"), sparse=SparseConfig(), slots=64)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     TraceWriter(directory, meta).close()
    ...     Trace.open(directory).table("selections").num_rows
    0
    """

    def __init__(
        self,
        directory: str | Path,
        meta: TraceMeta,
        *,
        tables: dict[str, pa.Table] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.directory = Path(directory)
        self.meta = meta
        self.notes = notes
        self._tables: dict[str, pa.Table] = dict(tables or {})
        self._in_memory = tables is not None

    @classmethod
    def open(cls, directory: str | Path, allow_incomplete: bool = False) -> Trace:
        """Open a finished trace. An unfinished one is refused unless ``allow_incomplete`` (see `recover`)."""
        directory = Path(directory)
        meta = _load_meta(directory)
        if not meta.complete and not allow_incomplete:
            raise TraceError(
                f"trace {directory} is incomplete: its run was killed or is still writing; "
                "nosa trace recover (Trace.recover) keeps its whole steps"
            )
        trace = cls(directory, meta)
        for table in REQUIRED_TABLES:
            if not trace.has(table) and not allow_incomplete:
                raise TraceError(f"trace {directory}: table {table!r} is missing")
        return trace

    @classmethod
    def recover(cls, directory: str | Path) -> Trace:
        """Open the trace of a killed run: every step that is whole on disk, and ``notes`` about the rest."""
        from nosa_sys.traces.recover import recover_tables  # recover reads parts through this module

        directory = Path(directory)
        meta = _load_meta(directory)
        if meta.complete:
            return cls.open(directory)
        meta, tables, notes = recover_tables(directory, meta)
        return cls(directory, meta, tables=tables, notes=tuple(notes))

    def has(self, name: str) -> bool:
        """Whether the trace carries this table (optional ones: scores, betas, prefill)."""
        if name not in SCHEMAS:
            raise TraceError(f"unknown trace table {name!r}; known: {', '.join(SCHEMAS)}")
        return name in self._tables if self._in_memory else bool(part_paths(self.directory, name))

    def table(self, name: str) -> pa.Table:
        """The whole table with exactly the columns of the schema, no null where the schema has none."""
        if not self.has(name):
            raise TraceError(f"trace {self.directory}: table {name!r} is missing")
        if name not in self._tables:
            self._tables[name] = read_parts(name, part_paths(self.directory, name))
        return self._tables[name]

    @cached_property
    def selections(self) -> SelectionRows:
        """The selections table as numpy columns, rows as stored. TraceError: a layer, head or origin out of range."""
        table = self.table("selections")
        id_offsets, origin_offsets = list_column(table, "block_ids")[1], list_column(table, "origins")[1]
        unequal = np.flatnonzero(np.diff(id_offsets) != np.diff(origin_offsets))
        if len(unequal):
            raise TraceError(
                f"trace {self.directory}: selections row {unequal[0]} has another number of origins than block_ids"
            )
        rows = selection_rows(table)
        model = self.meta.model
        limits = (
            ("layer", rows.layer, model.n_layers),
            ("kv_head", rows.kv_head, model.n_kv_heads),
            ("origin", rows.origins, len(ORIGIN_NAMES)),
        )
        for name, values, limit in limits:
            bad = np.flatnonzero((values < 0) | (values >= limit))
            if len(bad):
                raise TraceError(f"trace {self.directory}: {name}={values[bad[0]]} is outside [0, {limit})")
        return rows


def _load_meta(directory: Path) -> TraceMeta:
    if not directory.is_dir():
        raise TraceError(f"{directory} is no trace: there is no such directory")
    try:
        return TraceMeta.load(directory)
    except OSError as error:
        raise TraceError(f"cannot read the trace in {directory}: {error.strerror or error}") from None


def part_paths(directory: Path, table: str, *, stop_at_gap: bool = False) -> list[Path]:
    """The parts of a table in order. A gap in the numbering is an error, or where the list ends if ``stop_at_gap``."""
    folder = directory / table
    if not folder.is_dir():
        return []
    numbered: dict[int, Path] = {}
    try:
        for path in folder.iterdir():
            match = _PART.fullmatch(path.name)
            if match and int(match[1]) in numbered:
                raise TraceError(f"{path}: part {int(match[1])} is there twice")
            if match:
                numbered[int(match[1])] = path
    except OSError as error:
        raise TraceError(f"cannot list {folder}: {error.strerror or error}") from None
    paths = []
    for expected, (index, path) in enumerate(sorted(numbered.items())):
        if index != expected:
            if stop_at_gap:
                break
            raise TraceError(f"{folder}: part {expected} is missing although part {index} is there")
        paths.append(path)
    return paths


def read_parts(table: str, paths: list[Path]) -> pa.Table:
    """Concatenate parts; refuses to load more than MAX_TABLE_BYTES, judged before anything is decoded."""
    total = 0
    tables = []
    for path in paths:
        part, n_bytes = read_part(table, path, MAX_TABLE_BYTES - total)
        total += n_bytes
        tables.append(part)
    return pa.concat_tables(tables).combine_chunks()


def read_part(table: str, path: Path, max_bytes: int = MAX_TABLE_BYTES) -> tuple[pa.Table, int]:
    """(rows, decoded bytes) of one part file, brought to the schema's exact types."""
    schema = SCHEMAS[table]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow, schema)
            n_bytes = _decoded_bytes(path, file, schema)
            if n_bytes > max_bytes:
                raise TraceError(
                    f"{path}: its rows decode to {n_bytes} bytes, over the {MAX_TABLE_BYTES} bytes allowed for one "
                    "table; split the trace"
                )
            raw = file.read(columns=schema.names)
        arrays = [_checked_column(path, raw.column(field.name), field) for field in schema]
        return pa.Table.from_arrays(arrays, schema=schema), n_bytes
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise TraceError(f"{path} is not a readable parquet part: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check_schema(path: Path, found: pa.Schema, wanted: pa.Schema) -> None:
    for field in wanted:
        places = found.get_all_field_indices(field.name)
        if len(places) != 1:
            raise TraceError(f"{path}: column {field.name!r} is {'missing' if not places else 'there twice'}")
        kind = found.field(places[0]).type
        same = kind == field.type
        if pa.types.is_list(field.type):  # the element's name and nullability are free
            same = pa.types.is_list(kind) and kind.value_type == field.type.value_type
        if not same:
            hint = ""
            if pa.types.is_integer(field.type) and pa.types.is_floating(kind):
                hint = "; whole numbers must not pass through a float column (a null does that)"
            raise TraceError(f"{path}: column {field.name!r} has type {kind}, schema 1 has {field.type}{hint}")


def _decoded_bytes(path: Path, file: pq.ParquetFile, schema: pa.Schema) -> int:
    """Bytes that the wanted columns take once decoded, from the value counts in the footer."""
    metadata = file.metadata
    widths = {}
    for field in schema:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        widths[field.name] = max(1, kind.bit_width // 8)
    total = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        if row_group.num_rows < 0:
            raise TraceError(f"{path}: row group {group} claims {row_group.num_rows} rows")
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            name = chunk.path_in_schema.split(".")[0]
            if name in widths:
                total += max(chunk.num_values, row_group.num_rows) * widths[name]
    return total


def _checked_column(path: Path, column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if column.null_count and not field.nullable:
        raise TraceError(f"{path}: column {field.name!r} holds {column.null_count} nulls, schema 1 allows none")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    array.validate(full=True)
    if pa.types.is_list(field.type):
        values = array.flatten()
        if values.null_count:
            raise TraceError(f"{path}: lists of column {field.name!r} hold {values.null_count} nulls")
        offsets = array.offsets.to_numpy()
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], type=pa.int32()), values)
    return array
