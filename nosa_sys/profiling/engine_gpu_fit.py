"""Fit the terms of the CUDA engine's step to calibration runs.

Compute is one linear fit over phases and whole steps without copies (engine_gpu_design). Fetches in line are fitted to
what whole steps take beyond those, the path beside compute to copies alone, and what these two do to one another to
whole steps of the schedules that overlap them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.engine_gpu_design import ATTENTION_PLACES, COLUMNS, observations, values
from nosa_sys.profiling.engine_gpu_run import GpuRun
from nosa_sys.profiling.engine_gpu_setting import at_steps
from nosa_sys.profiling.fits import LinearFit, fit_linear
from nosa_sys.simulator.engine_cost import MB
from nosa_sys.simulator.engine_terms import EngineTerms, MatrixTimes
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.workload import Workload
from nosa_sys.traces.miss_table import LayerStepMisses

_OVERLAPPING = ("split_merge", "two_batch")
_FIT_STEPS = 6  # of each run, evenly spaced: enough to price the two factors
_FIT_CALLS = 220
_MOST_FIXED_US = 50.0
# Fetch launches of a layer under the schedules that wait for them.
_IN_LINE = {"serial": 2, "fused_kv": 1}
FETCH_ALONE = ("fetch_alone_fixed_us", "fetch_alone_layer_us", "fetch_alone_us_per_mb")
_BESIDE = ("beside_compute_factor", "compute_beside_copy_factor", "fetch_beside_fixed_us", "fork_us")
_LEAST_US = 0.1  # what is left after taking one time off another may be noise
SHARING = ("duplex_factor", "beside_compute_factor", "compute_beside_copy_factor")
MIN_SETTINGS = 6
Rows = list[dict[str, Any]]


def workload_of(run: GpuRun, shape: ModelShape, loads: LayerStepMisses, first_half: LayerStepMisses) -> Workload:
    """Given steps of a run as the simulator takes them."""
    setting, block_bytes = run.setting, shape.kv_block_bytes(run.setting.block_size)
    batch = int(loads.n_sequences[0])
    return Workload(
        loads=loads,
        shape=shape,
        sparse=setting.sparse,
        method=setting.method,
        slots=0 if setting.dense else setting.slots,
        policy=setting.policy,
        host_block_bytes=block_bytes,
        device_block_bytes=block_bytes,
        batch=batch,
        context_tokens=int(loads.context_tokens[-1]) // batch,
        own_situation=True,
        first_half=first_half,
    )


def engine_rows(runs: Sequence[GpuRun]) -> Rows:
    """A row a calibration run: its setting and what it measured."""
    rows = []
    for run in runs:
        row = {**run.setting.key(), "mark_us": run.mark_us}
        row |= {f"layer_{name}_us": us for name, us in run.phase_us.items()}
        if run.fetch_us_mb is not None:
            row |= dict(zip(("fetch_beside_us", "fetch_beside_mb"), run.fetch_us_mb, strict=True))
        for name in run.window_us:
            row |= {f"step_{name}_us": run.step_us(name), f"noise_{name}": run.noise(name)}
            row[f"compute_{name}_us"] = run.compute_us[name]
        rows.append(row | run.clocks)
    return rows


def calibrate(
    runs: Sequence[GpuRun],
    shapes: Mapping[str, ModelShape],
    matrices: Sequence[MatrixTimes],
    base: HardwareProfile,
) -> tuple[EngineTerms, dict[str, LinearFit], Rows]:
    """Terms, their fits with leave-one-out errors, and the rows behind them, from runs that did not fail.

    HardwareError where these are too few.
    """
    runs = [run for run in runs if run.failed is None]
    if len(runs) < MIN_SETTINGS:
        raise HardwareError(
            f"calibration needs at least {MIN_SETTINGS} settings that were measured whole, got {len(runs)}; give it "
            "more time (--max-minutes) or memory"
        )
    seen = observations(runs, shapes, matrices)
    times, sizes = np.array([o.us for o in seen]), values(seen).reshape(-1, len(COLUMNS))
    fits = {"compute": fit_linear(COLUMNS, sizes, times, through_zero=True)}
    terms = dict(zip(COLUMNS, fits["compute"].per_unit_us, strict=True))
    sources = dict.fromkeys(COLUMNS, "fit compute: phases and steps without copies of all schedules, engine_steps")
    fits["fetch_alone"], fits["fetch_beside"] = _fetch_in_line(runs, shapes), _fetch_beside(runs)
    found = dict(zip(FETCH_ALONE, fits["fetch_alone"].per_unit_us, strict=True))
    found["fetch_beside_fixed_us"] = fits["fetch_beside"].fixed_us
    found["fetch_beside_us_per_mb"] = fits["fetch_beside"].per_unit_us[0]
    found["fork_us"] = 0.0
    terms |= found
    sources |= dict.fromkeys(FETCH_ALONE, "fit fetch_alone: serial and fused_kv steps less the same without copies")
    sources |= dict.fromkeys(("fetch_beside_fixed_us", "fetch_beside_us_per_mb"), "fit fetch_beside: copies alone")
    for name in SHARING:
        terms[name], sources[name] = getattr(base, name), f"of profile {base.name}: {base.sources.get(name, '')}"
    sources["attention_places"] = "two CTAs on each of 132 SMs, as the launcher assumes"
    made = EngineTerms(**terms, attention_places=float(ATTENTION_PLACES), matrices=tuple(matrices), sources=sources)
    return _with_sharing(made, runs, shapes, base), fits, engine_rows(runs)


def _fetch_in_line(runs: Sequence[GpuRun], shapes: Mapping[str, ModelShape]) -> LinearFit:
    """Launches, layers that miss something and megabytes of fetches that compute waits for, from what whole steps take
    beyond those without copies; errors count relative to the step."""
    sizes, times, weights, groups = [], [], [], []
    for index, run in enumerate(runs):
        for name, launches in _IN_LINE.items():
            if run.setting.dense or name not in run.window_us:
                continue
            shape, (loads, _) = shapes[run.setting.model_shape], run.warm(name)
            mb = float(loads.misses.mean()) * shape.kv_block_bytes(run.setting.block_size) / MB
            us = max(_LEAST_US, (run.step_us(name) - run.compute_us[name]) / shape.n_layers)
            sizes.append((launches, float((loads.misses > 0).mean()), mb))
            times.append(us)
            weights.append(us * shape.n_layers / run.step_us(name))
            groups.append(index)
    return fit_linear(
        FETCH_ALONE, np.array(sizes).reshape(-1, 3), np.array(times), through_zero=True, weights=np.array(weights),
        groups=np.array(groups),
    )  # fmt: skip


def _fetch_beside(runs: Sequence[GpuRun]) -> LinearFit:
    """The path beside compute, copies alone."""
    pairs = np.array([run.fetch_us_mb for run in runs if run.fetch_us_mb is not None]).reshape(-1, 2)
    return fit_linear(("mb",), pairs[:, 1:], np.maximum(pairs[:, 0], _LEAST_US))


def _with_sharing(
    terms: EngineTerms, runs: Sequence[GpuRun], shapes: Mapping[str, ModelShape], base: HardwareProfile
) -> EngineTerms:
    """Both factors of copies beside compute, the fixed part of a fetch there (which waits for another stream), and what
    parting and meeting cost compute, as whole steps of the overlapping schedules fit best."""
    from scipy.optimize import minimize

    jobs: dict[tuple[str, int], list[tuple[Workload, float]]] = {}
    for run in runs:
        shape = shapes[run.setting.model_shape]
        for name in _OVERLAPPING:
            if name not in run.window_us:
                continue
            loads, first = run.warm(name)
            some = np.unique(np.linspace(0, len(loads) - 1, _FIT_STEPS).astype(int))
            work = workload_of(run, shape, at_steps(loads, some), at_steps(first, some))
            jobs.setdefault((name, shape.n_layers), []).append((work, run.step_us(name)))
    low = np.array([terms.duplex_factor, 0.5, 0.0, 0.0])
    high = np.array([1.0, 1.0, _MOST_FIXED_US, _MOST_FIXED_US])

    def with_values(values: np.ndarray) -> EngineTerms:
        found = map(float, np.clip(values, low, high))
        changes: dict[str, Any] = dict(zip(_BESIDE, found, strict=True))
        return dataclasses.replace(terms, **changes)

    def error(values: np.ndarray) -> float:
        profile = dataclasses.replace(base, engine=with_values(values))
        errors = []
        for (name, _), pairs in jobs.items():
            found = price([(work, profile) for work, _ in pairs], get_schedule(name))
            errors += [p.step_time_p50_us / us - 1.0 for p, (_, us) in zip(found, pairs, strict=True)]
        outside = np.abs(values - np.clip(values, low, high)).sum()
        return float(np.abs(errors).mean() + outside)

    if not jobs:
        return terms
    start = np.clip([getattr(terms, name) for name in _BESIDE], low, high)
    steps = np.array([0.99 - start[0], 0.85 - start[1], 4.0, 4.0])
    simplex = np.array([start, *(start + np.diag(steps))])
    options = {"maxfev": _FIT_CALLS, "initial_simplex": simplex}
    best = minimize(error, start, method="Nelder-Mead", options=options)
    text = f"best for whole steps of {' and '.join(_OVERLAPPING)}: mean error {float(best.fun):.2%} in calibration"
    return dataclasses.replace(with_values(best.x), sources=terms.sources | dict.fromkeys(_BESIDE, text))
