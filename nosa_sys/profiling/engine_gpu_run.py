"""Measure the CUDA engine in one setting: step time of every schedule, compute and copies alone, phases, bytes.

One engine serves all of it: its memory is filled once, and the step runs under one captured graph after another.
Schedules take turns, window by window, so that each is measured several times at different moments.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.memory_plan import n_pages
from nosa_sys.engine.phases import ATTENTION, OTHER, SELECT
from nosa_sys.engine.pinned import PinnedArena
from nosa_sys.engine.record_level import RECORD_NOTHING
from nosa_sys.engine.runner import StepRunner
from nosa_sys.engine.setup import make_runner
from nosa_sys.errors import CapacityError
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.profiling.engine_gpu_setting import GpuSetting, at_steps, expected_loads
from nosa_sys.traces.miss_table import LayerStepMisses

SCHEDULES = ("serial", "fused_kv", "split_merge", "two_batch")
DENSE_SCHEDULES = ("fused_kv",)
# Under this schedule the copies beside compute are timed alone.
_BESIDE = "split_merge"
# Clock marks of a layer in a step without copies; each phase holds so many of them.
_MARKS_A_LAYER = 6
# Injected steps beyond those of a run: what is launched ahead at its end.
_TABLE_SPARE = 2
_MARKS_IN = {SELECT: 1, ATTENTION: 1, OTHER: 2}


@dataclass(frozen=True)
class Length:
    """``windows`` of ``steps`` timed steps a schedule, each after ``warmup`` others; ``part_steps``: for parts."""

    windows: int = 3
    steps: int = 24
    warmup: int = 2
    part_steps: int = 8

    def total(self, n_schedules: int) -> int:
        """Steps of a whole run, those that are launched ahead and thrown away included, and some spare."""
        windows = n_schedules * self.windows * (self.steps + self.warmup + 1)
        parts = (max(1, n_schedules - 1) + 3) * (self.part_steps + self.warmup + 1)
        return 4 + windows + parts

    def within(self, n_steps: int | None, n_schedules: int) -> Length:
        """The longest run of at most this many steps that recorded sets allow (None: as it is). CapacityError where
        even the shortest needs more."""
        for steps in range(self.steps, 0, -1):
            found = dataclasses.replace(self, steps=steps, part_steps=min(self.part_steps, steps))
            if n_steps is None or found.total(n_schedules) + _TABLE_SPARE <= n_steps:
                return found
        raise CapacityError(f"the trace has {n_steps} steps, too few for {self.windows} windows; capture more tokens")


@dataclass
class GpuRun:
    """What one setting showed; microseconds.

    ``window_us``: schedule -> median step of each window; ``steps``: their step numbers; ``compute_us``: steps without
    copies; ``phase_us``: select, attention and other of a layer without copies, clock marks taken off;
    ``fetch_us_mb``: microseconds and megabytes a layer of copies alone on the path beside compute; ``bytes``: planned
    and allocated; ``n_misses``: schedule -> blocks that the engine counted in those steps. ``loads`` and
    ``first_half`` are expected ones of every step. ``failed``: why there is no more.
    """

    setting: GpuSetting
    window_us: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    compute_us: dict[str, float] = field(default_factory=dict)
    phase_us: dict[str, float] = field(default_factory=dict)
    mark_us: float = 0.0
    fetch_us_mb: tuple[float, float] | None = None
    bytes: dict[str, int] = field(default_factory=dict)
    n_misses: dict[str, int] = field(default_factory=dict)
    loads: LayerStepMisses | None = None
    first_half: LayerStepMisses | None = None
    clocks: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    failed: str | None = None

    def warm(self, schedule: str) -> tuple[LayerStepMisses, LayerStepMisses]:
        """Loads of the timed steps of a schedule: all rows, and the first half."""
        if self.loads is None or self.first_half is None:
            raise CapacityError(f"setting {self.setting} was not measured: {self.failed}")
        steps = np.array(self.steps[schedule])
        return at_steps(self.loads, steps), at_steps(self.first_half, steps)

    def step_us(self, schedule: str) -> float:
        """Median of the windows' medians."""
        return float(np.median(self.window_us[schedule]))

    def noise(self, schedule: str) -> float:
        """Largest distance of a window from their median, relative."""
        middle = self.step_us(schedule)
        return max(abs(us / middle - 1.0) for us in self.window_us[schedule])


def measure_setting(
    model: LlamaModel,
    setting: GpuSetting,
    length: Length,
    *,
    arena: PinnedArena | None,
    runner: str,
    copies: bool = True,
) -> GpuRun:
    """Everything about one setting, copies alone only where asked for; a run that does not fit or breaks off keeps what
    it has, and the reason."""
    run, start = GpuRun(setting), time.perf_counter()
    if arena is not None:
        arena.reset()
    try:
        _Bench(model, setting, length, arena, runner, run, copies).measure()
    except Exception as error:  # the next setting may run all the same, and a machine is lent for minutes
        run.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    run.wall_s = time.perf_counter() - start
    return run


class _Bench:
    """One engine whose runner is exchanged between segments of steps."""

    def __init__(
        self,
        model: LlamaModel,
        setting: GpuSetting,
        length: Length,
        arena: PinnedArena | None,
        runner: str,
        run: GpuRun,
        copies: bool,
    ) -> None:
        self._copies = copies
        self._model, self._setting, self._run, self._runner = model, setting, run, runner
        self._schedules = supports(setting.method)
        self._length = length.within(setting.recorded_steps, len(self._schedules))
        self._n_steps = self._length.total(len(self._schedules))
        shape = model.shape
        self._injection = setting.inject(shape, self._n_steps + _TABLE_SPARE, model.device)
        run.loads, run.first_half = expected_loads(setting, shape, self._injection, self._n_steps)
        contexts = setting.contexts if self._injection is None else self._injection.contexts
        self._engine = Engine(
            model,
            setting.sparse,
            method=setting.method,
            schedule=self._schedules[0],
            slots=None if setting.dense else setting.slots,
            policy=setting.policy,
            runner=runner,
            max_batch=len(contexts),
            arena=arena,
            injection=self._injection,
        )
        self._contexts = contexts
        self._engine.fill_synthetic(contexts, seed=setting.seed, max_new_tokens=self._n_steps)

    def measure(self) -> None:
        run, length = self._run, self._length
        self._engine.step()
        plan = self._engine.last_plan
        if plan is None or plan.batch.size != len(self._contexts):
            raise CapacityError(f"{len(self._contexts)} sequences do not fit at once; lower the batch")
        self._capacity()
        runners = {name: self._made(name) for name in self._schedules[1:]}
        runners = {self._schedules[0]: self._engine._runner, **runners}  # the cold step has captured the first
        for _ in range(length.windows):
            for name, runner in runners.items():
                us, steps, misses = self._segment(runner, length.steps)
                run.window_us.setdefault(name, []).append(us)
                run.steps.setdefault(name, []).extend(steps)
                run.n_misses[name] = run.n_misses.get(name, 0) + misses
        runners.clear()
        for name in self._schedules:
            # serial and fused_kv differ in their fetches alone
            same = run.compute_us.get("serial") if name == "fused_kv" else None
            run.compute_us[name] = self._part(name, skip_fetch=True)[0] if same is None else same
        self._phases()
        if self._copies and not self._setting.dense:  # last: copies alone leave the current blocks unwritten
            copies_us, steps = self._part(_BESIDE, fetch_only=True)
            planning_us, _ = self._part(_BESIDE, fetch_only=True, skip_fetch=True)
            assert run.loads is not None
            blocks = float(run.loads.misses[np.array(steps)].mean())
            mb = blocks * self._model.shape.kv_block_bytes(self._setting.block_size) / 1e6
            run.fetch_us_mb = (max(0.0, copies_us - planning_us) / self._model.n_layers, mb)

    def _made(self, schedule: str, **options: bool) -> StepRunner:
        engine = self._engine
        switches = {"timed": False, "skip_fetch": False, "fetch_only": False} | options
        return make_runner(
            self._runner, self._model, engine.memory, engine.policy, schedule, record=RECORD_NOTHING,
            max_lanes=engine.max_batch, injection=self._injection, inspect=False, n_prefetch=None, **switches,
        )  # fmt: skip

    def _part(self, schedule: str, **options: bool) -> tuple[float, list[int]]:
        us, steps, _ = self._segment(self._made(schedule, **options), self._length.part_steps)
        return us, steps

    def _segment(self, runner: StepRunner, n: int) -> tuple[float, list[int], int]:
        """(median step, numbers of the timed steps, blocks missed in them)."""
        engine = self._engine
        engine._drain()  # steps that the last runner has launched ahead
        engine._runner = runner
        ends, steps, misses = [], [], 0
        self._plans: list[dict[str, Any]] = []
        for index in range(self._length.warmup + n):
            engine.step()
            ends.append(time.perf_counter())
            plan = engine.last_plan
            assert plan is not None
            if index >= self._length.warmup:
                steps.append(plan.batch.step)
                misses += int(plan.n_misses.sum(dtype=np.int64))
                self._plans.append(plan.phase_us or {})
        step_us = np.diff(ends[self._length.warmup - 1 :]) * 1e6
        return float(np.median(step_us)), steps, misses

    def _phases(self) -> None:
        run, n_layers = self._run, self._model.n_layers
        timed_us, _ = self._part("fused_kv", timed=True, skip_fetch=True)
        run.mark_us = max(0.0, timed_us - run.compute_us["fused_kv"]) / (_MARKS_A_LAYER * n_layers)
        for name, n_marks in _MARKS_IN.items():
            us = float(np.mean([plan[name].mean() for plan in self._plans]))
            run.phase_us[name.removesuffix("_us")] = max(0.0, us - n_marks * run.mark_us)

    def _capacity(self) -> None:
        setting, shape, engine = self._setting, self._model.shape, self._engine
        tokens = [context + self._n_steps - 1 for context in self._contexts]
        need = setting.required(shape, max(tokens) - setting.context)
        pages = sum(n_pages(setting.sparse, n, offload=not setting.dense) for n in tokens)
        whole = len(tokens) * n_pages(setting.sparse, max(tokens), offload=not setting.dense)
        pool = "device_pool_bytes" if setting.dense else "host_pool_bytes"
        need[pool] = need[pool] // whole * pages if whole else 0
        found = engine.memory.allocated_bytes()
        for where in ("device", "host"):
            names = [name for name in need if name.startswith(where)]
            self._run.bytes[f"planned_{where}"] = sum(need[name] for name in names)
            self._run.bytes[f"allocated_{where}"] = sum(found[name] for name in names)
        self._run.bytes["weights"] = shape.weight_bytes
        if self._model.device.type == "cuda":
            self._run.bytes["device_peak"] = torch.cuda.max_memory_allocated(self._model.device)


def supports(method: str) -> tuple[str, ...]:
    """Schedules that a method is measured under."""
    return DENSE_SCHEDULES if get_method(method).dense else SCHEDULES
