"""Profile a CPU: reference kernels, block copies and matrices of one model shape alone, then the engine's own steps."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.kernels.block_fetch.reference import fetch_blocks, write_back
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import select_blocks
from nosa_sys.kernels.set_difference.reference import update_slots
from nosa_sys.kernels.sparse_decode_attention.reference import sparse_decode_attention
from nosa_sys.kernels.stage1_scores.reference import stage1_scores
from nosa_sys.machine import cpu_name
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.bundle import write_bundle
from nosa_sys.profiling.cpu_engine import engine_fits, engine_points, fetch_fixed_us, float32_shape
from nosa_sys.profiling.fits import LinearFit, fit_linear
from nosa_sys.profiling.matrices import elementwise_points, gemm_points
from nosa_sys.sparse_config import SparseConfig

Rows = list[dict[str, Any]]
Progress = Callable[[str, dict[str, Any]], None]
_BLOCK = 64
_BATCHES = (1, 4, 16)


def time_call(work: Callable[[], object], *, n_calls: int = 9) -> dict[str, Any]:
    """Median, 10th and 90th percentile of calls, microseconds."""
    work()
    times = []
    for _ in range(n_calls):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    middle, tenth = times[len(times) // 2], len(times) // 10
    return {"median_us": middle, "p10_us": times[tenth], "p90_us": times[-1 - tenth], "n_replays": n_calls}


def _copy_points(shape: ModelShape, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    n_rows = 4096
    size = (n_rows, 2, _BLOCK, shape.head_dim)
    host, slots = (torch.randn(size, generator=generator) for _ in range(2))
    run_bytes = host[0].numel() * host.element_size()
    for count in (1, 8, 64, 512, 2048):
        a, b = (torch.randperm(n_rows, generator=generator)[:count] for _ in range(2))
        base = {"run_bytes": run_bytes, "n_runs": count, "bytes": run_bytes * count}
        yield {"direction": "h2d", **base, **time_call(lambda a=a, b=b: fetch_blocks(host, slots, a, b))}  # type: ignore[misc]
        yield {"direction": "d2h", **base, **time_call(lambda a=a, b=b: write_back(slots, host, a, b))}  # type: ignore[misc]


def _attention_points(shape: ModelShape, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    heads, dim = shape.n_kv_heads, shape.head_dim
    for batch in _BATCHES:
        for topk in (8, 16, 32):
            rows = batch * heads * topk
            slots = torch.randn((rows, 2, _BLOCK, dim), generator=generator)
            q = torch.randn((batch, shape.n_q_heads, dim), generator=generator)
            betas = torch.randn((rows, _BLOCK), generator=generator)
            slot_rows = torch.randperm(rows, generator=generator).view(batch, heads, topk)
            ids = torch.arange(topk, dtype=torch.int32).expand(batch, heads, topk).contiguous()
            lengths = torch.full((batch,), topk * _BLOCK)

            def work(q=q, slots=slots, betas=betas, rows=slot_rows, ids=ids, lengths=lengths) -> object:  # type: ignore[no-untyped-def]
                return sparse_decode_attention(q, slots, betas, rows, ids, lengths)

            yield {"batch": batch, "topk": topk, "bytes": slots.numel() * 4, **time_call(work)}


def _selection_points(shape: ModelShape, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    cfg, method, heads = SparseConfig(topk=16, window_size=128, select_blocks=4), get_method("nosa"), shape.n_kv_heads
    for batch in _BATCHES:
        for context in (2048, 4096, 8192):
            windows, blocks = cfg.n_windows(context), cfg.n_blocks(context)
            q = torch.randn((batch, shape.n_q_heads, shape.head_dim), generator=generator)
            means = torch.randn((batch, heads, windows, shape.head_dim), generator=generator)
            betas = torch.randn((batch, heads, windows), generator=generator)
            counts, n_blocks = torch.full((batch,), windows), torch.full((batch,), blocks)
            old = torch.rand((batch * heads, blocks), generator=generator).argsort(dim=1)[:, : cfg.topk].int()
            rank = torch.zeros(old.shape)

            def work(
                q=q, means=means, betas=betas, counts=counts, n=n_blocks, blocks=blocks, old=old, rank=rank
            ) -> object:  # type: ignore[no-untyped-def]
                scores = pool_windows(stage1_scores(q, means, counts), counts, blocks, cfg)
                chosen = select_blocks(scores, pool_windows(betas, counts, blocks, cfg), n, cfg, method)
                return update_slots(old, chosen.block_ids.view(len(old), -1), rank, False)

            elements = batch * heads * blocks
            yield {
                "batch": batch,
                "context": context,
                "bytes": means.numel() * 4,
                "elements": elements,
                **time_call(work),
            }


def profile_cpu(directory: Path, name: str, shape: ModelShape, progress: Progress, *, seed: int = 0) -> None:
    """Measure and write the bundle of this processor; ``progress(table, row)`` hears of every point."""
    generator = torch.Generator().manual_seed(seed)
    device, dtype = torch.device("cpu"), torch.float32
    sources: dict[str, Iterator[dict[str, Any]]] = {
        "link_runs": _copy_points(shape, generator),
        "sparse_decode_attention": _attention_points(shape, generator),
        "selection": _selection_points(shape, generator),
        "gemm": gemm_points(shape, time_call, device, dtype, _BATCHES),
        "elementwise": elementwise_points(shape, time_call, device, dtype, _BATCHES),
    }
    tables: dict[str, Rows] = {}
    shape = float32_shape(shape)
    for table, points in sources.items():
        for row in points:
            tables.setdefault(table, []).append(row)
            progress(table, row)
    for table, row in engine_points(shape, seed):
        tables.setdefault(table, []).append(row)
        progress(table, row)

    def fit(table: str, *features: str, direction: str | None = None):  # type: ignore[no-untyped-def]
        rows = [r for r in tables[table] if direction is None or r["direction"] == direction]
        values = np.array([[float(r[f]) for f in features] for r in rows])
        return fit_linear(features, values, np.array([r["median_us"] for r in rows]))

    (overhead,) = tables["engine_overhead"]
    fits = {
        "h2d": fit("link_runs", "bytes", direction="h2d"),
        "d2h": fit("link_runs", "bytes", direction="d2h"),
        "sparse_decode_attention": fit("sparse_decode_attention", "bytes"),
        "selection": fit("selection", "elements"),
        **engine_fits(shape, tables["engine_steps"], overhead),
    }
    threads = torch.get_num_threads()
    write_bundle(
        directory,
        name=name,
        device=f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}",
        status="measured",
        notes=(
            f"torch {torch.__version__}, {dtype}, shape {shape.name}; kernels alone: medians of calls; engine_*: the "
            "engine on random weights, fastest of its runs"
        ),
        tables=tables,
        fits=fits,
        models=simulator_numbers(tables["engine_steps"], overhead, fits),
        environment={"device": platform.machine(), "torch": torch.__version__, "python": platform.python_version()},
    )


def simulator_numbers(
    steps: Rows, overhead: dict[str, Any], fits: dict[str, LinearFit]
) -> dict[str, tuple[float | None, str]]:
    """The values of models.json, each with how it comes from the tables beside it."""
    select, attention, matrices = (fits[f"engine_{part}"] for part in ("select", "attention", "matrices"))
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    up, down = fits["h2d"], fits["d2h"]
    none = "nothing overlaps: the CPU engine copies and computes in one thread of control"
    whole = "part of topk_us_per_element: bytes of keys and numbers of blocks grow together"
    products, one_row_us, many_rows_us, flop_us = matrices.per_unit_us

    def rate(per_unit_us: float, scale: float) -> float | None:
        return scale / per_unit_us if per_unit_us > 0 else None

    return {
        "h2d_fixed_us": (
            fetch_fixed_us(steps, up.gbps()),
            "engine_steps: fetch of a layer beyond its bytes, median of cells",
        ),
        "h2d_gbps": (up.gbps(), "fit of link_runs, host to device"),
        "d2h_fixed_us": (down.fixed_us, "fit of link_runs, device to host"),
        "d2h_gbps": (down.gbps(), "the same fit"),
        "duplex_factor": (1.0, none),
        "beside_compute_factor": (1.0, none),
        "attention_fixed_us": (attention.fixed_us, "fit of engine_steps: the engine's attention phase"),
        "hbm_gbps": (rate(attention.per_unit_us[0], 1e-3), "the same fit"),
        "key_gbps": (None, whole),
        "gemm_fixed_us": (products, "fit of engine_steps: layer and output head less engine_overhead, a product"),
        "gemm_weight_gbps": (rate(many_rows_us, 1e-3), "the same fit, more than one row"),
        "gemv_weight_gbps": (rate(one_row_us, 1e-3), "the same fit, one row"),
        "gemm_tflops": (rate(flop_us, 1e-6), "the same fit"),
        "gemm_overlap": (0.0, "the same fit adds reading and multiplying up"),
        "select_fixed_us": (select.fixed_us, "fit of engine_steps: the engine's selection phase"),
        "select_us_per_row": (select.per_unit_us[0], "the same fit, a KV head of a sequence"),
        "topk_fixed_us": (0.0, "in select_fixed_us"),
        "topk_us_per_element": (select.per_unit_us[1] / 2, "the same fit, half its per-block part: two passes"),
        "topk_us_per_block": (0.0, "rows run one after another: topk_us_per_element holds it"),
        "host_per_layer_us": (
            overhead["other_us"] + overhead["no_miss_us"],
            "engine_overhead: a layer of a model of next to nothing, outside selection and attention",
        ),
        "host_per_step_us": (overhead["rest_us"], "engine_overhead: its step outside the layers"),
        "gpu_memory_bytes": (memory, "the host's memory: both tiers are in it"),
        "host_memory_bytes": (memory, "reported by the operating system"),
    }
