"""What an engine says of itself: its settings, the head of its trace, its summary, and the counts of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nosa_sys.engine.metrics import StepCount
from nosa_sys.engine.plan import StepPlan
from nosa_sys.errors import ConfigError
from nosa_sys.key_means import stored_key_means_dtype
from nosa_sys.traces.schema import TraceMeta

if TYPE_CHECKING:
    from nosa_sys.engine.engine import Engine


def settings(engine: Engine) -> dict[str, object]:
    """What a saved sequence must find unchanged where it is resumed."""
    return {
        "model": engine.model.shape,
        "head": engine.model.head,
        "sparse": engine.sparse,
        "method": engine.method.name,
        "key_means_dtype": _stored_key_means(engine),
        "keep_context": engine.memory.context.kept,
    }


def check_settings(engine: Engine, saved: Mapping[str, object]) -> None:
    """ConfigError where a saved sequence was made under other settings."""
    mine = settings(engine)
    for name, value in saved.items():
        if mine[name] != value:
            raise ConfigError(f"the saved sequence has {name}={value}, this engine {mine[name]}; use equal settings")


def trace_meta(engine: Engine) -> TraceMeta:
    """The head of the engine's trace, as far as an engine knows it."""
    dtype = engine.model.shape.dtype
    meta = TraceMeta(
        model=engine.model.shape,
        sparse=engine.sparse,
        method=engine.method.name,
        head=engine.model.head,
        schedule=engine.schedule,
        slots=engine.slots,
        policy=engine.policy.name,
        kv_dtype=dtype,
        host_kv_dtype=dtype,
        key_means_dtype=_stored_key_means(engine),
        device=engine.model.device.type,
    )
    if engine.injection is None:
        return meta
    return dataclasses.replace(meta, status=f"injected: {engine.injection.label}")


def summary(engine: Engine, figures: dict[str, Any]) -> dict[str, object]:
    """Settings, memory in bytes, and the run's ``figures``; ``notes`` say what a reader could otherwise miss."""
    memory, notes = engine.memory, []
    if figures["n_rows"] and not figures["sparse_step_share"] and not engine.method.dense:
        notes.append(
            f"no step was sparse: every context had at most k = {engine.sparse.topk} blocks "
            f"({engine.sparse.topk_tokens} tokens), so attention was dense"
        )
    longest, trained = engine.longest_tokens, engine.model.config.max_positions
    if longest > trained:
        notes.append(f"contexts reached {longest} tokens; the model was made for {trained}: expect poor text")
    if engine.injection is not None:
        notes.append(f"injected: {engine.injection.label}; the model's own selections were not used")
    if engine.has_synthetic:
        notes.append("synthetic contexts: K and V were drawn at random, nothing was prefilled; tokens mean nothing")
    return {
        "method": engine.method.name,
        "schedule": engine.schedule,
        "schedule_in_use": engine.schedule_in_use,
        "runner": engine.runner_name,
        "offload": engine.offload,
        "policy": engine.policy.name,
        "slots": memory.n_slots if engine.offload else engine.sparse.n_blocks(engine.longest_tokens),
        "topk_blocks": engine.sparse.topk,
        "topk_tokens": engine.sparse.topk_tokens,
        "block_bytes": memory.block_bytes,
        "key_means_dtype": _stored_key_means(engine),
        "device_slot_bytes": memory.device_kv_bytes,
        "device_context_bytes": memory.context.allocated_bytes,
        "host_pool_bytes": memory.host_pool_bytes,
        "host_pinned_bytes": memory.pool.pinned_bytes,
        **figures,
        "notes": notes,
    }


def _stored_key_means(engine: Engine) -> str:
    return stored_key_means_dtype(engine.memory.key_means_dtype, engine.model.shape.dtype)


def count_step(plan: StepPlan) -> StepCount:
    """A step's counts, summed over layers and KV heads."""
    rows, (n_layers, _, n_heads) = plan.batch, plan.n_misses.shape
    misses = plan.n_misses.sum(axis=(0, 2), dtype=np.int64)
    selected = np.minimum(rows.blocks, rows.dense_blocks) * (n_layers * n_heads)
    cold = np.array(rows.cold)
    return StepCount(
        n_rows=rows.size,
        n_cold_rows=int(cold.sum()),
        n_sparse_rows=sum(n > rows.dense_blocks for n in rows.blocks),
        n_selected=int(selected.sum()),
        n_misses=int(misses.sum()),
        cold_selected=int(selected[cold].sum()),
        cold_misses=int(misses[cold].sum()),
        n_filled_heads=rows.n_written_back * n_layers * n_heads,
    )
