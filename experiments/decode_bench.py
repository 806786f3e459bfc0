"""Decode throughput of one situation, measured: rates, step times, their parts, traffic and memory in one flat row.

Rates by one definition: n timed steps of B rows span n intervals, from the end of the last warm-up step to the end of
the last timed one; a step ends when its tokens are on the host, so that the device has finished it. Prefill and the
cold step lie before and are given apart.
Parts come from further runs of the same sets: one without copies of missed blocks (compute), and one with nothing but
planning and copies, of which the time without the copies is taken off (transfer). Exposed transfer = step - compute,
hidden transfer = transfer - exposed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.engine.memory_plan import device_bytes, required_bytes
from nosa_sys.errors import CapacityError
from nosa_sys.experiments.capture import device_name
from nosa_sys.experiments.decode_bench_rates import step_bytes
from nosa_sys.experiments.decode_bench_run import DecodeCell, Segment, StepLog, Workbench
from nosa_sys.experiments.equal_bytes import equal_bytes_row
from nosa_sys.machine import git_revision, nvidia_link, versions
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel

PART_STEPS = 32
PHASES = ("select", "h2d", "attention", "other")
_ALLOCATED = ("device_slot_bytes", "device_context_bytes", "host_pool_bytes", "host_pinned_bytes")


def measure(
    bench: Workbench, cell: DecodeCell, segments: Sequence[Segment], *, parts: bool = True
) -> list[dict[str, Any]]:
    """One row for every segment of one run; with ``parts`` two shorter runs of the same sets split its step.

    The parts of a cell of several segments are taken from its first steps alone: measure one segment at a time where
    segments differ. A cell that does not fit gives rows whose ``skipped`` says why.
    """
    n_steps = sum(s.warmup + s.steps for s in segments)
    rows = [base_row(bench, cell, segment) for segment in segments]
    try:
        log = bench.run(cell, n_steps)
        for row, (segment, first) in zip(rows, places(segments), strict=True):
            row |= segment_figures(bench, cell, log, first, segment.steps)
        if parts:
            part = Segment("", min(4, segments[0].warmup), min(PART_STEPS, segments[0].steps))
            figures = part_figures(bench, cell, part)
            for row in rows:
                row |= figures
                split_transfer(row)
    except (CapacityError, torch.OutOfMemoryError) as error:
        for row in rows:
            row["skipped"] = " ".join(str(error).split())[:300]
    return rows


def places(segments: Sequence[Segment]) -> list[tuple[Segment, int]]:
    """(segment, its first timed step); step 0 is the cold one."""
    found, at = [], 1
    for segment in segments:
        found.append((segment, at + segment.warmup))
        at += segment.warmup + segment.steps
    return found


def part_figures(bench: Workbench, cell: DecodeCell, part: Segment) -> dict[str, Any]:
    """Compute alone, transfer alone (where anything crosses), and the phases of a run with clock marks."""
    first, n = 1 + part.warmup, part.steps
    figures: dict[str, Any] = {}
    if cell.runner == "eager":  # it has no such switches
        return figures
    if cell.offloads:
        compute = bench.run(cell, part.warmup + n, skip_fetch=True)
        figures["compute_ms"] = float(np.median(compute.step_ms(first, n)))
    if cell.offloads and cell.injection is not None:  # without attention nothing else tells what to select
        figures["transfer_ms"] = transfer_ms(bench, cell, part.warmup + n, [(first, n)])[0]
    timed = bench.run(cell, part.warmup + n, timed=True)
    phases = timed.phase_ms(first, n)
    return figures | {f"{name}_ms": phases.get(name) for name in PHASES}


def transfer_ms(bench: Workbench, cell: DecodeCell, n_steps: int, spans: Sequence[tuple[int, int]]) -> list[float]:
    """Median time a step of the copies alone, for every (first step, number of steps).

    The planning that finds what to copy is measured by itself and taken off.
    """
    copies = bench.run(cell, n_steps, fetch_only=True)
    planning = bench.run(cell, n_steps, fetch_only=True, skip_fetch=True)
    return [
        max(0.0, float(np.median(copies.step_ms(*span))) - float(np.median(planning.step_ms(*span)))) for span in spans
    ]


def split_transfer(row: dict[str, Any]) -> None:
    """Exposed and hidden transfer from the parts; zero both where nothing crosses."""
    if row.get("step_ms_median") is None:
        return
    if row.get("compute_ms") is None:
        row["h2d_exposed_ms"] = row["h2d_hidden_ms"] = None if row["offload"] else 0.0
        return
    row["h2d_exposed_ms"] = max(0.0, row["step_ms_median"] - row["compute_ms"])
    if row.get("transfer_ms") is not None:
        row["h2d_hidden_ms"] = max(0.0, row["transfer_ms"] - row["h2d_exposed_ms"])


def base_row(bench: Workbench, cell: DecodeCell, segment: Segment) -> dict[str, Any]:
    """What identifies a row, and the bytes that follow from the shape alone."""
    shape, contexts = bench.model.shape, cell.row_contexts
    status = "measured" if cell.prompts else "measured: KV filled with random values"
    if cell.injection is not None:
        status = f"injected: {cell.injection.label}"
    row: dict[str, Any] = {
        "what": "nosa-sys",
        "segment": segment.name,
        "model_shape": shape.name,
        "method": cell.method,
        "schedule": cell.schedule,
        "runner": cell.runner or "default",
        "offload": cell.offloads,
        "batch": len(contexts),
        "context": int(np.mean(contexts)),
        "topk": cell.sparse.topk,
        "block_size": cell.sparse.block_size,
        "slots": cell.kept_slots if cell.offloads else None,
        "slots_over_k": cell.kept_slots / cell.sparse.topk if cell.offloads else None,
        "policy": cell.policy,
        "key_means_dtype": cell.key_means_dtype,
        "steps": segment.steps,
        "warmup": segment.warmup,
        "seed": cell.seed,
        "status": status,
        "skipped": None,
    }
    planned = required_bytes(
        shape, cell.sparse, get_method(cell.method), n_slots=cell.kept_slots, offload=cell.offloads,
        lanes=len(contexts), tokens_a_lane=max(contexts) + segment.warmup + segment.steps,
        key_means_dtype=cell.key_means_dtype,
    )  # fmt: skip
    row |= {"planned_gpu_bytes": device_bytes(planned) + shape.weight_bytes}
    row |= {"planned_host_bytes": planned["host_pool_bytes"]}
    return row | equal_bytes_row(
        shape,
        cell.sparse,
        cell.method,
        batch=len(contexts),
        slots=cell.kept_slots,
        context=int(np.mean(contexts)),
        offload=cell.offloads,
        key_means_dtype=cell.key_means_dtype,
    )


def segment_figures(bench: Workbench, cell: DecodeCell, log: StepLog, first: int, n: int) -> dict[str, Any]:
    """Rates, times, traffic and utilisation of ``n`` steps from ``first`` on."""
    shape, batch = bench.model.shape, len(cell.row_contexts)
    step_ms = log.step_ms(first, n)
    wall_s = log.end_s[first + n - 1] - log.end_s[first - 1]
    heads = shape.n_layers * shape.n_kv_heads * batch
    block_bytes = shape.kv_block_bytes(cell.sparse.block_size)

    def mean(values: list[int]) -> float:
        return float(np.mean(values[first : first + n]))

    misses = mean(log.n_misses)
    h2d_bytes = (misses + mean(log.prefetch_loads)) * block_bytes
    middle = [c + first + n // 2 for c in cell.row_contexts]
    needed = step_bytes(shape, cell.sparse, cell.method, middle, cell.key_means_dtype)
    sequences = log.summary["sequences"]
    ttft = [s["ttft_ms"] for s in sequences if s["ttft_ms"] is not None] if cell.prompts else []
    return {
        "schedule_in_use": log.summary["schedule_in_use"],
        "tokens_per_s": batch * n / wall_s,
        "tokens_per_s_per_sequence": n / wall_s,
        "step_ms_mean": float(step_ms.mean()),
        "step_ms_median": float(np.median(step_ms)),
        "step_ms_p10": float(np.percentile(step_ms, 10)),
        "step_ms_p90": float(np.percentile(step_ms, 90)),
        "cold_step_ms": log.cold_ms,
        "prefill_s": log.summary["prefill_s"] if cell.prompts else None,
        "ttft_ms_mean": float(np.mean(ttft)) if ttft else None,
        "misses_per_head": misses / heads,
        "gamma": _gamma(cell, first, n),
        "h2d_bytes_per_step": h2d_bytes,
        "d2h_bytes_per_step": mean(log.n_filled) * shape.n_layers * shape.n_kv_heads * block_bytes,
        "prefetch_bytes_per_step": mean(log.prefetch_loads) * block_bytes,
        "wasted_prefetch_bytes_per_step": mean(log.wasted_loads) * block_bytes,
        **bench.rates.utilisation(wall_s / n, h2d_bytes, needed),
        "gpu_peak_bytes": log.gpu_peak_bytes,
        **{name: log.summary.get(name) for name in _ALLOCATED},
    }


def _gamma(cell: DecodeCell, first: int, n: int) -> float | None:
    """Block-weighted share of a set that the last one had, over at most 32 steps; only injected sets are at hand."""
    if cell.injection is None:
        return None
    last = min(first + min(n, 32), cell.injection.n_steps)
    _, kept = cell.injection.fresh_counts(first, last, cell.sparse)
    return float(kept.sum()) / float((cell.injection.ids_table[first:last] >= 0).sum())


def command_line() -> str:
    """How this process was started, without the place of the program on this machine."""
    program = Path(sys.argv[0])
    name = f"python -m nosa_sys.experiments.{program.stem}" if program.suffix == ".py" else program.name
    return " ".join((name, *sys.argv[1:]))


def run_facts(device: str) -> dict[str, Any]:
    """Machine, versions and command line of a run on ``device``, for the head of a result file."""
    link = nvidia_link() if device.startswith("cuda") else None
    return {
        "device": device_name(device),
        "driver": link[0] if link else None,
        "pcie": link[1] if link else None,
        "versions": versions(),
        "git_revision": git_revision(),
        "command": command_line(),
    }


def facts(model: LlamaModel) -> dict[str, Any]:
    """``run_facts`` of the model's device, and the model's shape."""
    return run_facts(str(model.device)) | {"model": model.shape.to_dict()}
