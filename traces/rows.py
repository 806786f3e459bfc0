"""SelectionRows: the `selections` table as numpy columns, and the streams that its rows form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class SelectionRows:
    """Rows of one (step, sequence, layer, KV head) each; all columns ``[row]`` but the flat lists.

    ``block_ids`` and ``origins`` are flat: row i owns ``[offsets[i], offsets[i + 1])`` of both.
    ``gamma`` is NaN where the table has null.
    """

    step: np.ndarray
    position: np.ndarray
    sequence: np.ndarray
    layer: np.ndarray
    kv_head: np.ndarray
    n_misses: np.ndarray
    h2d_bytes: np.ndarray
    gamma: np.ndarray
    cold: np.ndarray
    block_ids: np.ndarray
    origins: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def n_selected(self) -> np.ndarray:
        """|G| of each row, int64 [row]."""
        return np.diff(self.offsets)

    @property
    def row_of_entry(self) -> np.ndarray:
        """Row index of every entry of the flat lists, int64 [entry]."""
        return np.repeat(np.arange(len(self)), self.n_selected)

    def take(self, order: np.ndarray) -> SelectionRows:
        """The rows ``order`` (indices or a mask), lists included."""
        order = np.flatnonzero(order) if order.dtype == np.bool_ else order
        entries, offsets = take_lists(self.offsets, order)
        columns = {name: getattr(self, name)[order] for name in _ROW_COLUMNS}
        return SelectionRows(
            **columns, block_ids=self.block_ids[entries], origins=self.origins[entries], offsets=offsets
        )


_ROW_COLUMNS = ("step", "position", "sequence", "layer", "kv_head", "n_misses", "h2d_bytes", "gamma", "cold")


def take_lists(offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(entry indices, new offsets) of the lists ``order`` out of a flat list column with ``offsets``."""
    lengths = np.diff(offsets)[order]
    new_offsets = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    entries = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][order] - new_offsets[:-1], lengths)
    return entries, new_offsets


def column(table: pa.Table, name: str) -> np.ndarray:
    """A flat column as numpy; null becomes NaN in a float column."""
    return table.column(name).combine_chunks().to_numpy(zero_copy_only=False)


def list_column(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(flat values, int64 offsets ``[row + 1]``) of a list column."""
    array = table.column(name).combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], type=array.type)
    offsets = array.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0] if len(offsets) else np.zeros(1, dtype=np.int64)
    return array.flatten().to_numpy(zero_copy_only=False), offsets


def selection_rows(table: pa.Table) -> SelectionRows:
    """Numpy view of a `selections` table whose two list columns are equally long in every row."""
    block_ids, offsets = list_column(table, "block_ids")
    origins, _ = list_column(table, "origins")
    return SelectionRows(
        **{name: column(table, name) for name in _ROW_COLUMNS},
        block_ids=block_ids,
        origins=origins,
        offsets=offsets,
    )


@dataclass(frozen=True)
class Streams:
    """Rows sorted into streams: one stream is one (sequence, layer, KV head), its rows in step order.

    ``order`` ``[row]`` sorts the rows by (sequence, layer, kv_head, step); ``stream`` and ``time`` ``[row]`` (of the
    sorted rows) number the streams and the rows within each; ``first`` ``[stream]`` is where each stream begins.
    """

    order: np.ndarray
    stream: np.ndarray
    time: np.ndarray
    first: np.ndarray

    @property
    def n_streams(self) -> int:
        return len(self.first)

    @property
    def lengths(self) -> np.ndarray:
        """Rows of each stream, int64 [stream]."""
        return np.diff(np.append(self.first, len(self.order)))


def find_streams(sequence: np.ndarray, layer: np.ndarray, kv_head: np.ndarray, step: np.ndarray) -> Streams:
    """Group rows into streams; columns ``[row]`` in any order, stable where keys repeat."""
    order = np.lexsort((step, kv_head, layer, sequence))
    n_rows = len(order)
    if not n_rows:
        empty = np.zeros(0, dtype=np.int64)
        return Streams(order, empty, empty, empty)
    begins = np.zeros(n_rows, dtype=np.bool_)
    begins[0] = True
    for key in (sequence, layer, kv_head):
        sorted_key = key[order]
        begins[1:] |= sorted_key[1:] != sorted_key[:-1]
    first = np.flatnonzero(begins)
    stream = np.cumsum(begins) - 1
    return Streams(order, stream, np.arange(n_rows) - first[stream], first)
