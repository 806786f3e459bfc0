"""Cases of dense paged decode attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.paged_decode_attention import reference
from nosa_sys.kernels.sparse_decode_attention.cases import lse_error


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``length``: context tokens of row 0, the others are shorter; ``spare_pages``: pages that nobody names;
    ``unknown_every``: so many blocks apart the table has no page (0: it has all)."""
    filled = {"batch": 2, "kv_heads": 2, "group": 4, "head_dim": 64, "block": 64, "length": 200, "spare_pages": 2}
    filled["unknown_every"] = 0
    return Case(name, dtype, filled | params, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    edges = [_case(f"length-{n}", both, length=n, batch=1, kv_heads=1) for n in (1, 63, 64, 65, 129)]
    big: dict[str, Any] = {"head_dim": 128, "length": 16384, "batch": 16}
    return [
        *edges,
        _case("fp32-d64-g3", both, "float32", group=3, kv_heads=3),
        _case("bf16-d80-block-16", both, head_dim=80, block=16, group=16, kv_heads=1),
        _case("fp16-d96-block-48", both, "float16", head_dim=96, block=48, group=1),
        _case("empty-sequence", both, batch=3, length=150, block=32),
        _case("unknown-pages", both, block=16, unknown_every=3, kv_heads=1),
        _case("unknown-pages-block-64", both, "float32", length=400, unknown_every=2),
        _case("no-pages", both, block=32, unknown_every=1),
        _case("fp32-4097", "check", "float32", length=4097, head_dim=128, batch=3, kv_heads=3, group=3),
        _case("bf16-16K", "check", **(big | {"batch": 5, "group": 16})),
        # Page 65,536 of 2 x 16,384 elements starts at element 2^31.
        _case("past-2^31-elements", "check", **(big | {"batch": 3, "spare_pages": 65_600})),
        _case("16K-b16-hkv2", "bench", **(big | {"group": 16})),
        _case("16K-b16-hkv8", "bench", **(big | {"kv_heads": 8})),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Pages in random order; NaN past each length and in pages that nobody names."""
    p, dtype = case.params, case.torch_dtype
    bench = "bench" in case.uses
    lengths = torch.full((p["batch"],), p["length"], dtype=torch.int32, device=device)
    if not bench:
        for row in range(1, p["batch"]):
            lengths[row] = 0 if row == 2 else p["length"] * (p["batch"] - row) // p["batch"]
    n_entries = -(-p["length"] // p["block"])
    blocks = torch.arange(n_entries, device=device)
    table = torch.randperm(p["batch"] * n_entries, generator=generator, device=device).view(-1, n_entries)
    table = (table + p["spare_pages"]).int()
    shape = (p["batch"] * n_entries + p["spare_pages"], p["kv_heads"], 2, p["block"], p["head_dim"])
    pages = torch.full(shape, math.nan, dtype=dtype, device=device)
    for row in range(p["batch"]):
        content = torch.randn((n_entries, *shape[1:]), generator=generator, device=device)
        tokens = blocks.unsqueeze(1) * p["block"] + torch.arange(p["block"], device=device)
        content.masked_fill_((tokens >= lengths[row]).view(n_entries, 1, 1, -1, 1), math.nan)
        pages[table[row].long()] = content.to(dtype)
    table = torch.where(blocks * p["block"] < lengths.unsqueeze(1), table, -1)
    if p["unknown_every"]:
        table[:, :: p["unknown_every"]] = -1
    q = torch.randn((p["batch"], p["kv_heads"] * p["group"], p["head_dim"]), generator=generator, device=device)
    inputs: dict[str, Any] = {"q": q.to(dtype), "pages": pages, "table": table, "lengths": lengths}
    if bench:
        kv = pages[table.long()].transpose(1, 2)  # [batch, kv_head, entry, 2, block, head_dim]
        inputs["dense_keys"], inputs["dense_values"] = (kv[:, :, :, i].flatten(2, 3).contiguous() for i in (0, 1))
    return inputs


_NAMES = ("q", "pages", "table", "lengths")


def fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.paged_decode_attention.triton import paged_decode_attention

    out, lse = paged_decode_attention(*(inputs[name] for name in _NAMES))
    return {"out": out, "lse": lse}


def reference_attend(inputs: dict[str, Any]) -> Tensors:
    arguments = {name: inputs[name] for name in _NAMES}
    out, lse = reference.paged_decode_attention(**(arguments | {"q": inputs["q"].float()}))
    return {"out": out, "lse": lse}


def compare(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    return {
        "out": (relative_error(out["out"], expected["out"]), RELATIVE_TOLERANCE[case.torch_dtype]),
        "lse": (lse_error(out["lse"], expected["lse"]), 1e-4),
    }


def bytes_moved(case: Case, inputs: dict[str, Any]) -> int:
    """K and V of every token, queries, outputs."""
    pages, q = inputs["pages"], inputs["q"]
    token_bytes = 2 * pages.shape[1] * pages.shape[4] * pages.element_size()
    return int(inputs["lengths"].sum()) * token_bytes + 2 * q.numel() * q.element_size()


def flops(case: Case, inputs: dict[str, Any]) -> int:
    return 4 * int(inputs["lengths"].sum()) * inputs["q"].shape[1] * inputs["q"].shape[2]


def sdpa_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch's attention over contiguous K and V: no pages to follow."""
    q = inputs["q"].unsqueeze(2)
    return functional.scaled_dot_product_attention(q, inputs["dense_keys"], inputs["dense_values"], enable_gqa=True)


OPERATION = Operation(
    name="paged_decode_attention",
    cases=cases,
    make_inputs=make_inputs,
    fast=fast,
    reference=reference_attend,
    compare=compare,
    bytes_moved=bytes_moved,
    flops=flops,
    baselines={"sdpa": sdpa_baseline},
)
