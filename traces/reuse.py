"""When blocks of a stream are used again: links between uses, reuse distances, LRU stack distances, miss curves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nosa_sys.traces.rows import SelectionRows, Streams, find_streams

NEVER = np.int64(2**62)


@dataclass(frozen=True)
class BlockUses:
    """Every entry of the selections with the uses before and after it, rows sorted by stream and time.

    ``rows`` and ``streams`` describe the sorted rows (``streams.order`` leads back to the rows as given). Per entry
    of ``rows.block_ids``: ``row``, ``block`` (one number for each distinct block of each stream, ascending with the
    id), ``previous`` and ``following`` (times within the stream; -1 and NEVER where there is none).
    ``first_block`` ``[stream + 1]`` says which block numbers belong to a stream.
    """

    rows: SelectionRows
    streams: Streams
    row: np.ndarray
    block: np.ndarray
    previous: np.ndarray
    following: np.ndarray
    first_block: np.ndarray
    block_ids: np.ndarray

    @property
    def n_blocks(self) -> int:
        """Distinct (stream, block) pairs."""
        return len(self.block_ids)


def block_uses(rows: SelectionRows) -> BlockUses:
    """Link the uses of every block; block ids must be >= 0 and distinct within a row."""
    streams = find_streams(rows.sequence, rows.layer, rows.kv_head, rows.step)
    rows = rows.take(streams.order)
    row = rows.row_of_entry
    stream, time = streams.stream[row], streams.time[row]
    # entries are in time order within a stream, and stay so within a block
    order = _stable_order(rows.block_ids)
    order = order[_stable_order(stream[order])]
    n_entries = len(order)
    same = np.zeros(n_entries + 1, dtype=np.bool_)
    by_stream, by_id = stream[order], rows.block_ids[order]
    same[1:-1] = (by_stream[1:] == by_stream[:-1]) & (by_id[1:] == by_id[:-1])
    previous, following = np.full(n_entries, -1, dtype=np.int64), np.full(n_entries, NEVER)
    later, earlier = order[1:][same[1:-1]], order[:-1][same[1:-1]]
    previous[later], following[earlier] = time[earlier], time[later]
    block = np.empty(n_entries, dtype=np.int64)
    block[order] = np.cumsum(~same[:-1]) - 1
    begins = order[~same[:-1]]
    first_block = np.searchsorted(stream[begins], np.arange(streams.n_streams + 1))
    return BlockUses(rows, streams, row, block, previous, following, first_block, rows.block_ids[begins])


def _stable_order(values: np.ndarray) -> np.ndarray:
    """Stable argsort of whole numbers >= 0; what fits 16 bits is sorted by radix, several times as fast."""
    return np.argsort(values.astype(np.uint16) if values.max(initial=0) < 2**16 else values, kind="stable")


def overlap_with_previous(uses: BlockUses) -> np.ndarray:
    """|G & Gprev| of each sorted row, int64 ``[row]``; 0 for the first row of a stream."""
    time = uses.streams.time[uses.row]
    kept = (uses.previous >= 0) & (uses.previous == time - 1)
    return np.bincount(uses.row[kept], minlength=len(uses.rows)).astype(np.int64)


def gamma_of(uses: BlockUses, cold: np.ndarray) -> np.ndarray:
    """gamma = |G & Gprev| / |G| of each sorted row, NaN where ``cold`` (of the sorted rows) or where G is empty."""
    selected = uses.rows.n_selected
    defined = ~cold & (selected > 0) & (uses.streams.time > 0)
    gamma = np.full(len(selected), np.nan)
    gamma[defined] = overlap_with_previous(uses)[defined] / selected[defined]
    return gamma


def reuse_histogram(uses: BlockUses) -> dict[int, int]:
    """Steps between successive uses of a block -> how often; first uses are not counted."""
    again = uses.previous >= 0
    gaps = (uses.streams.time[uses.row] - uses.previous)[again]
    values, counts = np.unique(gaps, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class StackDistances:
    """LRU stack distances of every entry that was used before but not in the step just before.

    An entry hits in an LRU cache of S slots when S >= its distance. Blocks last used at one and the same step leave
    in slot order, which depends on S: ``low`` puts the block first among them, ``high`` last. ``n_adjacent`` entries
    were used in the step before and hit always; ``n_first`` entries are first uses of a block not born at that row.
    """

    low: np.ndarray
    high: np.ndarray
    n_adjacent: int
    n_first: int

    def miss_curve(self, slots: Sequence[int]) -> list[tuple[int, int, int]]:
        """(slots, fewest misses, most misses) of an LRU cache of each size, cold misses included."""
        low, high = np.sort(self.low), np.sort(self.high)
        return [
            (
                int(s),
                self.n_first + len(low) - int(np.searchsorted(low, s, side="right")),
                self.n_first + len(high) - int(np.searchsorted(high, s, side="right")),
            )
            for s in slots
        ]


def stack_distances(uses: BlockUses, block_size: int) -> StackDistances:
    """Distances for all entries; the block born (or current) at a row is no load, so its first use is no miss."""
    rows, streams = uses.rows, uses.streams
    time = streams.time[uses.row]
    current = rows.position.astype(np.int64)[uses.row] // block_size
    first = (uses.previous < 0) & (rows.block_ids != current)
    apart = (uses.previous >= 0) & (uses.previous < time - 1)
    last_use = np.full(uses.n_blocks, -1, dtype=np.int64)
    low = np.zeros(len(uses.row), dtype=np.int64)
    high = np.zeros(len(uses.row), dtype=np.int64)
    scale = np.int64(streams.lengths.max(initial=0)) + 2
    stream_of_block = np.repeat(np.arange(streams.n_streams), np.diff(uses.first_block))
    by_time = np.argsort(time, kind="stable")
    bounds = np.searchsorted(time[by_time], np.arange(int(time.max(initial=-1)) + 2))
    for begin, end in itertools.pairwise(bounds.tolist()):
        entries = by_time[begin:end]
        asked = entries[apart[entries]]
        if len(asked):
            # uses in (previous, now) = blocks of the stream whose last use is later than the block's own
            stream = streams.stream[uses.row[asked]]
            ordered = np.sort(stream_of_block * scale + last_use + 1)
            stop = uses.first_block[stream + 1]
            own = stream * scale + uses.previous[asked] + 1
            low[asked] = stop - np.searchsorted(ordered, own, side="right") + 1
            high[asked] = stop - np.searchsorted(ordered, own, side="left")
        last_use[uses.block[entries]] = time[entries]
    n_adjacent = int(((uses.previous >= 0) & (uses.previous == time - 1)).sum())
    return StackDistances(low[apart], high[apart], n_adjacent, int(first.sum()))
