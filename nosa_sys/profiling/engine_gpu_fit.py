"""Fit the terms of the CUDA engine's step to calibration runs.

Compute is one linear fit over phases and whole steps without copies (engine_gpu_design), fetches are fitted to copies
alone, and the two factors of copies beside compute to whole steps of the schedules that overlap them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.engine_gpu_design import COLUMNS, observations, values
from nosa_sys.profiling.engine_gpu_run import GpuRun
from nosa_sys.profiling.engine_gpu_setting import at_steps
from nosa_sys.profiling.fits import LinearFit, fit_linear
from nosa_sys.simulator.engine_terms import EngineTerms, MatrixTimes
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.workload import Workload
from nosa_sys.traces.miss_table import LayerStepMisses

_OVERLAPPING = ("split_merge", "two_batch")
_FIT_STEPS = 6  # of each run, evenly spaced: enough to price the two factors
_FIT_CALLS = 60
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
        for path, (us, mb) in run.fetch.items():
            row |= {f"fetch_{path}_us": us, f"fetch_{path}_mb": mb}
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
    times, weights = (np.array([getattr(o, name) for o in seen]) for name in ("us", "weight"))
    fits = {
        "compute": fit_linear(
            COLUMNS, values(seen).reshape(-1, len(COLUMNS)), times, through_zero=True, weights=weights
        )
    }
    terms = dict(zip(COLUMNS, fits["compute"].per_unit_us, strict=True))
    sources = dict.fromkeys(COLUMNS, "fit compute: phases and steps without copies of all schedules, engine_steps")
    for path in ("alone", "beside"):
        pairs = np.array([run.fetch[path] for run in runs if path in run.fetch]).reshape(-1, 2)
        fit = fit_linear(("mb",), pairs[:, 1:], np.maximum(pairs[:, 0], _LEAST_US))
        fits[f"fetch_{path}"] = fit
        found = {f"fetch_{path}_fixed_us": fit.fixed_us, f"fetch_{path}_us_per_mb": fit.per_unit_us[0]}
        terms, sources = terms | found, sources | dict.fromkeys(found, f"fit fetch_{path}: copies alone, engine_steps")
    for name in SHARING:
        terms[name], sources[name] = getattr(base, name), f"of profile {base.name}: {base.sources.get(name, '')}"
    made = EngineTerms(**terms, matrices=tuple(matrices), sources=sources)
    return _with_sharing(made, runs, shapes, base), fits, engine_rows(runs)


def _with_sharing(
    terms: EngineTerms, runs: Sequence[GpuRun], shapes: Mapping[str, ModelShape], base: HardwareProfile
) -> EngineTerms:
    """The two factors of copies beside compute that the overlapping schedules' steps fit best (median of each run)."""
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

    def with_factors(factors: np.ndarray) -> EngineTerms:
        beside = float(np.clip(factors[0], terms.duplex_factor, 1.0))
        return dataclasses.replace(
            terms, beside_compute_factor=beside, compute_beside_copy_factor=float(np.clip(factors[1], 0.5, 1.0))
        )

    def error(factors: np.ndarray) -> float:
        profile = dataclasses.replace(base, engine=with_factors(factors))
        errors = []
        for (name, _), pairs in jobs.items():
            found = price([(work, profile) for work, _ in pairs], get_schedule(name))
            errors += [p.step_time_p50_us / us - 1.0 for p, (_, us) in zip(found, pairs, strict=True)]
        outside = np.abs(factors - np.clip(factors, [terms.duplex_factor, 0.5], 1.0)).sum()
        return float(np.abs(errors).mean() + outside)

    if not jobs:
        return terms
    start = np.array([terms.beside_compute_factor, terms.compute_beside_copy_factor])
    simplex = np.array([start, [0.99, start[1]], [start[0], 0.85]])
    best = minimize(error, start, method="Nelder-Mead", options={"maxfev": _FIT_CALLS, "initial_simplex": simplex})
    names = ("beside_compute_factor", "compute_beside_copy_factor")
    text = f"best for whole steps of {' and '.join(_OVERLAPPING)}: mean error {float(best.fun):.2%} in calibration"
    return dataclasses.replace(with_factors(best.x), sources=terms.sources | dict.fromkeys(names, text))
