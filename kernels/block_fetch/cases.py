"""Cases of fetch and write-back: the Triton gather, the bulk copy engine, the batched DMA call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.block_fetch import reference
from nosa_sys.kernels.block_fetch.reference import Part
from nosa_sys.kernels.case import Case, Operation, Tensors

_POISON = float("nan")
_PARTS: tuple[Part, ...] = ("kv", "k", "v")


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """Defaults: all pairs listed, none skipped, count on the device, pools of twice the list, whole blocks."""
    filled = {"block": 64, "head_dim": 128, "n_runs": 64, "n_listed": -1, "skip_every": 0, "n_ctas": 16, **params}
    filled.setdefault("n_host_rows", max(2 * filled["n_runs"], 8))
    filled.setdefault("n_slot_rows", max(2 * filled["n_runs"], 8))
    return Case(name, dtype, filled, frozenset(uses.split()))


def check_cases() -> list[Case]:
    both = "check small"
    return [
        _case("skips-and-count", both, n_runs=13, n_listed=11, skip_every=3, head_dim=64, block=32, n_ctas=2),
        _case("one-run", both, n_runs=1, head_dim=64, block=16),
        _case("empty-list", both, n_runs=8, n_listed=0, head_dim=64, block=16),
        _case("no-pairs", both, n_runs=0, head_dim=64, block=16),
        _case("all-skipped", both, n_runs=6, skip_every=1, head_dim=64, block=16),
        _case("odd-head-80", both, n_runs=7, skip_every=4, head_dim=80, block=48, n_ctas=3),
        _case("odd-head-96", both, "float16", n_runs=5, head_dim=96, block=16, n_ctas=4),
        _case("fp32", both, "float32", n_runs=5, head_dim=64, block=16, n_ctas=1),
        _case("more-ctas-than-chunks", both, n_runs=3, head_dim=64, block=16, n_ctas=64),
        _case("fp32-64", "check", "float32", n_runs=301, n_listed=300, skip_every=7),
        _case("bf16-64", "check", n_runs=1025, skip_every=5),
        _case("one-cta", "check", n_runs=70, n_ctas=1),
        _case("all-sms", "check", n_runs=500, n_ctas=132),
        # Row 131,072 of 16,384 elements starts at element 2^31, in both pools.
        _case("past-2^31-elements", "check", n_runs=64, n_host_rows=131_200, n_slot_rows=131_200),
    ]


def part_cases() -> list[Case]:
    """Keys or values alone (``part`` indexes _PARTS): the other half of every target row stays as it is."""
    both = "check small"
    return [
        _case("keys", both, n_runs=9, n_listed=8, skip_every=3, head_dim=64, block=32, n_ctas=2, part=1),
        _case("values-head-80", both, n_runs=5, head_dim=80, block=48, n_ctas=3, part=2),
        _case("values-fp32", both, "float32", n_runs=3, head_dim=64, block=16, part=2),
        _case("values-past-2^31", "check", n_runs=64, n_host_rows=131_200, n_slot_rows=131_200, part=2),
        _case("2048x16KiB-keys", "check bench", n_runs=2048, n_host_rows=8192, part=1),
    ]


def bench_cases() -> list[Case]:
    cases = []
    for head_dim, size in ((64, "16KiB"), (128, "32KiB")):
        for n in (8, 64, 256, 1024, 2048, 4096, 8192):
            name = f"{n}x{size}"
            cases.append(_case(name, "bench", n_runs=n, head_dim=head_dim, n_host_rows=max(2 * n, 8192)))
    for n_ctas in (4, 8, 12, 24, 32, 132):
        cases.append(_case(f"2048x32KiB-{n_ctas}cta", "bench", n_runs=2048, n_ctas=n_ctas, n_host_rows=8192))
    cases.append(_case("8192x4KiB", "bench", n_runs=8192, block=16, head_dim=64, n_host_rows=16384))
    cases.append(_case("0x32KiB", "bench", n_runs=1024, n_listed=0))
    return cases


def _distinct_rows(n_rows: int, n: int, generator: torch.Generator) -> Tensor:
    """n distinct rows in random order, the last one the far end of the pool."""
    rows = torch.randperm(n_rows, generator=generator, device=generator.device)[:n]
    if n:
        rows = torch.where(rows == n_rows - 1, rows[-1], rows)
        rows[-1] = n_rows - 1
    return rows


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Random source rows, poisoned target, row lists with skips; ``count`` int32 [1].

    The host pool is pinned where there is a GPU. Rows of either list are distinct.
    """
    p, dtype = case.params, case.torch_dtype
    n, run = p["n_runs"], (2, p["block"], p["head_dim"])
    host_rows = _distinct_rows(p["n_host_rows"], n, generator)
    slot_rows = _distinct_rows(p["n_slot_rows"], n, generator)
    host = torch.empty((p["n_host_rows"], *run), dtype=dtype, pin_memory=device.type == "cuda")
    used = host_rows.unique().cpu()
    host[used] = torch.randn((used.numel(), *run), generator=generator, device=device).to(dtype).cpu()
    slots = torch.full((p["n_slot_rows"], *run), _POISON, dtype=dtype, device=device)
    # Only after the data is drawn: a skipped pair still has random data at its row.
    if p["skip_every"]:
        host_rows[:: p["skip_every"]] = -1
        slot_rows[1 :: 2 * p["skip_every"]] = -1
    n_listed = n if p["n_listed"] < 0 else p["n_listed"]
    count = torch.tensor([n_listed], dtype=torch.int32, device=device)
    listed = [(h, s) for h, s in zip(host_rows.tolist(), slot_rows.tolist(), strict=True)][:n_listed]
    moved = sum(h >= 0 and s >= 0 for h, s in listed)
    part = _PARTS[p.get("part", 0)]
    run_bytes = host[0].numel() * host.element_size() // (1 if part == "kv" else 2)
    return {
        "host": host,
        "slots": slots,
        "host_rows": host_rows,
        "slot_rows": slot_rows,
        "count": count,
        "n_ctas": p["n_ctas"],
        "part": part,
        "host_list": [h for h, _ in listed],
        "slot_list": [s for _, s in listed],
        "bytes": moved * run_bytes,
    }


def make_write_back_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """The same lists with the data in the slots and the host pool poisoned."""
    inputs = make_inputs(case, device, generator)
    host, slots, rows = inputs["host"], inputs["slots"], inputs["slot_rows"]
    source = rows[rows >= 0]
    slots[source] = torch.randn((source.numel(), *slots.shape[1:]), generator=generator, device=device).to(slots.dtype)
    host.fill_(_POISON)
    return inputs


def _triton_fetch(inputs: dict[str, Any], slots: Tensor) -> None:
    from nosa_sys.kernels.block_fetch.triton import copy_runs

    lists = inputs["host_rows"], inputs["slot_rows"], inputs["count"]
    copy_runs(inputs["host"], slots, *lists, part=inputs["part"], n_ctas=inputs["n_ctas"])


def _triton_write_back(inputs: dict[str, Any], host: Tensor) -> None:
    from nosa_sys.kernels.block_fetch.triton import copy_runs

    copy_runs(inputs["slots"], host, inputs["slot_rows"], inputs["host_rows"], inputs["count"], n_ctas=inputs["n_ctas"])


def _bulk_fetch(inputs: dict[str, Any], slots: Tensor, n_ctas: int = 4) -> None:
    from nosa_sys.kernels.block_fetch.bulk import bulk_copy_runs

    bulk_copy_runs(inputs["host"], slots, inputs["host_rows"], inputs["slot_rows"], inputs["count"], n_ctas=n_ctas)


def _dma_fetch(inputs: dict[str, Any], slots: Tensor) -> None:
    import numpy as np

    from nosa_sys.kernels.block_fetch.dma import batched_copy_runs

    batched_copy_runs(
        inputs["host"],
        slots,
        np.array(inputs["host_list"], dtype=np.int64),
        np.array(inputs["slot_list"], dtype=np.int64),
    )


def _naive_fetch(inputs: dict[str, Any]) -> None:
    from nosa_sys.kernels.block_fetch.dma import naive_copy_runs

    if len(inputs["host_list"]) > 2048:
        raise NotImplementedError("one call a block is measured up to 2048 blocks")
    naive_copy_runs(inputs["host"], inputs["slots"], inputs["host_list"], inputs["slot_list"])


def _one_memcpy(inputs: dict[str, Any]) -> None:
    """One contiguous copy of as many bytes: what the link gives at best."""
    n = min(len(inputs["host_list"]), inputs["slots"].shape[0], inputs["host"].shape[0])
    inputs["slots"][:n].copy_(inputs["host"][:n], non_blocking=True)


def _fetch_with(launch: Callable[[dict[str, Any], Tensor], None]) -> Callable[[dict[str, Any]], Tensors]:
    def fast(inputs: dict[str, Any]) -> Tensors:
        slots = inputs["slots"].clone()
        launch(inputs, slots)
        return {"slots": slots}

    return fast


def _fast_write_back(inputs: dict[str, Any]) -> Tensors:
    pinned = inputs["slots"].is_cuda
    host = torch.empty(inputs["host"].shape, dtype=inputs["host"].dtype, pin_memory=pinned).copy_(inputs["host"])
    _triton_write_back(inputs, host)
    if pinned:
        torch.cuda.synchronize()
    return {"host": host}


def _reference_rows(inputs: dict[str, Any], name: str) -> Tensor:
    return torch.tensor(inputs[name], dtype=torch.int64)


def _reference_fetch(inputs: dict[str, Any]) -> Tensors:
    slots = inputs["slots"].clone()
    rows = _reference_rows(inputs, "slot_list").to(slots.device)
    reference.fetch_blocks(inputs["host"], slots, inputs["host_rows"][: rows.numel()], rows, inputs["part"])
    return {"slots": slots}


def _reference_write_back(inputs: dict[str, Any]) -> Tensors:
    host = inputs["host"].clone()
    n = len(inputs["slot_list"])
    reference.write_back(inputs["slots"], host, inputs["slot_rows"][:n], inputs["host_rows"][:n])
    return {"host": host}


def compare(
    case: Case, inputs: dict[str, Any], fast: Tensors, reference_out: Tensors
) -> dict[str, tuple[float, float]]:
    """Words that differ, bit for bit, untouched rows included."""
    return {
        name: (float((fast[name].view(torch.int32) != reference_out[name].view(torch.int32)).sum()), 0.0)
        for name in reference_out
    }


def _bytes(case: Case, inputs: dict[str, Any]) -> int:
    """Bytes over the link."""
    return inputs["bytes"]


def _no_flops(case: Case, inputs: dict[str, Any]) -> int:
    return 0


FETCH = Operation(
    name="block_fetch",
    cases=lambda: check_cases() + part_cases() + bench_cases(),
    make_inputs=make_inputs,
    fast=_fetch_with(_triton_fetch),
    reference=_reference_fetch,
    compare=compare,
    bytes_moved=_bytes,
    flops=_no_flops,
    launch=lambda inputs: _triton_fetch(inputs, inputs["slots"]),
    baselines={
        "memcpy": _one_memcpy,
        "dma": lambda inputs: _dma_fetch(inputs, inputs["slots"]),
        "naive": _naive_fetch,
        "bulk_1cta": lambda inputs: _bulk_fetch(inputs, inputs["slots"], 1),
        "bulk_2cta": lambda inputs: _bulk_fetch(inputs, inputs["slots"], 2),
        "bulk_4cta": lambda inputs: _bulk_fetch(inputs, inputs["slots"], 4),
    },
)

WRITE_BACK = Operation(
    name="write_back",
    cases=lambda: check_cases() + [_case(f"{n}x32KiB", "bench", n_runs=n) for n in (4, 64, 1024, 4096)],
    make_inputs=make_write_back_inputs,
    fast=_fast_write_back,
    reference=_reference_write_back,
    compare=compare,
    bytes_moved=_bytes,
    flops=_no_flops,
    launch=lambda inputs: _triton_write_back(inputs, inputs["host"]),
)

# Checked like the Triton kernel, timed as its baselines.
BULK_FETCH = replace(
    FETCH,
    name="bulk_fetch",
    cases=check_cases,
    fast=_fetch_with(_bulk_fetch),
    launch=lambda inputs: _bulk_fetch(inputs, inputs["slots"]),
    baselines={},
)
DMA_FETCH = replace(
    FETCH,
    name="dma_fetch",
    cases=check_cases,
    fast=_fetch_with(_dma_fetch),
    launch=lambda inputs: _dma_fetch(inputs, inputs["slots"]),
    baselines={},
)

OPERATIONS = (FETCH, WRITE_BACK, BULK_FETCH, DMA_FETCH)
