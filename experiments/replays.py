"""One replay as a JSON-ready document; shared by the CLI, the demo and the report. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import TraceMeta


@dataclass(frozen=True)
class ReplayRequest:
    """Everything one replay depends on."""

    trace: Path
    sparse: SparseConfig
    method: str
    slots: int
    policy: str


def default_slots(meta: TraceMeta, sparse: SparseConfig) -> int:
    """The captured ratio slots / k at another k; k itself for a trace without a host tier."""
    ratio = meta.slots / meta.sparse.topk if meta.slots and meta.method != "full" else 1.0
    return max(sparse.topk, round(ratio * sparse.topk))


def default_policy(meta: TraceMeta, sparse: SparseConfig, slots: int) -> str:
    """The captured policy; LRU where that one is exact but slots are to spare, exact where none is."""
    if slots <= sparse.topk:
        return "exact"
    return "lru" if meta.policy == "exact" else meta.policy


def replay_document(request: ReplayRequest, trace: Trace | None = None) -> dict[str, Any]:
    """Replay and summarise. Means leave cold rows out; totals include them.

    Slots and policies do not change what is selected, so their counts keep the trace's status; another selection is
    projected, since it assumes that queries would not have changed.

    ``trace`` saves reading the directory again when many replays share it.
    """
    trace = trace if trace is not None else Trace.open(request.trace)
    result = replay(trace, sparse=request.sparse, method=request.method, slots=request.slots, policy=request.policy)
    misses = result.misses
    warm = ~misses.cold
    n_warm = int(warm.sum())
    selected = int(misses.n_selected[warm].sum())
    missed = int(misses.n_misses[warm].sum())
    n_steps = len(np.unique(misses.step[warm]))
    gamma = np.asarray(result.gamma, dtype=np.float64)
    known = warm & np.isfinite(gamma)
    layers = [
        float(misses.n_misses[warm & (misses.layer == layer)].mean()) if n_warm else None
        for layer in range(misses.n_layers)
    ]
    return {
        "kind": "replay",
        "status": "projected" if result.reselected else trace.meta.status,
        "trace": str(request.trace),
        "model": trace.meta.model.name,
        "sparse": request.sparse.to_dict(),
        "method": request.method,
        "slots": request.slots,
        "slots_over_k": request.slots / request.sparse.topk,
        "policy": request.policy,
        "block_bytes": misses.block_bytes,
        "n_rows": len(misses.step),
        "n_cold_rows": len(misses.step) - n_warm,
        "misses_per_head_step": missed / n_warm if n_warm else None,
        "miss_ratio": missed / selected if selected else None,
        "zero_miss_share": float((misses.n_misses[warm] == 0).mean()) if n_warm else None,
        "misses_per_head_step_by_layer": layers,
        "gamma_macro": float(gamma[known].mean()) if known.any() else None,
        "gamma_weighted": float(np.average(gamma[known], weights=misses.n_selected[known])) if known.any() else None,
        "guaranteed_gamma": request.sparse.guaranteed_gamma if request.method == "nosa" else None,
        "h2d_bytes_per_step": missed * misses.block_bytes / n_steps if n_steps else None,
        "h2d_bytes_total": misses.h2d_bytes_total,
        "assumptions": list(misses.assumptions),
    }
