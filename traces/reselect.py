"""Select again from captured scores and betas, under another budget, block size or method."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nosa_sys.errors import NumericsError, TraceError
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.rows import SelectionRows, column, find_streams, list_column
from nosa_sys.traces.selection import pool_windows_np, select_blocks_np

_CHUNK_CELLS = 2**22  # windows or blocks of one chunk of rows: bounds the memory of re-selection
_KEYS = ("step", "sequence", "layer", "kv_head")


def n_windows_of(position: np.ndarray, cfg: SparseConfig) -> np.ndarray:
    """Complete pooling windows visible to each position, int64 [row]."""
    return np.maximum(0, (position.astype(np.int64) + 1 - cfg.kernel_size) // cfg.kernel_stride + 1)


def n_blocks_of(position: np.ndarray, cfg: SparseConfig) -> np.ndarray:
    """N = floor(p / block) + 1 of each position, int64 [row]."""
    return position.astype(np.int64) // cfg.block_size + 1


class CapturedScores:
    """Stage-1 window scores of each selection row, out of the `scores` table.

    ``index`` ``[row]`` is the score row of each row asked about, -1 where there is none.
    """

    def __init__(self, trace: Trace, rows: SelectionRows) -> None:
        if not trace.has("scores"):
            raise TraceError(
                f"trace {trace.directory} carries no scores, which another budget needs; capture it with --scores"
            )
        table = trace.table("scores")
        self.values, self.offsets = list_column(table, "window_scores")
        theirs = np.stack([column(table, name).astype(np.int64) for name in _KEYS], axis=1)
        ours = np.stack([getattr(rows, name).astype(np.int64) for name in _KEYS], axis=1)
        self.index = match_keys(ours, theirs)

    @property
    def n_windows(self) -> np.ndarray:
        """Windows that the scores of each row cover, int64 ``[row]``; -1 for a row without scores."""
        lengths = np.append(np.diff(self.offsets), -1)
        return lengths[self.index]

    def windows(self, chosen: np.ndarray, n_windows: np.ndarray, describe: Describer) -> np.ndarray:
        """``[row, window]`` of the rows ``chosen``, zero padded; each list must be ``n_windows`` long."""
        score_row = self.index[chosen]
        if (score_row < 0).any():
            raise TraceError(f"scores of {describe(chosen[np.argmax(score_row < 0)])} are missing")
        begin, length = self.offsets[score_row], np.diff(self.offsets)[score_row]
        wrong = length != n_windows
        if wrong.any():
            at = np.argmax(wrong)
            raise TraceError(
                f"scores of {describe(chosen[at])} cover {length[at]} windows, its position has {n_windows[at]}"
            )
        out = np.zeros((len(chosen), int(n_windows.max(initial=0))), dtype=self.values.dtype)
        inside = np.arange(out.shape[1])[None, :] < length[:, None]
        row_index, window = np.nonzero(inside)
        out[inside] = self.values[begin[row_index] + window]
        return out


class Describer:
    """Names a row in errors: step, sequence, layer and KV head."""

    def __init__(self, rows: SelectionRows) -> None:
        self._rows = rows

    def __call__(self, row: int | np.intp) -> str:
        r = self._rows
        return f"step {r.step[row]}, sequence {r.sequence[row]}, layer {r.layer[row]}, KV head {r.kv_head[row]}"


class CapturedBetas:
    """Window means of beta out of the `betas` table: ``values`` ``[stream, window]``, NaN where missing."""

    def __init__(self, trace: Trace, rows: SelectionRows, cfg: SparseConfig) -> None:
        if not trace.has("betas"):
            raise TraceError(
                f"trace {trace.directory} carries no betas, which the query-agnostic fill needs; "
                "capture it with --scores"
            )
        streams = find_streams(rows.sequence, rows.layer, rows.kv_head, rows.step)
        self.stream = np.empty(len(rows), dtype=np.int64)
        self.stream[streams.order] = streams.stream
        heads = streams.order[streams.first]
        last = streams.order[streams.first + streams.lengths - 1]
        needed = n_windows_of(rows.position[last], cfg)
        table = trace.table("betas")
        names = _KEYS[1:]
        ours = np.stack([getattr(rows, name)[heads].astype(np.int64) for name in names], axis=1)
        theirs = np.stack([column(table, name).astype(np.int64) for name in names], axis=1)
        window, values = column(table, "window").astype(np.int64), column(table, "beta_mean")
        stream = match_keys(theirs, ours)
        # a position far beyond the table's windows is an error below, not an allocation here
        width = min(int(needed.max(initial=0)), int(window.max(initial=-1)) + 1)
        self.values = np.full((streams.n_streams, width), np.nan, dtype=np.float32)
        inside = (stream >= 0) & (window >= 0) & (window < width)
        self.values[stream[inside], window[inside]] = values[inside]

    @property
    def n_complete(self) -> np.ndarray:
        """Windows without a gap from the first on, of the stream of each row, int64 ``[row]``."""
        gaps = np.isnan(np.pad(self.values, ((0, 0), (0, 1)), constant_values=np.nan))
        return np.argmax(gaps, axis=1)[self.stream]

    def windows(self, chosen: np.ndarray, n_windows: np.ndarray, describe: Describer) -> np.ndarray:
        """``[row, window]`` of the rows ``chosen``; all of a row's ``n_windows`` must be there."""
        width = int(n_windows.max(initial=0))
        out = self.values[self.stream[chosen], :width]
        missing = np.isnan(out) & (np.arange(out.shape[1])[None, :] < n_windows[:, None])
        if out.shape[1] < width or missing.any():
            at = int(np.argmax((n_windows > out.shape[1]) | missing.any(axis=1)))
            window = int(np.argmax(np.append(missing[at], True)))
            raise TraceError(f"betas of {describe(chosen[at])} lack window {window} of {n_windows[at]}")
        return out


def match_keys(wanted: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Row of ``table`` ``[n, key]`` equal to each row of ``wanted`` ``[m, key]``, -1 for none; the first of equals."""
    both = np.concatenate([table, wanted])
    if not len(both):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort(both.T[::-1])  # stable: of equal keys the table's rows come first
    new = np.ones(len(both), dtype=np.bool_)
    new[1:] = (both[order][1:] != both[order][:-1]).any(axis=1)
    leader = order[np.maximum.accumulate(np.where(new, np.arange(len(both)), 0))]
    found = np.empty(len(both), dtype=np.int64)
    found[order] = np.where(leader < len(table), leader, -1)
    return found[len(table) :]


def reselect(trace: Trace, rows: SelectionRows, cfg: SparseConfig, method: Method) -> SelectionRows:
    """Selections of the same rows (same order) under ``cfg`` and ``method``; misses, bytes and gamma are zeroed.

    The pooling kernel and stride are those of the capture. Raises TraceError when the scores or betas that the
    method needs are missing, and when ``cfg`` asks for another kernel or stride.
    """
    captured = trace.meta.sparse
    for name in ("kernel_size", "kernel_stride"):
        if getattr(cfg, name) != getattr(captured, name):
            raise TraceError(
                f"{name}={getattr(cfg, name)} differs from the captured {getattr(captured, name)}: "
                "scores exist at the captured windows only"
            )
    n_blocks = n_blocks_of(rows.position, cfg)
    sparse_rows = np.zeros(0, dtype=np.int64) if method.dense else np.flatnonzero(n_blocks > cfg.topk)
    picks, fill = method.query_aware_picks(cfg, cfg.n_forced), method.fill(cfg, cfg.n_forced)
    scores = CapturedScores(trace, rows) if len(sparse_rows) and picks else None
    betas = CapturedBetas(trace, rows, cfg) if len(sparse_rows) and fill else None
    n_selected = n_blocks if method.dense else np.minimum(n_blocks, cfg.topk)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(n_selected, out=offsets[1:])
    block_ids = np.empty(offsets[-1], dtype=np.int32)
    origins = np.empty(offsets[-1], dtype=np.int8)
    describe = Describer(rows)
    for chunk in _chunks(n_blocks, cfg):
        n_windows = n_windows_of(rows.position[chunk], cfg)
        width = int(n_blocks[chunk].max())
        pooled: list[np.ndarray | None] = [None, None]
        sparse = n_blocks[chunk] > cfg.topk
        for slot, source in enumerate((scores, betas)):
            if source is not None and sparse.any():
                values = source.windows(chunk[sparse], n_windows[sparse], describe)
                pooled[slot] = np.full((len(chunk), width), -np.inf, dtype=values.dtype)
                pooled[slot][sparse] = pool_windows_np(values, n_windows[sparse], width, cfg)  # type: ignore[index]
        try:
            ids, kinds = select_blocks_np(pooled[0], pooled[1], n_blocks[chunk], cfg, method)
        except NumericsError as error:
            raise TraceError(f"trace {trace.directory}, rows from {describe(chunk[0])}: {error}") from None
        begin, end = offsets[chunk[0]], offsets[chunk[-1] + 1]
        block_ids[begin:end], origins[begin:end] = ids[ids >= 0], kinds[ids >= 0]
    return SelectionRows(
        step=rows.step,
        position=rows.position,
        sequence=rows.sequence,
        layer=rows.layer,
        kv_head=rows.kv_head,
        n_misses=np.zeros(len(rows), dtype=np.int32),
        h2d_bytes=np.zeros(len(rows), dtype=np.int64),
        gamma=np.full(len(rows), np.nan),
        cold=rows.cold,
        block_ids=block_ids,
        origins=origins,
        offsets=offsets,
    )


def _chunks(n_blocks: np.ndarray, cfg: SparseConfig) -> Iterator[np.ndarray]:
    """Consecutive rows whose windows fit the memory bound; at least one row each."""
    begin = 0
    while begin < len(n_blocks):
        widest = np.maximum.accumulate(n_blocks[begin : begin + _CHUNK_CELLS])
        cells = widest * cfg.windows_per_block * np.arange(1, len(widest) + 1)
        count = max(1, int(np.searchsorted(cells, _CHUNK_CELLS, side="right")))
        yield np.arange(begin, begin + count)
        begin += count
