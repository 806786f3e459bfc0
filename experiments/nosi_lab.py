"""What the stages of the NOSI experiment share: one model, one arena, ways to make cells, rows as they come."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nosa_sys.engine.injection import Injection, Misses, synthetic_injection
from nosa_sys.errors import NosaError
from nosa_sys.experiments.decode_bench import base_row, measure
from nosa_sys.experiments.decode_bench_run import RUN_OUT_STEPS, DecodeCell, Segment, Workbench, n_table_steps
from nosa_sys.experiments.equal_bytes import equal_batch, full_kv_bytes, kept_bytes, largest_batch
from nosa_sys.experiments.nosi_scale import Scale
from nosa_sys.methods import get_method

# beside weights and KV: activations, graphs, the output of the largest matrix
_GPU_RESERVE_BYTES = 6 * 2**30


@dataclass
class Lab:
    """``traces``: method -> trace directory. ``schedule`` is the one that stages use which do not compare schedules.
    ``gpu_bytes`` and ``host_bytes``: memory that batches may take, weights not counted. ``journal``: where every row
    goes as a line of JSON the moment it is known; no cell begins after ``ends_at_s`` (time.monotonic)."""

    bench: Workbench
    scale: Scale
    out: Path
    schedule: str
    slot_factor: float
    host_bytes: float
    seed: int = 0
    traces: dict[str, Path] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    journal: Path | None = None
    ends_at_s: float = math.inf

    @property
    def gpu_bytes(self) -> float:
        if not self.bench.on_gpu:
            return math.inf
        total = torch.cuda.get_device_properties(self.bench.model.device).total_memory
        return float(total - self.bench.model.shape.weight_bytes - _GPU_RESERVE_BYTES)

    @property
    def most_new_tokens(self) -> int:
        """Tokens that a cell may add to a context: what fits must fit to its last step."""
        scale = self.scale
        steps = max(scale.steps, scale.schedule_steps, scale.few_steps) + max(scale.warmup, scale.schedule_warmup)
        return steps + RUN_OUT_STEPS + 1

    @property
    def runner(self) -> str | None:
        """The GPU's own choice; on a CPU the same launches without a graph."""
        return None if self.bench.on_gpu else "kernels"

    def inject(
        self,
        method: str,
        contexts: Sequence[int],
        segments: Sequence[Segment],
        misses: Sequence[Misses],
        reuse: float = 0.0,
    ) -> Injection:
        """Synthetic sets with one rate a segment; the run-out goes on with the last."""
        shape = self.bench.model.shape
        spans = [(s.warmup + s.steps, rate) for s, rate in zip(segments, misses, strict=True)]
        spans.append((RUN_OUT_STEPS, misses[-1]))
        return synthetic_injection(
            self.scale.sparse, method, shape.n_layers, shape.n_kv_heads, contexts, n_table_steps(segments),
            spans, self.seed, self.bench.model.device, reuse,
        )  # fmt: skip

    def cell(
        self,
        method: str,
        batch: int,
        context: int,
        segment: Segment,
        *,
        misses: float = 0.0,
        reuse: float = 0.0,
        slot_factor: float = 1.0,
        **changes: Any,
    ) -> DecodeCell:
        """``batch`` equal contexts with synthetic sets; dense attention gets random KV alone."""
        slots = math.ceil(slot_factor * self.scale.sparse.topk - 1e-9)
        cell = DecodeCell(
            sparse=self.scale.sparse,
            method=method,
            schedule=self.schedule,
            slots=None if get_method(method).dense else slots,
            runner=self.runner,
            contexts=(context,) * batch,
            seed=self.seed,
        )
        cell = dataclasses.replace(cell, **changes)
        if get_method(method).dense:
            return cell
        return dataclasses.replace(cell, injection=self.inject(method, cell.contexts, [segment], [misses], reuse))

    def measured(
        self,
        stage: str,
        cell: DecodeCell,
        segment: Segment,
        *,
        parts: bool = False,
        beside: Mapping[str, dict[str, Any] | None] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Measure one cell and keep its row, or the reason why there is no figure.

        ``beside``: column -> the row whose tokens/s this one's are divided by, where both have them.
        """
        row: dict[str, Any]
        try:
            self.refuse_when_late()
            row = measure(self.bench, cell, [segment], parts=parts)[0]
        except (NosaError, RuntimeError) as error:
            row = base_row(self.bench, cell, segment) | {"skipped": " ".join(str(error).split())[:300]}
        for name, other in (beside or {}).items():
            if row.get("tokens_per_s") and other is not None and other.get("tokens_per_s"):
                row[name] = row["tokens_per_s"] / other["tokens_per_s"]
        return self.keep({"stage": stage, **more, **row})

    def refuse_when_late(self) -> None:
        """NosaError once the stage's time is up."""
        if time.monotonic() >= self.ends_at_s:
            raise NosaError("the stage's time is up; run it alone, for fewer --contexts, or raise --stage-seconds")

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row, here and in the journal, and print its line."""
        self.rows.append(row)
        if self.journal is not None:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)
        return row

    def skip(self, stage: str, reason: str, **more: Any) -> None:
        """A row that says why a cell was not tried."""
        self.keep({"stage": stage, "what": "nosa-sys", "skipped": reason, **more})

    def largest(self, method: str, context: int, *, offload: bool) -> tuple[int, str]:
        """(batch, limit) of a method at slots = k; a large one on a CPU, whose memory is no subject here."""
        if not self.bench.on_gpu:
            return self.scale.crossover_batches[-1], "the dry run"
        return largest_batch(
            self.bench.model.shape, self.scale.sparse, method, slots=self.scale.sparse.topk,
            context=context + self.most_new_tokens, offload=offload, gpu_bytes=self.gpu_bytes,
            host_bytes=self.host_bytes,
        )  # fmt: skip

    def full_batch_for(self, context: int) -> tuple[int, int]:
        """FullAttn's batch whose KV bytes NOSA can fill with the sequences that fit, and its largest batch."""
        if not self.bench.on_gpu:
            return self.scale.full_batch, self.scale.full_batch
        shape, sparse = self.bench.model.shape, self.scale.sparse
        largest = min(self.largest("full", context, offload=False)[0], self.scale.full_batch)
        sequences, _ = self.largest("nosa", context, offload=True)
        kept = kept_bytes(shape, sparse, "nosa", slots=sparse.topk, context=context, offload=True)
        equal = int(sequences * kept.total_bytes // full_kv_bytes(shape, sparse, context))
        return max(1, min(largest, equal)), max(1, largest)

    def fitting_batch(
        self,
        method: str,
        context: int,
        full_batch: int,
        *,
        slot_factor: float = 1.0,
        offload: bool = True,
        key_means_dtype: str = "float32",
    ) -> tuple[int, str]:
        """(batch, what limits it) in the KV bytes of ``full_batch`` FullAttn sequences, as host memory allows."""
        shape, sparse = self.bench.model.shape, self.scale.sparse
        slots = math.ceil(slot_factor * sparse.topk - 1e-9)
        sizes: dict[str, Any] = {"slots": slots, "context": context, "offload": offload}
        sizes["key_means_dtype"] = key_means_dtype
        kept = kept_bytes(shape, sparse, method, **sizes)
        wanted = equal_batch(full_batch, kept, full_kv_bytes(shape, sparse, context))
        fits, limit = largest_batch(
            shape, sparse, method, **(sizes | {"context": context + self.most_new_tokens}),
            gpu_bytes=self.gpu_bytes, host_bytes=self.host_bytes,
        ) if math.isfinite(self.gpu_bytes) else (wanted, "")  # fmt: skip
        return (wanted, f"KV bytes of {full_batch} FullAttn sequences") if wanted <= fits else (fits, limit)


def line(row: dict[str, Any]) -> str:
    """One row on one line."""
    names = ("stage", "what", "method", "schedule_in_use", "segment", "variant", "batch", "context", "slots")
    head = " ".join(f"{row[n]}" for n in names if row.get(n) not in (None, ""))
    if row.get("skipped"):
        return f"{head}  skipped: {row['skipped']}"
    figures = (
        ("tokens_per_s", "tok/s", 1), ("step_ms_median", "ms", 3), ("misses_per_head", "misses", 2),
        ("critical_ms", "critical ms", 3), ("over_critical", "x critical", 3), ("over_longer", "x longer part", 3),
        ("over_longer_once", "x longer part, matrices read once", 3), ("over_serial", "x serial", 3),
        ("step_over_floor", "x floor", 2), ("ratio_to_full", "x full", 2), ("ratio_to_infllmv2", "x infllmv2", 2),
        ("ratio_to_transformers", "x transformers", 2),
        ("ttft_ms_mean", "ms to first token", 0), ("overhead_share", "overhead", 4),
    )  # fmt: skip
    return head + "  " + "  ".join(f"{row[k]:.{d}f} {name}" for k, name, d in figures if row.get(k) is not None)
