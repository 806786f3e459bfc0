"""Runs of an engine for a bench: a situation, its steps one after another, and what they took and moved."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.injection import Injection
from nosa_sys.engine.recorder import Recorder
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.experiments.decode_bench_rates import Rates
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig

TIMED_STEPS = 256
WARMUP_STEPS = 16
# An engine that looks ahead cannot do so at its last steps; these come after the timed ones.
RUN_OUT_STEPS = 2


@dataclass(frozen=True)
class Segment:
    """A stretch of a run that makes one row: ``warmup`` steps, then ``steps`` timed ones."""

    name: str = ""
    warmup: int = WARMUP_STEPS
    steps: int = TIMED_STEPS


def n_table_steps(segments: Sequence[Segment]) -> int:
    """Steps that an injection needs for a run of these segments: the cold one, all of theirs, the run-out."""
    return 1 + sum(s.warmup + s.steps for s in segments) + RUN_OUT_STEPS


@dataclass(frozen=True)
class DecodeCell:
    """One situation of the engine. ``slots``, ``policy``, ``offload`` and ``runner`` None: the engine's own choice.

    Either ``injection`` gives the sets (KV is random, nothing is prefilled), or ``prompts`` are prefilled and the model
    selects. ``extra`` are further Engine options (n_prefetch).
    """

    sparse: SparseConfig
    method: str = "nosa"
    schedule: str = "fused_kv"
    slots: int | None = None
    policy: str | None = None
    offload: bool | None = None
    runner: str | None = None
    injection: Injection | None = None
    prompts: tuple[tuple[int, ...], ...] = ()
    contexts: tuple[int, ...] = ()
    seed: int = 0
    key_means_dtype: str = "float32"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def row_contexts(self) -> list[int]:
        """Prompt tokens of each row; ``contexts`` alone serve dense attention, which nothing is injected into."""
        if self.injection is not None:
            return self.injection.contexts
        return [len(prompt) for prompt in self.prompts] or list(self.contexts)

    @property
    def kept_slots(self) -> int:
        return self.slots or self.sparse.topk

    @property
    def offloads(self) -> bool:
        return not get_method(self.method).dense and self.offload is not False


@dataclass
class StepLog:
    """What the steps of one run took and moved, one entry a step, the cold one first. ``cold_ms``: that step alone,
    prefill left out."""

    end_s: list[float] = field(default_factory=list)
    n_misses: list[int] = field(default_factory=list)
    prefetch_loads: list[int] = field(default_factory=list)
    wasted_loads: list[int] = field(default_factory=list)
    n_filled: list[int] = field(default_factory=list)
    phase_us: list[dict[str, float]] = field(default_factory=list)
    cold_ms: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    gpu_peak_bytes: int | None = None

    def step_ms(self, first: int, n: int) -> NDArray[np.float64]:
        """Milliseconds of ``n`` steps from ``first`` on, each from the end of the one before (first >= 1)."""
        return np.diff(np.array(self.end_s[first - 1 : first + n])) * 1e3

    def phase_ms(self, first: int, n: int) -> dict[str, float]:
        """Mean time of each phase over these steps, layers together; empty where it was not timed."""
        steps = [p for p in self.phase_us[first : first + n] if p]
        return {name: float(np.mean([p[name] for p in steps])) / 1e3 for name in (steps[0] if steps else ())}


class Workbench:
    """One model, its machine's rates and one arena, used by many cells in turn. ``arena`` may be None."""

    def __init__(self, model: LlamaModel, rates: Rates, arena: Any = None) -> None:
        self.model, self.rates, self.arena = model, rates, arena
        self.on_gpu = model.device.type == "cuda"

    def run(self, cell: DecodeCell, n_steps: int, *, recorder: Recorder | None = None, **options: Any) -> StepLog:
        """A cold step, ``n_steps`` more and the run-out in a fresh engine, whose memory is given back afterwards.

        ``options`` go to the Engine (skip_fetch, fetch_only, timed).
        """
        if self.arena is not None:
            self.arena.reset()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        engine: Engine | None = Engine(
            self.model,
            cell.sparse,
            method=cell.method,
            schedule=cell.schedule,
            slots=cell.slots if cell.offloads else None,
            policy=cell.policy,
            offload=cell.offload,
            runner=cell.runner,
            max_batch=len(cell.row_contexts),
            arena=self.arena,
            injection=cell.injection,
            recorder=recorder,
            key_means_dtype=cell.key_means_dtype,
            **cell.extra,
            **options,
        )
        assert engine is not None
        try:
            return self._steps(engine, cell, n_steps)
        finally:
            engine = None
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _steps(self, engine: Engine, cell: DecodeCell, n_steps: int) -> StepLog:
        log = StepLog()
        n_all = 1 + n_steps + RUN_OUT_STEPS
        if cell.prompts:
            for prompt in cell.prompts:
                engine.add(prompt, n_all)
        else:
            engine.fill_synthetic(cell.row_contexts, seed=cell.seed, max_new_tokens=n_all)
        for step in range(n_all):
            if engine.step() == []:
                raise CapacityError(f"the engine had no row to decode at step {step} of {n_all}")
            log.end_s.append(time.perf_counter())  # the step's tokens are here, so the device has ended it
            plan = engine.last_plan
            assert plan is not None
            if plan.batch.size != len(cell.row_contexts):
                raise CapacityError(
                    f"{plan.batch.size} of {len(cell.row_contexts)} sequences fit at once; lower the batch"
                )
            log.n_misses.append(int(plan.n_misses.sum(dtype=np.int64)))
            log.n_filled.append(plan.batch.n_written_back)
            log.prefetch_loads.append(0 if plan.prefetch_loads is None else int(plan.prefetch_loads.sum()))
            log.wasted_loads.append(0 if plan.wasted_loads is None else int(plan.wasted_loads.sum()))
            log.phase_us.append({k.removesuffix("_us"): float(v.sum()) for k, v in (plan.phase_us or {}).items()})
        log.summary = engine.summary()
        cold_ms = log.summary["cold_step_ms"]
        log.cold_ms = cold_ms if isinstance(cold_ms, float) else None
        if self.on_gpu:
            log.gpu_peak_bytes = torch.cuda.max_memory_allocated(self.model.device)
        return log


def distinct_prompts(tokens: Sequence[int], batch: int, context: int) -> tuple[tuple[int, ...], ...]:
    """``batch`` windows of ``context`` tokens, their starts spread evenly over ``tokens``; all distinct places.

    ConfigError where the text is too short for that.
    """
    spare = len(tokens) - context
    if spare < batch - 1 or spare < 0:
        raise ConfigError(
            f"{batch} distinct prompts of {context} tokens need at least {context + batch - 1} tokens of text and "
            f"there are {len(tokens)}; give more --prompt-file, a smaller --batch or a smaller --context"
        )
    starts = [row * spare // max(1, batch - 1) for row in range(batch)]
    return tuple(tuple(tokens[start : start + context]) for start in starts)
