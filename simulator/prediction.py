"""Prediction: what a simulation says, with the rules it used and how far it can be trusted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nosa_sys.simulator.grid import outside_grid
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.schedules import Schedule
from nosa_sys.simulator.step_times import StepCosts, StepTimes
from nosa_sys.simulator.workload import Workload

# Parts of the step time, in the order in which ties of `limited_by` are settled.
_PARTS = {
    "h2d": "h2d_exposed_us",
    "attention": "attention_us",
    "gemm": "gemm_us",
    "select": "select_us",
    "host": "host_overhead_us",
    "d2h": "d2h_exposed_us",
}


@dataclass(frozen=True)
class Prediction:
    """One simulated situation. Times, rates and bytes a step are means over ``averaged_steps`` ("warm": all but the
    cold steps).

    step_time_us = select + h2d_exposed + attention + gemm + host_overhead + d2h_exposed; hidden transfer time runs
    beside these. ``tokens_per_s`` is the aggregate over the batch; both rates are None for a step that takes no time.
    ``h2d_bytes_total`` counts every step, ``h2d_bytes_total_warm`` leaves the cold ones out; both count misses alone.
    ``prefetch_bytes_total`` are blocks fetched on a guess, ``wasted_prefetch_bytes_total`` those that spared no miss.
    ``link_utilisation`` is h2d bytes, guessed ones included, / (h2d bandwidth x step time). ``limited_by`` is the
    largest part of the step time. ``conversion_us``: what of select_us and attention_us converts blocks between the
    formats of host and device, alone. ``batch_that_fits``: the largest batch that both memories hold, None without
    limits. ``extrapolated``: on which axes, and how far, this lies outside what the profile was measured at.
    ``model_errors``: leave-one-out errors of the fits that the profile's numbers come from.
    """

    step_time_us: float
    step_time_p50_us: float
    step_time_p90_us: float
    select_us: float
    h2d_exposed_us: float
    h2d_hidden_us: float
    attention_us: float
    gemm_us: float
    host_overhead_us: float
    d2h_exposed_us: float
    d2h_hidden_us: float
    tokens_per_s: float | None
    tokens_per_s_per_sequence: float | None
    misses_per_head_step: float
    h2d_bytes_per_step: float
    d2h_bytes_per_step: float
    h2d_bytes_total: int
    h2d_bytes_total_warm: int
    d2h_bytes_total: int
    prefetch_bytes_total: int
    wasted_prefetch_bytes_total: int
    link_utilisation: float
    limited_by: str
    status: str
    n_steps: int
    n_cold_steps: int
    averaged_steps: str
    cold_step_time_us: float | None
    cold_h2d_bytes: int
    memory: dict[str, int]
    limits: list[str]
    settings: dict[str, Any]
    batch_that_fits: int | None = None
    conversion_us: float = 0.0
    extrapolated: list[str] = field(default_factory=list)
    model_errors: list[dict[str, Any]] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON can carry."""
        return dataclasses.asdict(self)


def predict(
    workload: Workload,
    hardware: HardwareProfile,
    schedule: Schedule,
    costs: StepCosts,
    times: StepTimes,
    rules: list[str],
) -> Prediction:
    """Sum the steps of a workload up."""
    loads = workload.loads
    cold = np.asarray(loads.cold, dtype=np.bool_)
    averaged = ~cold if not cold.all() else cold
    rules = list(rules)
    if cold.all():
        rules.append("every step is cold: means are over cold steps")
    step_us = times.step_us[averaged]
    total_us = float(step_us.sum())
    h2d_step, d2h_step = costs.h2d_bytes.sum(axis=1), costs.d2h_bytes.sum(axis=1)
    guess = costs.speculation
    guessed_step = np.zeros(len(costs), dtype=np.int64) if guess is None else guess.n_bytes.sum(axis=1)
    covered = 0 if guess is None else int(guess.covered_bytes.sum())
    require(
        int(h2d_step.sum()) + covered == int(loads.misses.sum()) * workload.host_block_bytes,
        "bytes moved, or spared by a guess, differ from misses x block bytes",
    )
    n_sequences = loads.n_sequences[averaged].astype(np.int64)
    missed, moved = float(h2d_step[averaged].sum()), float((h2d_step + guessed_step)[averaged].sum())
    own = workload.own_situation and not schedule.assumed
    own = own and workload.recorded_schedule in (None, schedule.name)
    extrapolated = outside_grid(workload, hardware)
    means = {
        "select_us": times.select_us,
        "h2d_exposed_us": times.h2d_exposed_us,
        "h2d_hidden_us": times.h2d_hidden_us,
        "attention_us": times.attention_us,
        "gemm_us": times.gemm_us,
        "host_overhead_us": times.host_us,
        "d2h_exposed_us": times.d2h_exposed_us,
        "d2h_hidden_us": times.d2h_hidden_us,
    }
    parts = {name: float(values[averaged].mean()) for name, values in means.items()}
    largest = max(_PARTS, key=lambda name: parts[_PARTS[name]])
    head_steps = int(n_sequences.sum()) * workload.shape.n_layers * workload.shape.n_kv_heads
    p50, p90 = np.percentile(step_us, [50, 90])
    memory = workload.memory()
    return Prediction(
        step_time_us=float(step_us.mean()),
        step_time_p50_us=float(p50),
        step_time_p90_us=float(p90),
        tokens_per_s=float(n_sequences.sum()) / total_us * 1e6 if total_us > 0 else None,
        tokens_per_s_per_sequence=len(step_us) / total_us * 1e6 if total_us > 0 else None,
        misses_per_head_step=missed / workload.host_block_bytes / head_steps,
        h2d_bytes_per_step=float(h2d_step[averaged].mean()),
        d2h_bytes_per_step=float(d2h_step[averaged].mean()),
        h2d_bytes_total=int(h2d_step.sum()),
        h2d_bytes_total_warm=int(h2d_step[~cold].sum()),
        d2h_bytes_total=int(d2h_step.sum()),
        prefetch_bytes_total=int(guessed_step.sum()),
        wasted_prefetch_bytes_total=int(guessed_step.sum()) - covered,
        link_utilisation=moved / (hardware.link_gbps * 1e3 * total_us) if total_us > 0 else 0.0,
        limited_by=largest if parts[_PARTS[largest]] > 0 else "nothing",
        status="validated" if own and not extrapolated and hardware.status == "validated" else "projected",
        n_steps=len(loads),
        n_cold_steps=int(cold.sum()),
        averaged_steps="cold" if cold.all() else "warm",
        cold_step_time_us=float(times.step_us[cold].mean()) if cold.any() else None,
        cold_h2d_bytes=int(h2d_step[cold].sum()),
        memory=memory.to_dict(),
        limits=memory.limits(hardware),
        settings=workload.settings()
        | {"schedule": schedule.name, "hardware": hardware.name, "link": hardware.link, "h2d_gbps": hardware.link_gbps},
        batch_that_fits=memory.batch_that_fits(hardware),
        conversion_us=_conversion_us(costs, averaged),
        extrapolated=extrapolated,
        model_errors=[dataclasses.asdict(fit) for fit in hardware.model_errors()],
        rules=rules,
        **parts,
    )


def _conversion_us(costs: StepCosts, averaged: np.ndarray) -> float:
    parts = [costs] if costs.halves is None else costs.halves
    found = [p.conversion for p in parts if p.conversion is not None]
    return sum((float((c.dequant_us + c.quant_us).sum(axis=1)[averaged].mean()) for c in found), 0.0)
