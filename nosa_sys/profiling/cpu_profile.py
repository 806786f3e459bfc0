"""Profile a CPU: the reference kernels, block copies and matrices of one model shape, single precision."""

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
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.bundle import write_bundle
from nosa_sys.profiling.fits import fit_linear
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
    for table, points in sources.items():
        for row in points:
            tables.setdefault(table, []).append(row)
            progress(table, row)

    def fit(table: str, *features: str, direction: str | None = None):  # type: ignore[no-untyped-def]
        rows = [r for r in tables[table] if direction is None or r["direction"] == direction]
        values = np.array([[float(r[f]) for f in features] for r in rows])
        return fit_linear(features, values, np.array([r["median_us"] for r in rows]))

    fits = {
        "h2d": fit("link_runs", "bytes", direction="h2d"),
        "d2h": fit("link_runs", "bytes", direction="d2h"),
        "sparse_decode_attention": fit("sparse_decode_attention", "bytes"),
        "selection": fit("selection", "elements"),
    }
    layer = [r for r in tables["gemm"] if r["matrix"] != "lm_head"]
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    none = "nothing overlaps: the CPU engine copies and computes in one thread of control"

    write_bundle(
        directory,
        name=name,
        device=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        status="measured",
        notes=f"torch {torch.__version__}, {dtype}, shape {shape.name}; medians of calls",
        tables=tables,
        fits=fits,
        models={
            "h2d_fixed_us": (fits["h2d"].fixed_us, "fit of link_runs, host to device"),
            "h2d_gbps": (fits["h2d"].gbps(), "the same fit"),
            "d2h_fixed_us": (fits["d2h"].fixed_us, "fit of link_runs, device to host"),
            "d2h_gbps": (fits["d2h"].gbps(), "the same fit"),
            "duplex_factor": (1.0, none),
            "beside_compute_factor": (1.0, none),
            "hbm_gbps": (fits["sparse_decode_attention"].gbps(), "slope of the fit of sparse_decode_attention"),
            "key_gbps": (None, "part of topk_us_per_element: bytes of keys and numbers of blocks grow together"),
            "gemm_weight_gbps": (
                float(np.median([r["bytes"] / r["median_us"] / 1e3 for r in layer if r["m"] == 1])),
                "gemm: median of the layer's matrices at batch 1",
            ),
            "gemm_tflops": (
                max(r["flops"] / r["median_us"] / 1e6 for r in layer),
                "gemm: fastest of the layer's matrices",
            ),
            "topk_fixed_us": (fits["selection"].fixed_us / 2, "half the fixed part of selection: two passes"),
            "topk_us_per_element": (fits["selection"].per_unit_us[0] / 2, "half the per-block part of selection"),
            "topk_us_per_block": (0.0, "rows run one after another: topk_us_per_element holds it"),
            "host_per_layer_us": (0.0, "calls are timed whole, Python included"),
            "host_per_step_us": (0.0, "calls are timed whole, Python included"),
            "gpu_memory_bytes": (memory, "the host's memory: both tiers are in it"),
            "host_memory_bytes": (memory, "reported by the operating system"),
        },
        environment={"device": platform.machine(), "torch": torch.__version__, "python": platform.python_version()},
    )
