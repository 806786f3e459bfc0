"""Stage ``schedules``: every schedule at several miss rates, beside the shortest time that its own order allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nosa_sys.engine.injected_guesses import with_guesses
from nosa_sys.engine.setup import CANDIDATES
from nosa_sys.errors import NosaError
from nosa_sys.experiments.critical_paths import CRITICAL_PATHS, Parts
from nosa_sys.experiments.decode_bench import PHASES, measure, places, transfer_ms
from nosa_sys.experiments.decode_bench_run import DecodeCell, Segment
from nosa_sys.experiments.nosi_lab import Lab
from nosa_sys.model_shape import ModelShape

# What share of the next misses the guesses hold: an assumption, written into every row's label.
GUESS_HIT_SHARE = 0.5
_PART_WARMUP, _PART_STEPS = 2, 12


def schedules(lab: Lab) -> None:
    """Rows of all schedules x miss rates; compute, transfer and phases are measured in the same run of this script."""
    _sweep(lab, "schedules", tuple(CRITICAL_PATHS), lab.scale.misses, "float32")


def schedules_means(lab: Lab) -> None:
    """The same with compressed keys in the model's type, where compute and transfer are about equal."""
    _sweep(lab, "schedules_means", ("serial", "split_merge", "two_batch"), lab.scale.means_misses, "model")


def _sweep(lab: Lab, stage: str, names: Sequence[str], rates: Sequence[float], key_means_dtype: str) -> None:
    scale = lab.scale
    contexts = [scale.contexts[0]] * scale.batch
    segments = [Segment(f"{m:g} misses", scale.schedule_warmup, scale.sweep_steps) for m in rates]
    short = [Segment(s.name, min(_PART_WARMUP, s.warmup), min(_PART_STEPS, s.steps)) for s in segments]
    plain = DecodeCell(
        scale.sparse,
        slots=scale.sparse.topk,
        runner=lab.runner,
        injection=lab.inject("nosa", contexts, segments, rates),
        key_means_dtype=key_means_dtype,
        seed=lab.seed,
    )
    brief = dataclasses.replace(plain, injection=lab.inject("nosa", contexts, short, rates))
    phases = _phases(lab, dataclasses.replace(brief, schedule="fused_kv"), short)
    spans = [(first, s.steps) for s, first in places(short)]
    n_short = sum(s.warmup + s.steps for s in short)
    transfers: dict[str, list[float]] = {}
    serial: dict[str, dict[str, Any]] = {}
    for name in names:
        cell, own_brief = (_of_schedule(lab, c, name) for c in (plain, brief))
        try:
            lab.refuse_when_late()
            rows = measure(lab.bench, cell, segments, parts=False)
            if rows[0].get("skipped"):
                raise NosaError(rows[0]["skipped"])
            run = lab.bench.run(own_brief, n_short, skip_fetch=True)
            compute = [float(np.median(run.step_ms(*span))) for span in spans]
            source = name if name in ("serial", "prefetch") else "fused_kv"
            if source not in transfers:
                transfers[source] = transfer_ms(lab.bench, _of_schedule(lab, brief, source), n_short, spans)
        except (NosaError, RuntimeError) as error:
            lab.skip(stage, " ".join(str(error).split())[:300], schedule=name, key_means_dtype=key_means_dtype)
            continue
        for row, compute_ms, copy_ms in zip(rows, compute, transfers[source], strict=True):
            row |= _judged(lab, row, name, compute_ms, copy_ms, phases)
            first = serial.setdefault(row["segment"], row)
            row["over_serial"] = row["step_ms_median"] / first["step_ms_median"]
            row["over_longer_once"] = row["step_ms_median"] / max(first["compute_ms"], copy_ms)
            lab.keep({"stage": stage, **row})
    _keep_best(lab, stage, key_means_dtype)


def _keep_best(lab: Lab, stage: str, key_means_dtype: str) -> None:
    """A row for every miss rate: the fastest of the schedules that auto tries, against the longer part of a step that
    reads its matrices once, and against serial."""
    names = ("schedule", "batch", "context", "status", "step_ms_median", "over_longer_once", "over_serial")
    tried = [row for row in lab.rows if row.get("schedule") in CANDIDATES and not row["skipped"]]
    for segment in dict.fromkeys(row["segment"] for row in tried):
        best = min((row for row in tried if row["segment"] == segment), key=lambda row: row["step_ms_median"])
        lab.keep(
            {
                "stage": stage,
                "what": "fastest schedule",
                "segment": segment,
                "key_means_dtype": key_means_dtype,
                **{name: best[name] for name in names},
                "serial_over_fastest": 1 / best["over_serial"],
                "skipped": None,
            }
        )


def _of_schedule(lab: Lab, cell: DecodeCell, name: str) -> DecodeCell:
    if name != "prefetch":
        return dataclasses.replace(cell, schedule=name)
    assert cell.injection is not None
    n = lab.scale.n_prefetch
    return dataclasses.replace(
        cell,
        schedule=name,
        slots=lab.scale.sparse.topk + n,
        policy="lru",
        injection=with_guesses(cell.injection, lab.scale.sparse, n, GUESS_HIT_SHARE, lab.seed),
        extra={"n_prefetch": n},
    )


def _phases(lab: Lab, cell: DecodeCell, segments: list[Segment]) -> dict[str, float]:
    """Milliseconds of select, attention and other in a step without copies, and of the whole step (key "step")."""
    segment, first = places(segments)[0]
    n_steps = segment.warmup + segment.steps
    run = lab.bench.run(cell, n_steps, skip_fetch=True, timed=True)
    found = dict.fromkeys(PHASES, 0.0) | run.phase_ms(first, segment.steps)
    return found | {"step": float(np.median(run.step_ms(first, segment.steps)))}


def parts_of(
    shape: ModelShape,
    topk: int,
    schedule: str,
    row: dict[str, Any],
    compute_ms: float,
    copy_ms: float,
    phases: dict[str, float],
) -> Parts:
    """A schedule's parts from its compute alone, its copies alone and the phases of a timed step.

    Phases are scaled to the schedule's own compute time. Projection comes before the misses are known: its share of the
    rest of a layer is that of its matrix's bytes. Hits' share of attention is that of the blocks that hit.
    """
    scale = compute_ms / phases["step"]
    select, attention, other = (phases[name] * scale for name in ("select", "attention", "other"))
    qkv = shape.hidden_size * shape.head_dim * (shape.n_q_heads + 2 * shape.n_kv_heads) / shape.layer_params
    before = select + other * qkv
    outside = max(0.0, compute_ms - select - attention - other)
    beside = {"split_merge": attention * max(0.0, 1 - row["misses_per_head"] / topk), "prefetch": attention}
    at_once = min(beside.get(schedule, 0.0), compute_ms - before - outside)
    guessed = row["prefetch_bytes_per_step"] / row["h2d_bytes_per_step"] if row["h2d_bytes_per_step"] else 0.0
    return Parts(
        shape.n_layers,
        before=before,
        beside=at_once,
        after=compute_ms - before - at_once - outside,
        outside=outside,
        demand=copy_ms * (1 - guessed),
        speculative=copy_ms * guessed,
    )


def _judged(
    lab: Lab, row: dict[str, Any], schedule: str, compute_ms: float, copy_ms: float, phases: dict[str, float]
) -> dict[str, Any]:
    shape = lab.bench.model.shape
    parts = parts_of(shape, lab.scale.sparse.topk, schedule, row, compute_ms, copy_ms, phases)
    critical_ms = CRITICAL_PATHS[schedule](parts)
    longer_ms = max(compute_ms, copy_ms)
    return {
        "compute_ms": compute_ms,
        "transfer_ms": copy_ms,
        **{f"part_{name}_ms": value for name, value in dataclasses.asdict(parts).items() if name != "n_layers"},
        "critical_ms": critical_ms,
        "over_critical": row["step_ms_median"] / critical_ms,
        "over_longer": row["step_ms_median"] / longer_ms,
        "h2d_exposed_ms": max(0.0, row["step_ms_median"] - compute_ms),
        "h2d_hidden_ms": max(0.0, copy_ms - max(0.0, row["step_ms_median"] - compute_ms)),
    }
