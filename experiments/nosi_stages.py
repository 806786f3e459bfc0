"""Stages of the NOSI experiment other than the schedules: hot buffer, methods, paper, peers, crossover, recorder."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.engine.injection import trace_injection
from nosa_sys.engine.recorder import Recorder
from nosa_sys.errors import NosaError
from nosa_sys.experiments.decode_bench import base_row, places, segment_figures
from nosa_sys.experiments.decode_bench_run import DecodeCell, Segment, Workbench, n_table_steps
from nosa_sys.experiments.equal_bytes import kept_bytes
from nosa_sys.experiments.nosi_lab import Lab
from nosa_sys.experiments.peers import PeerCache, peer_row, transformers_model
from nosa_sys.methods import get_method
from nosa_sys.models.random import random_model
from nosa_sys.slot_count import slots_of
from nosa_sys.traces.reader import Trace

# Tokens/s of the paper (8B, 16K, equivalent batch 16, H100 with PCIe 5).
PUBLISHED = {"nosa": 2551.66, "infllmv2": 1762.16}
# Misses of 64 blocks that a gamma implies: SPEC 4's floor for NOSA is 0.75 (15 without the born block); the paper shows
# gamma >= 0.8 for InfLLMv2 in most layers.
PAPER_CELLS = (("nosa", 4.0), ("nosa", 8.0), ("nosa", 15.0), ("infllmv2", 12.8))


def hot_buffer(lab: Lab) -> None:
    """Recorded sets of a real model, slots 1.0 to 2.0 x k, at equal GPU bytes: more slots, fewer sequences."""
    if not lab.traces:
        lab.skip("hot_buffer", "no trace was given; capture one and name it with --trace METHOD=DIRECTORY")
    shape = lab.bench.model.shape
    for method, directory in lab.traces.items():
        trace = Trace.open(directory)
        sparse = trace.meta.sparse
        segment = Segment("", lab.scale.warmup, lab.scale.schedule_steps)
        n_steps = n_table_steps([segment])
        context = int(np.mean([s.prompt_tokens for s in trace.meta.sequences]))

        def bytes_at(slots: int, sparse: Any = sparse, method: str = method, context: int = context) -> int:
            return kept_bytes(shape, sparse, method, slots=slots, context=context, offload=True).total_bytes

        best: dict[str, Any] | None = None
        for factor in lab.scale.slot_factors:
            slots = slots_of(factor, sparse.topk)
            batch = max(1, lab.scale.batch * bytes_at(sparse.topk) // bytes_at(slots))
            cell = DecodeCell(
                sparse,
                method,
                lab.schedule,
                slots=slots,
                runner=lab.runner,
                seed=lab.seed,
                injection=trace_injection(
                    trace, shape.n_layers, shape.n_kv_heads, batch, n_steps, lab.seed, lab.bench.model.device
                ),
            )
            row = lab.measured("hot_buffer", cell, segment, variant=f"{factor:g} k", slot_factor=factor)
            if not row.get("skipped") and (best is None or row["tokens_per_s"] > best["tokens_per_s"]):
                best = row
        if best is not None:
            print(f"hot_buffer: {method} is fastest with {best['slot_factor']:g} k slots", flush=True)


def methods(lab: Lab) -> None:
    """NOSA against FullAttn, InfLLMv2 (offloaded, resident), DMA and vanilla at equal GPU KV bytes.

    The bytes are those of ``full_batch`` FullAttn sequences, or of fewer where host memory cannot hold the contexts
    that NOSA would run in them; FullAttn at the largest batch that fits stands beside as a row of its own.
    """
    scale = lab.scale
    segment, few = Segment("", scale.warmup, scale.schedule_steps), Segment("", 1, min(8, scale.few_steps))
    for context in scale.contexts:
        full_batch, largest = lab.full_batch_for(context)
        floor = lab.measured("methods", lab.cell("full", full_batch, context, segment), segment, variant="paged")
        if largest > full_batch:
            cell = lab.cell("full", largest, context, segment)
            lab.measured("methods", cell, segment, variant="paged, as many as fit")
        best, half = lab.slot_factor, {"key_means_dtype": "model"}
        plan: list[tuple[str, str, float, bool, Segment, dict[str, Any]]] = [
            ("infllmv2", "1.0 k", 1.0, True, segment, {}),
            ("nosa", "1.0 k", 1.0, True, segment, {}),
            ("infllmv2", f"{best:g} k", best, True, segment, {}),
            ("nosa", f"{best:g} k", best, True, segment, {}),
            ("infllmv2", f"{best:g} k, key means of the model's type", best, True, segment, half),
            ("nosa", f"{best:g} k, key means of the model's type", best, True, segment, half),
            ("infllmv2", "resident", 1.0, False, segment, {"offload": False, "slots": None}),
            ("dma", "1.0 k", 1.0, True, segment, {}),
            ("nosa", "vanilla", 1.0, True, few, {"runner": "eager", "schedule": "serial"}),
        ]
        rivals: dict[str, dict[str, Any]] = {}  # InfLLMv2 with the same slots and key means
        for method, variant, factor, offload, own, changes in plan:
            means = changes.get("key_means_dtype", "float32")
            batch, limit = lab.fitting_batch(
                method, context, full_batch, slot_factor=factor, offload=offload, key_means_dtype=means
            )
            if batch < 1:
                lab.skip("methods", f"not one sequence fits ({limit})", method=method, variant=variant, context=context)
                continue
            rate, reuse = {
                "nosa": (scale.nosa_misses, scale.nosa_reuse),
                "infllmv2": (scale.infllmv2_misses, scale.infllmv2_reuse),
            }.get(method, (0.0, 0.0))
            cell = lab.cell(method, batch, context, own, misses=rate, reuse=reuse, slot_factor=factor, **changes)
            if cell.runner == "eager":  # it takes no sets: the random model selects
                cell = dataclasses.replace(cell, injection=None)
            beside = {"ratio_to_full": floor, "ratio_to_infllmv2": rivals.get(variant) if method == "nosa" else None}
            row = lab.measured(
                "methods", cell, own, beside=beside, variant=variant, batch_limited_by=limit, full_batch=full_batch
            )
            if method == "infllmv2":
                rivals[variant] = row


def prefill(lab: Lab) -> None:
    """Prefill and time to first token of one random prompt."""
    scale = lab.scale
    segment = Segment("", 1, 8)
    rng = np.random.default_rng(lab.seed)
    for context in scale.contexts:
        prompt = tuple(rng.integers(0, lab.bench.model.shape.vocab_size, context).tolist())
        for method in ("nosa", "full"):
            dense = get_method(method).dense
            cell = DecodeCell(
                scale.sparse, method, lab.schedule, slots=None if dense else scale.sparse.topk, prompts=(prompt,),
                runner=lab.runner, seed=lab.seed,
            )  # fmt: skip
            lab.measured("prefill", cell, segment)


def paper(lab: Lab) -> None:
    """The paper's batch of 64 at 16K beside its published tokens/s on another card, for the gammas it states."""
    scale = lab.scale
    segment = Segment("", scale.warmup, scale.schedule_steps)
    for method, misses in PAPER_CELLS:
        cell = lab.cell(method, scale.batch, scale.contexts[0], segment, misses=misses)
        lab.measured(
            "paper",
            cell,
            segment,
            variant=f"{misses:g} misses",
            parts=True,
            published_tokens_per_s_h100=PUBLISHED[method],
        )


def peers(lab: Lab) -> None:
    """transformers with its own caches, then this engine on the same shape, batches and context."""
    scale, device = lab.scale, lab.bench.model.device
    context = scale.contexts[0]
    peer = transformers_model(scale.peer_shape, device, lab.seed)
    runs: list[tuple[int, PeerCache]] = [(batch, "dynamic") for batch in scale.peer_batches]
    found: dict[int, dict[str, Any]] = {}
    for batch, cache in [*runs, (scale.offloaded_peer_batch, "offloaded")]:
        steps = scale.peer_steps if cache == "dynamic" else min(4, scale.peer_steps)  # more than a second a step
        try:
            lab.refuse_when_late()
            row = peer_row(
                peer, scale.peer_shape, batch=batch, context=context, cache=cache, steps=steps,
                warmup=min(2, steps), seed=lab.seed,
            )  # fmt: skip
            found[batch] = lab.keep({"stage": "peers", **row})
        except NosaError as error:
            lab.skip("peers", str(error), what=f"transformers-{cache}", batch=batch, context=context)
    peer = None
    gc.collect()
    if lab.bench.on_gpu:
        torch.cuda.empty_cache()
    model = random_model(scale.peer_shape, lab.seed, device=str(device))
    own = dataclasses.replace(lab, bench=Workbench(model, lab.bench.rates, lab.bench.arena))  # the same list of rows
    segment = Segment("", scale.warmup, scale.few_steps)
    for batch in (*scale.peer_batches, scale.offloaded_peer_batch):
        for method, misses in (("nosa", scale.nosa_misses), ("full", 0.0)):
            cell = own.cell(method, batch, context, segment, misses=misses)
            own.measured("peers", cell, segment, beside={"ratio_to_transformers": found.get(batch)})


def crossover(lab: Lab) -> None:
    """Offloaded NOSA against FullAttn over the batch: where offload starts to pay, and where FullAttn ends."""
    scale = lab.scale
    segment, context = Segment("", scale.warmup, scale.few_steps), scale.contexts[0]
    for method, misses in (("nosa", scale.nosa_misses), ("full", 0.0)):
        fits, limit = lab.largest(method, context, offload=method != "full")
        batches = sorted({*(b for b in scale.crossover_batches if b <= fits), min(fits, scale.crossover_batches[-1])})
        for batch in batches:
            lab.measured("crossover", lab.cell(method, batch, context, segment, misses=misses), segment)
        if fits < scale.crossover_batches[-1]:
            lab.skip("crossover", f"{limit} ends at batch {fits}", method=method, batch=fits + 1, context=context)


def recorder(lab: Lab) -> None:
    """Tokens/s with and without a recorder, in turns; the share that recording costs."""
    scale = lab.scale
    segment = Segment("", scale.warmup, scale.schedule_steps)
    cell = lab.cell("nosa", scale.batch, scale.contexts[0], segment, misses=scale.nosa_misses)
    first = places([segment])[0][1]
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(2):
        for variant, found in rates.items():
            with tempfile.TemporaryDirectory() as directory:
                kept = Recorder(Path(directory) / "trace", background=True) if variant == "on" else None
                log = lab.bench.run(cell, segment.warmup + segment.steps, recorder=kept)
                if kept is not None:
                    kept.close()
            row = base_row(lab.bench, cell, segment)
            row |= segment_figures(lab.bench, cell, log, first, segment.steps)
            lab.keep({"stage": "recorder", "variant": f"recorder {variant}", **row})
            found.append(row["tokens_per_s"])
    share = 1 - max(rates["on"]) / max(rates["off"])
    lab.keep({"stage": "recorder", "variant": "overhead, best of two each", "overhead_share": share, "skipped": None})
