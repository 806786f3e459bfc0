"""Replay a trace under other budgets, block sizes, slot counts and eviction policies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nosa_sys.errors import CapacityError, TraceError
from nosa_sys.methods import Method, get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.policies import get_policy
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.reselect import CapturedBetas, Describer, n_blocks_of, n_windows_of, reselect
from nosa_sys.traces.reuse import BlockUses, block_uses, gamma_of
from nosa_sys.traces.rows import SelectionRows, take_lists
from nosa_sys.traces.schema import TraceMeta
from nosa_sys.traces.selection import pool_windows_np
from nosa_sys.traces.slot_cache import SlotCache

UNCHANGED_QUERIES = (
    "queries, keys and betas are those of the capture: what another selection would have changed in later hidden "
    "states is left out"
)

OTHER_BIAS = (
    "attention of {captured} {has} beta and that of {replayed} {lacks}, so all later hidden states are others: capture "
    "{replayed} itself for figures to rely on (docs/replay.md)"
)


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found. ``misses``, ``selections`` and ``gamma`` share one row order: step, sequence, layer, head.

    ``loaded`` marks the entries of ``selections.block_ids`` that came from the host, bool ``[entry]``.
    """

    misses: MissTable
    selections: SelectionRows
    loaded: np.ndarray
    sparse: SparseConfig
    method: str
    slots: int
    policy: str
    reselected: bool
    assumptions: list[str] = field(default_factory=list)

    @property
    def gamma(self) -> np.ndarray:
        """gamma of each row, NaN on cold rows."""
        return self.selections.gamma

    def summary(self) -> dict[str, Any]:
        """Totals and means; means leave cold rows out and are None where nothing is left."""
        warm = ~self.misses.cold
        selected, missed = self.misses.n_selected[warm], self.misses.n_misses[warm]
        gamma = self.gamma[warm]
        total = int(selected.sum(dtype=np.int64))
        known = np.isfinite(gamma)
        kept = gamma[known] * selected[known]
        return {
            "method": self.method,
            "sparse": self.sparse.to_dict(),
            "slots": self.slots,
            "policy": self.policy,
            "reselected": self.reselected,
            "n_rows": len(self.misses),
            "n_warm_rows": int(warm.sum()),
            "n_misses": int(self.misses.n_misses.sum(dtype=np.int64)),
            "n_misses_warm": int(missed.sum(dtype=np.int64)),
            "misses_per_row_mean": float(missed.mean()) if len(missed) else None,
            "misses_per_row_max": int(missed.max()) if len(missed) else None,
            "h2d_bytes": self.misses.h2d_bytes_total,
            "hit_rate": 1.0 - float(missed.sum()) / total if total else None,
            "gamma_macro_mean": float(gamma[known].mean()) if known.any() else None,
            "gamma_block_weighted_mean": float(kept.sum() / selected[known].sum()) if known.any() else None,
            "assumptions": list(self.assumptions),
        }


def replay(
    trace: Trace,
    *,
    sparse: SparseConfig | None = None,
    method: str | None = None,
    slots: int | None = None,
    policy: str | None = None,
) -> ReplayResult:
    """Misses of the trace's decode steps under another configuration; everything left out is as captured.

    Another ``sparse`` or ``method`` selects again from the captured scores and betas; slots and policy alone work
    on the recorded selections. ``slots`` defaults to the captured ratio slots / k; ``policy`` to the captured one,
    or lru when the captured one is exact and slots > k. ``policy`` belady is the optimum for the same selections.

    Raises TraceError when the trace lacks scores or betas or breaks its own rules, CapacityError when slots < k,
    ConfigError for unknown names.
    """
    meta = trace.meta
    chosen = get_method(method if method is not None else meta.method)
    cfg = sparse if sparse is not None else meta.sparse
    chosen.check(cfg)
    n_slots, policy_name = _resolve(meta, cfg, chosen, slots, policy)
    rows = trace.selections
    rows = rows.take(np.lexsort((rows.kv_head, rows.layer, rows.sequence, rows.step)))
    _refuse_broken(trace, rows)
    again = cfg != meta.sparse or chosen.name != meta.method
    assumptions = list(trace.notes)
    if again:
        assumptions.append(UNCHANGED_QUERIES)
        assumptions += _other_bias(meta, chosen)
        rows = reselect(trace, rows, cfg, chosen)
    if meta.schedule == "prefetch":
        assumptions.append("misses are on demand: the captured prefetch is not replayed")
    uses = block_uses(rows)
    betas = None
    if get_policy(policy_name).needs_betas and not chosen.dense:
        betas = final_pooled_betas(trace, uses, cfg)
    loaded = serve(uses, cfg, chosen, n_slots, policy_name, betas)
    n_misses = misses_of(uses, loaded)
    block_bytes = meta.model.kv_block_bytes(cfg.block_size, meta.host_kv_dtype)
    rows = dataclasses.replace(
        rows,
        n_misses=_unsorted(uses, n_misses).astype(np.int32),
        h2d_bytes=_unsorted(uses, n_misses) * block_bytes,
        gamma=_unsorted(uses, gamma_of(uses, uses.rows.cold)),
    )
    misses = MissTable(
        step=rows.step,
        position=rows.position,
        sequence=rows.sequence,
        layer=rows.layer,
        kv_head=rows.kv_head,
        n_selected=rows.n_selected.astype(np.int32),
        n_misses=rows.n_misses,
        cold=rows.cold,
        block_bytes=block_bytes,
        block_size=cfg.block_size,
        n_layers=meta.model.n_layers,
        n_kv_heads=meta.model.n_kv_heads,
        method=chosen.name,
        assumptions=assumptions,
    )
    misses.check_ranges(str(trace.directory))
    back = np.argsort(uses.streams.order, kind="stable")
    loaded = loaded[take_lists(uses.rows.offsets, back)[0]]
    return ReplayResult(misses, rows, loaded, cfg, chosen.name, n_slots, policy_name, again, assumptions)


def serve(
    uses: BlockUses,
    cfg: SparseConfig,
    method: Method,
    slots: int,
    policy: str,
    pooled_betas: np.ndarray | None = None,
    *,
    current_in_first_slot: bool = True,
) -> np.ndarray:
    """Which entries of ``uses`` are misses, bool ``[entry]``; method full has no host tier and misses nothing."""
    if method.dense:
        return np.zeros(len(uses.row), dtype=np.bool_)
    return SlotCache(
        uses,
        slots=slots,
        policy=get_policy(policy),
        block_size=cfg.block_size,
        pooled_betas=pooled_betas,
        current_in_first_slot=current_in_first_slot,
    ).run()


def misses_of(uses: BlockUses, loaded: np.ndarray) -> np.ndarray:
    """n_misses of each sorted row, int64 ``[row]``."""
    return np.bincount(uses.row[loaded], minlength=len(uses.rows)).astype(np.int64)


def final_pooled_betas(trace: Trace, uses: BlockUses, cfg: SparseConfig) -> np.ndarray:
    """Pooled beta of every distinct block of ``uses`` as of its stream's last row, float32 ``[block]``.

    A block that may be evicted has left the window, so its value is final and was the same at every step before.
    """
    rows, streams = uses.rows, uses.streams
    last = streams.first + streams.lengths - 1
    betas, describe = CapturedBetas(trace, rows, cfg), Describer(rows)
    out = np.empty(uses.n_blocks, dtype=np.float32)
    for stream, row in enumerate(last):
        position = rows.position[row : row + 1]
        n_windows = n_windows_of(position, cfg)
        windows = betas.windows(np.array([row]), n_windows, describe)
        pooled = pool_windows_np(windows, n_windows, int(n_blocks_of(position, cfg)[0]), cfg)[0]
        own = slice(uses.first_block[stream], uses.first_block[stream + 1])
        out[own] = pooled[uses.block_ids[own]]
    return out


def _other_bias(meta: TraceMeta, method: Method) -> list[str]:
    """A warning where beta enters the softmax of one of the two methods alone; a dense method selects all anyway."""
    captured = get_method(meta.method)
    if method.dense or meta.head == "none" or captured.uses_beta == method.uses_beta:
        return []
    has, lacks = ("adds", "does not") if captured.uses_beta else ("does not add", "does")
    return [OTHER_BIAS.format(captured=captured.name, replayed=method.name, has=has, lacks=lacks)]


def _resolve(
    meta: TraceMeta, cfg: SparseConfig, method: Method, slots: int | None, policy: str | None
) -> tuple[int, str]:
    """Slots and policy with their defaults; method full keeps every block, so it has neither."""
    if policy is not None:
        get_policy(policy)
    if method.dense:
        return 0, policy or "exact"
    if slots is None:
        ratio = meta.slots / meta.sparse.topk if meta.slots and not get_method(meta.method).dense else 1.0
        slots = max(cfg.topk, round(ratio * cfg.topk))
    if slots < cfg.topk:
        raise CapacityError(f"slots={slots} is fewer than topk={cfg.topk}; give at least {cfg.topk}")
    if policy is None:
        policy = meta.policy
        if policy == "exact" and slots > max(cfg.topk, meta.slots if cfg == meta.sparse else 0):
            policy = "lru"
    return slots, policy


def _refuse_broken(trace: Trace, rows: SelectionRows) -> None:
    """Ids must be ascending blocks of the row's context: the replay's memory and meaning rest on it."""
    where = f"trace {trace.directory}: selections of"
    current = rows.position.astype(np.int64) // trace.meta.sparse.block_size
    keys = np.stack([rows.step, rows.sequence, rows.layer, rows.kv_head], axis=1)
    twice = (keys[1:] == keys[:-1]).all(axis=1)
    if twice.any():
        raise TraceError(f"{where} {Describer(rows)(np.argmax(twice))}: the row is there twice")
    if len(rows) and rows.position.min() < 0:
        raise TraceError(f"{where} {Describer(rows)(np.argmin(rows.position))}: position is negative")
    row = rows.row_of_entry
    outside = (rows.block_ids < 0) | (rows.block_ids > current[row])
    descending = np.zeros(len(row), dtype=np.bool_)
    descending[1:] = (row[1:] == row[:-1]) & (rows.block_ids[1:] <= rows.block_ids[:-1])
    for bad, what in ((outside, "is no block of the row's context"), (descending, "does not ascend")):
        if bad.any():
            entry = np.argmax(bad)
            raise TraceError(f"{where} {Describer(rows)(row[entry])}: block id {rows.block_ids[entry]} {what}")


def _unsorted(uses: BlockUses, values: np.ndarray) -> np.ndarray:
    """Values of the sorted rows, back in the order of the rows that `block_uses` was given."""
    out = np.empty_like(values)
    out[uses.streams.order] = values
    return out
