"""Random step plans of sequences that join and leave, for tests of the recorder: no engine, no selection rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.plan import StepPlan, make_batch
from nosa_sys.engine.recorder import Recorder
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import SequenceInfo, TraceMeta
from tests.engine.helpers import SMALL, TINY

META = TraceMeta(model=TINY, sparse=SMALL, slots=SMALL.topk, kv_dtype="float64", host_kv_dtype="float64")


@dataclass
class Traffic:
    """``joins`` and ``leaves``: sequence ids at each step; ``plans``: what the recorder is given."""

    joins: list[list[tuple[int, int]]] = field(default_factory=list)  # id, prompt tokens
    leaves: list[list[int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)


def random_traffic(
    seed: int, n_steps: int, *, method: str = "nosa", scores: bool = False, cfg: SparseConfig = SMALL
) -> Traffic:
    rng = np.random.default_rng(seed)
    n_layers, n_heads = TINY.n_layers, TINY.n_kv_heads
    traffic, running, next_id = Traffic(), {}, 0  # id -> position
    for step in range(n_steps):
        joins = []
        for _ in range(int(rng.integers(1, 3)) if not running or rng.random() < 0.3 else 0):
            running[next_id] = int(rng.integers(0, 300))
            joins.append((next_id, running[next_id] + 1))
            next_id += 1
        ids = rng.permutation(list(running)).tolist()
        cold = [sequence in dict(joins) for sequence in ids]
        positions = [running[sequence] for sequence in ids]
        batch = make_batch(step, ids, list(range(len(ids))), positions, cold, cfg, get_method(method), offload=True)
        traffic.joins.append(joins)
        traffic.plans.append(_random_plan(rng, batch, n_layers, n_heads, method, scores, cfg))
        running = {sequence: position + 1 for sequence, position in running.items()}
        gone = [sequence for sequence in running if rng.random() < 0.1]
        traffic.leaves.append(gone)
        for sequence in gone:
            del running[sequence]
    return traffic


def _random_plan(rng, batch, n_layers, n_heads, method, scores, cfg) -> StepPlan:
    width = batch.max_blocks if method == "full" else cfg.topk
    shape = (n_layers, batch.size, n_heads)
    counts = np.minimum(batch.blocks, width).astype(np.int32)
    block_ids = np.full((*shape, width), -1, dtype=np.int32)
    origins = np.full((*shape, width), -1, dtype=np.int8)
    for layer, row, head in np.ndindex(shape):
        k = counts[row]
        block_ids[layer, row, head, :k] = np.sort(rng.choice(batch.blocks[row], k, replace=False))
        origins[layer, row, head, :k] = rng.integers(0, 5, k)
    done = len(batch.windows_done)
    return StepPlan(
        batch=batch,
        n_misses=rng.integers(0, 4, shape).astype(np.int32),
        time_us=float(rng.random()),
        block_ids=block_ids,
        origins=origins,
        counts=counts,
        window_scores=rng.random((*shape, max(batch.max_windows, 0)), dtype=np.float32) if scores else None,
        new_beta_means=rng.random((n_layers, done, n_heads), dtype=np.float32) if scores and done else None,
        phase_us={name: rng.random(n_layers) for name in PHASES} if rng.random() < 0.5 else None,
        prefetch_loads=rng.integers(0, 9, n_layers) if rng.random() < 0.5 else None,
        wasted_loads=rng.integers(0, 9, n_layers) if rng.random() < 0.5 else None,
    )


def play(traffic: Traffic, recorder: Recorder, *, dense: bool = False) -> Iterator[StepPlan]:
    """Call the recorder as an engine would; each plan is yielded when its calls have been made."""
    recorder.start(META, dense)
    for joins, plan, gone in zip(traffic.joins, traffic.plans, traffic.leaves, strict=True):
        for sequence, n_tokens in joins:
            recorder.on_start_sequence(SequenceInfo(sequence, n_tokens), None, None)
        recorder.on_step(plan)
        for sequence in gone:
            recorder.on_leave(sequence)
        yield plan
