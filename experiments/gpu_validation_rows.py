"""A row for every (setting, schedule): what was measured, what the simulator says, and what the runs agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from nosa_sys.errors import NosaError
from nosa_sys.experiments.validation import PARTS
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.engine_gpu_fit import workload_of
from nosa_sys.profiling.engine_gpu_run import GpuRun, supports
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.prediction import Prediction
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.workload import Workload

# An exposed transfer is the difference of two steps: below this share of them it is mostly what they do not repeat.
_LEAST_EXPOSED = 0.05
# Schedules nearer than this are not held to an order.
_ORDERED_BEYOND = 0.03
_CAPACITY_TOLERANCE = 0.001


def setting_rows(
    run: GpuRun, shape: ModelShape, profile: HardwareProfile, taken: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of one setting, one a schedule; ``failed`` says why one validates nothing, or that bytes differ."""
    setting = run.setting
    base = {**setting.key(), "policy": setting.policy, "clocks": dict(run.clocks), **run.bytes}
    rows = []
    for name in supports(setting.method):
        row: dict[str, Any] = {**base, "schedule": name, "failed": run.failed}
        rows.append(row)
        if setting.key() in taken:
            row["failed"] = "calibration used this setting, so it validates nothing; change its batch, k or context"
        elif profile.engine is not None and name in run.window_us and name in run.compute_us:
            try:
                row |= _compared(run, name, shape, profile)
            except NosaError as error:
                row["failed"] = str(error)
        elif run.failed is None:
            row["failed"] = "not measured before the time was up"
    return rows


def _compared(run: GpuRun, schedule: str, shape: ModelShape, profile: HardwareProfile) -> dict[str, Any]:
    loads, first = run.warm(schedule)
    work = workload_of(run, shape, loads, first)
    predicted = _priced(work, profile, schedule)
    alone = _priced(work, without_fetches(profile), schedule)
    step_us, compute_us = run.step_us(schedule), run.compute_us[schedule]
    exposed_us = step_us - compute_us
    timed = schedule == "fused_kv" and bool(run.phase_us)  # phases were measured in this schedule's order alone
    measured = {
        "select": run.phase_us.get("select", 0.0) * shape.n_layers * timed,
        "h2d": exposed_us if exposed_us > _LEAST_EXPOSED * step_us else 0.0,
        "attention": run.phase_us.get("attention", 0.0) * shape.n_layers * timed,
        "other": (compute_us - (run.phase_us["select"] + run.phase_us["attention"]) * shape.n_layers) if timed else 0.0,
    }
    found = {
        "select": predicted.select_us,
        "h2d": predicted.step_time_p50_us - alone.step_time_p50_us,
        "attention": predicted.attention_us,
        "other": predicted.gemm_us + predicted.host_overhead_us,
    }
    row: dict[str, Any] = {"measured_step_us": step_us, "predicted_step_us": predicted.step_time_p50_us}
    for part in PARTS:
        row[f"measured_{part}_us"], row[f"predicted_{part}_us"] = max(0.0, measured[part]), found[part]
    block_bytes = shape.kv_block_bytes(run.setting.block_size)
    batch = int(loads.n_sequences[0])
    row |= {
        "error": predicted.step_time_p50_us / step_us - 1.0,
        "noise": run.noise(schedule),
        "measured_compute_us": compute_us,
        "predicted_compute_us": alone.step_time_p50_us,
        "window_us": list(run.window_us[schedule]),
        "measured_tokens_per_s": batch / step_us * 1e6,
        "predicted_tokens_per_s": batch / predicted.step_time_p50_us * 1e6,
        "misses_per_head_step": predicted.misses_per_head_step,
        "measured_h2d_bytes": run.n_misses[schedule] * block_bytes,
        "predicted_h2d_bytes": predicted.h2d_bytes_total,
    }
    use = work.memory()
    row |= {"predicted_gpu_bytes": use.gpu_bytes, "predicted_host_pool_bytes": use.host_pool_bytes}
    row["predicted_batch_that_fits"] = use.batch_that_fits(profile)
    if row["measured_h2d_bytes"] != row["predicted_h2d_bytes"]:
        row["failed"] = (
            f"predicted bytes {row['predicted_h2d_bytes']} differ from the measured {row['measured_h2d_bytes']}"
        )
    if "device_peak" in run.bytes:
        for where in ("device", "host"):
            planned, taken = run.bytes[f"planned_{where}"], run.bytes[f"allocated_{where}"]
            if abs(planned - taken) > _CAPACITY_TOLERANCE * max(planned, taken):
                row["failed"] = f"{where} memory: {planned} bytes were planned and {taken} are allocated"
    return row


def _priced(work: Workload, profile: HardwareProfile, schedule: str) -> Prediction:
    return price([(work, profile)], get_schedule(schedule))[0]


def without_fetches(profile: HardwareProfile) -> HardwareProfile:
    """The same machine on which a fetch takes no time and slows nobody: compute alone."""
    assert profile.engine is not None
    free = dataclasses.replace(
        profile.engine,
        fetch_alone_fixed_us=0.0,
        fetch_alone_layer_us=0.0,
        fetch_alone_us_per_mb=0.0,
        fork_us=0.0,
        fetch_beside_fixed_us=0.0,
        fetch_beside_us_per_mb=0.0,
    )
    return dataclasses.replace(profile, engine=free)


def orderings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs of schedules of one setting that differ by more than 3 %, and in how many the prediction orders them so."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("error") is not None:
            name = "/".join(str(row[k]) for k in ("model_shape", "method", "batch", "context", "topk", "slots"))
            groups.setdefault(name, []).append(row)
    pairs, wrong = 0, []
    for name, own in groups.items():
        for a, b in combinations(own, 2):
            ratio = a["measured_step_us"] / b["measured_step_us"]
            if abs(np.log(ratio)) <= np.log(1 + _ORDERED_BEYOND):
                continue
            pairs += 1
            if (ratio > 1) != (a["predicted_step_us"] > b["predicted_step_us"]):
                wrong.append(f"{name}: {a['schedule']} against {b['schedule']}")
    return {"pairs": pairs, "agree": pairs - len(wrong), "wrong": wrong}
