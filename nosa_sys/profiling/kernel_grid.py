"""The grid of every GPU kernel: batch x context x k x block size x KV heads, on the kernels' own case builders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nosa_sys.kernels.case import Case, Operation
from nosa_sys.kernels.registry import load_operation
from nosa_sys.kernels.timing import time_in_graph

# (KV heads, group, head_dim): nosa-1b, nosa-3b and nosa-8b, llama-3-8b, smollm2
HEAD_LAYOUTS = ((2, 8, 128), (2, 16, 128), (8, 4, 128), (3, 3, 64))
BATCHES = (1, 8, 16, 32, 64, 128)
CONTEXTS = (16384, 65536, 131072)
MAX_CASE_BYTES = 24 * 2**30


@dataclass(frozen=True)
class Grid:
    """Points of one kernel: a benchmark case of its list with these parameters changed."""

    module: str
    operation: str
    template: str
    points: tuple[Mapping[str, int], ...]


def _heads(layout: tuple[int, int, int]) -> dict[str, int]:
    kv_heads, group, head_dim = layout
    return {"kv_heads": kv_heads, "group": group, "head_dim": head_dim}


def _fits(*sizes: int) -> bool:
    product = 1
    for size in sizes:
        product *= size
    return product <= MAX_CASE_BYTES


def _selection_points(fp32_means: int) -> Iterator[dict[str, int]]:
    for context in CONTEXTS:
        for batch in BATCHES:
            for layout in HEAD_LAYOUTS:
                if batch * context > 4 * 2**20 or (batch not in (1, 16, 64) and layout != HEAD_LAYOUTS[1]):
                    continue
                yield {"batch": batch, "blocks": context // 64, "fp32_means": fp32_means, **_heads(layout)}
    for block, topk in ((32, 128), (128, 32)):
        sizes = {"topk": topk, "local": 1024 // block, "select": 1024 // block}
        yield {"batch": 64, "blocks": 16384 // block, "block": block, "fp32_means": fp32_means, **sizes}
    for topk in (32, 128):
        yield {"batch": 64, "blocks": 256, "topk": topk, "local": topk // 4, "select": topk // 4} | {
            "fp32_means": fp32_means
        }


def _attention_points() -> Iterator[dict[str, int]]:
    for layout in HEAD_LAYOUTS:
        for batch in BATCHES:
            for topk in (16, 32, 64, 128):
                if topk in (16, 128) and batch not in (1, 16, 64):
                    continue
                if _fits(batch, layout[0], topk, 2 * 64, layout[2], 2):
                    yield {"batch": batch, "topk": topk, "block": 64, "length": 16384, **_heads(layout)}
    for block, topk in ((32, 128), (128, 32)):
        for batch in (16, 64):
            yield {"batch": batch, "topk": topk, "block": block, "length": 16384, **_heads(HEAD_LAYOUTS[1])}


def _dense_points() -> Iterator[dict[str, int]]:
    for layout in HEAD_LAYOUTS:
        for context in (4096, *CONTEXTS):
            for batch in (1, 4, 16, 64):
                if _fits(batch, layout[0], context, 2, layout[2], 2):
                    yield {"batch": batch, "length": context, "block": 64, **_heads(layout)}


def grids() -> list[Grid]:
    """Every kernel with its points."""
    plans = tuple(
        {"n_rows": rows, "k": k, "slots": slots, "keep": int(slots > k), "n_blocks": n_blocks, "heads": 2}
        for rows in (2, 32, 128, 512)
        for k in (32, 64)
        for slots in (k, k * 5 // 4, 2 * k)
        for n_blocks in (256, 1024)
        if n_blocks == 256 or rows == 128
    )
    appends = tuple({"batch": b, **_heads(h)} for b in (4, *BATCHES[1:]) for h in HEAD_LAYOUTS)
    chunks = tuple({"first": f, **_heads(h)} for f in (3584, 15872, 64512) for h in HEAD_LAYOUTS)
    return [
        Grid("eviction_head", "append_token", "b64-2-heads", appends),
        Grid("block_selection", "score_and_select", "16K-b64-fp32-means", tuple(_selection_points(1))),
        Grid("block_selection", "score_and_select", "16K-b64-bf16-means", tuple(_selection_points(0))),
        Grid("set_difference", "slot_plan", "b128-k64-s64", plans),
        Grid("sparse_decode_attention", "sparse_decode_attention", "b64-hkv2", tuple(_attention_points())),
        Grid("paged_decode_attention", "paged_decode_attention", "16K-b16-hkv2", tuple(_dense_points())),
        Grid("prefill_attention", "prefill_attention", "16K-chunk-hkv2", chunks),
        Grid("prefill_attention", "prefill_selection", "16K-chunk", chunks),
    ]


def _template(grid: Grid) -> tuple[Operation, Case]:
    operation = next(o for o in load_operation(grid.module) if o.name == grid.operation)
    return operation, next(c for c in operation.cases() if c.name == grid.template and "bench" in c.uses)


def measure(grid: Grid, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One row a point: its parameters, bytes, FLOPs and time."""
    operation, template = _template(grid)
    device = torch.device("cuda")
    for index, changes in enumerate(grid.points):
        case = dataclasses.replace(template, params={**template.params, **changes})
        generator = torch.Generator(device=device)
        generator.manual_seed(seed + index)
        inputs = operation.make_inputs(case, device, generator)
        launch = operation.launch or operation.fast
        timing = time_in_graph(lambda launch=launch, inputs=inputs: launch(inputs), copies=4, n_replays=7)  # type: ignore[misc]
        yield {
            "kernel": operation.name,
            "dtype": case.dtype,
            **case.params,
            "bytes": operation.bytes_moved(case, inputs),
            "flops": operation.flops(case, inputs),
            **dataclasses.asdict(timing),
        }
        del inputs
        torch.cuda.empty_cache()
