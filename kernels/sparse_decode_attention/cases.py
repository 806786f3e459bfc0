"""Cases of decode attention over slots and over pages by block id, and of the two-part merge."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.sparse_decode_attention import reference

# The log-sum-exp is fp32 whatever the types; a short query's products are exact.
_LSE_LIMIT = 1e-4


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``length``: context tokens of row 0, the others are shorter; the k blocks are spread over it, the last
    included. ``spare_rows``: slots that nobody names, in front of the used ones. ``paged``: blocks lie in pages of
    all heads, found through a table; ``narrow``: blocks of the longest context that the table is too short for."""
    filled = {"batch": 2, "kv_heads": 2, "group": 4, "head_dim": 64, "block": 64, "topk": 3, "length": 400}
    filled |= {"biased": 1, "holes": 0, "spare_rows": 3, "paged": 0, "narrow": 0, **params}
    return Case(name, dtype, filled, frozenset(uses.split()))


def attend_cases() -> list[Case]:
    both = "check small"
    edges = [_case(f"length-{n}", both, length=n, batch=1, kv_heads=1, topk=2) for n in (1, 63, 64, 65, 127, 129)]
    big: dict[str, Any] = {"head_dim": 128, "topk": 64, "group": 16}
    return [
        *edges,
        _case("fp32-d64-g3", both, "float32", group=3, holes=1),
        _case("fp32-d80-block-16", both, "float32", head_dim=80, block=16, topk=9, group=1),
        _case("bf16-d96-block-48", both, head_dim=96, block=48, kv_heads=3, topk=3),
        _case("bf16-d128-g16", both, head_dim=128, group=16, kv_heads=1, holes=1),
        _case("fp16-block-128", both, "float16", block=128, topk=2),
        _case("fp16-unbiased-block-80", both, "float16", block=80, biased=0, head_dim=80),
        _case("leading-holes", both, block=16, topk=20, holes=2),
        _case("empty-rows", both, holes=3),
        _case("pages-fp32-d64-g3", both, "float32", paged=1, group=3, holes=1),
        _case("pages-bf16-d80-block-16-narrow", both, paged=1, head_dim=80, block=16, topk=9, kv_heads=3, narrow=1),
        _case("pages-fp16-block-128", both, "float16", paged=1, block=128, topk=2, biased=0),
        _case("pages-bf16-leading-holes", both, paged=1, block=32, topk=12, holes=2, length=300),
        _case("pages-empty-rows", both, paged=1, holes=3),
        _case("pages-bf16-16K", "check", paged=1, length=16384, batch=5, holes=1, narrow=1, **big),
        # Page 65,536 of 2 x 16,384 elements starts at element 2^31.
        _case("pages-past-2^31-elements", "check", paged=1, length=16384, batch=3, spare_rows=131_072, **big),
        _case("fp32-4097", "check", "float32", length=4097, topk=64, head_dim=128, group=3, kv_heads=3, batch=3),
        _case("bf16-4097-holes", "check", length=4097, holes=1, batch=5, **big),
        _case("bf16-hkv8", "check", length=16384, batch=64, kv_heads=8, **(big | {"group": 4})),
        _case("fp16-block-32", "check", "float16", length=9000, block=32, batch=7, **big),
        # Row 131,072 of 16,384 elements starts at element 2^31.
        _case("past-2^31-elements", "check", length=16384, batch=3, spare_rows=131_072, **big),
        _case("b64-hkv2", "bench", length=16384, batch=64, **big),
        _case("b64-hkv8", "bench", length=16384, batch=64, kv_heads=8, **(big | {"group": 4})),
        _case("b16-hkv2", "bench", length=131072, batch=16, **big),
        _case("pages-b64-hkv2", "bench", paged=1, length=16384, batch=64, **big),
        _case("pages-b64-hkv8", "bench", paged=1, length=16384, batch=64, kv_heads=8, **(big | {"group": 4})),
        _case("b64-hkv2-block-128", "bench", length=16384, batch=64, **(big | {"block": 128, "topk": 32})),
        _case("b64-hkv2-block-32", "bench", length=16384, batch=64, **(big | {"block": 32, "topk": 128})),
        _case("b1-hkv2", "bench", length=16384, batch=1, **big),
    ]


def _block_ids(case: Case, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Ascending distinct ids int32 [batch, kv_head, k] of each row's context, its last block included, -1 padded."""
    p = case.params
    n_blocks = (lengths + p["block"] - 1) // p["block"]
    largest = max(p["topk"], int(n_blocks.max()))
    columns = torch.arange(largest, device=lengths.device)
    order = torch.rand((p["batch"], p["kv_heads"], largest), generator=generator, device=lengths.device)
    order = torch.where(columns == n_blocks.view(-1, 1, 1) - 1, 2.0, order)
    order = torch.where(columns < n_blocks.view(-1, 1, 1), order, -1.0)
    picked = order.topk(p["topk"], dim=-1)
    ids = torch.where(picked.values >= 0, picked.indices, largest).sort(-1).values
    return torch.where(ids == largest, -1, ids).int()


def _make_pages(case: Case, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A page table int64 [batch, block] of pages in random order behind the spare ones, with the case's holes; and the
    rows that it gives the entries, looked up one by one."""
    p = case.params
    n_blocks = -(-p["length"] // p["block"])
    table = torch.randperm(p["batch"] * n_blocks, generator=generator, device=ids.device).view(p["batch"], n_blocks)
    table = (table + -(-p["spare_rows"] // p["kv_heads"]))[:, : n_blocks - p["narrow"]]
    if p["holes"] == 1:
        table[0, ids[0, 0, 1].long()] = -1
    elif p["holes"] == 3:
        table[0] = -1
    batch = torch.arange(p["batch"], device=ids.device).view(-1, 1, 1)
    heads = torch.arange(p["kv_heads"], device=ids.device).view(-1, 1)
    pages = torch.where(ids < table.shape[1], table[batch, ids.long().clamp(0, table.shape[1] - 1)], -1)
    return table, torch.where((ids >= 0) & (pages >= 0), pages * p["kv_heads"] + heads, -1)


def make_attend_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Slots in random order, NaN wherever no valid token lies (in K, V and betas)."""
    p, dtype = case.params, case.torch_dtype
    bench = "bench" in case.uses
    lengths = torch.full((p["batch"],), p["length"], dtype=torch.int32, device=device)
    if not bench and p["batch"] > 1:
        lengths = torch.linspace(p["length"], max(1, p["length"] // 3), p["batch"], device=device).round().int()
    ids = _block_ids(case, lengths, generator)
    n_used = ids.numel()
    rows = torch.randperm(n_used, generator=generator, device=device).view_as(ids) + p["spare_rows"]
    if p["holes"] == 1:  # an entry without a slot, and a slot without a block
        rows[0, 0, 1] = -1
        ids[-1, -1, 0] = -1
    elif p["holes"] == 2:  # everything but the last existing entry
        last = (ids >= 0).sum(-1, keepdim=True) - 1
        ids = torch.where(torch.arange(p["topk"], device=device) == last, ids, -1)
    elif p["holes"] == 3:
        rows[0], ids[-1, 0] = -1, -1
    page_table, n_rows = None, n_used + p["spare_rows"]
    if p["paged"]:
        page_table, rows = _make_pages(case, ids, generator)
        n_rows = (int(page_table.max()) + 1) * p["kv_heads"]

    tokens = ids.unsqueeze(-1) * p["block"] + torch.arange(p["block"], device=device)
    valid = ((tokens < lengths.view(-1, 1, 1, 1)) & ((ids >= 0) & (rows >= 0)).unsqueeze(-1)).flatten(0, 2)
    place = torch.arange(n_used, device=device).view_as(ids)
    where = torch.where(rows >= 0, rows, place + p["spare_rows"]).flatten()
    where = where if (rows >= 0).all() else torch.where(valid.any(-1), where, -1)
    slots = torch.full((n_rows, 2, p["block"], p["head_dim"]), math.nan, dtype=dtype, device=device)
    betas = torch.full((slots.shape[0], p["block"]), math.nan, device=device)
    q = torch.randn((p["batch"], p["kv_heads"] * p["group"], p["head_dim"]), generator=generator, device=device)
    for start in range(0, n_used, 4096):
        part = torch.arange(start, min(start + 4096, n_used), device=device)
        part = part[where[part] >= 0]
        kv = torch.randn((len(part), 2, p["block"], p["head_dim"]), generator=generator, device=device)
        bias = torch.randn((len(part), p["block"]), generator=generator, device=device)
        unused = ~valid[part]
        slots[where[part]] = kv.masked_fill_(unused.view(-1, 1, p["block"], 1), math.nan).to(dtype)
        betas[where[part]] = bias.masked_fill_(unused, math.nan)
    inputs: dict[str, Any] = {
        "q": q.to(dtype),
        "slots": slots,
        "slot_betas": betas if p["biased"] else None,
        "slot_rows": None if p["paged"] else rows,
        "page_table": page_table,
        "block_ids": ids,
        "lengths": lengths,
        "n_tokens": int(valid.sum()),
    }
    if bench:
        kv = slots[rows.flatten()].view(p["batch"], p["kv_heads"], p["topk"], 2, p["block"], p["head_dim"])
        inputs["dense_keys"], inputs["dense_values"] = (kv[:, :, :, i].flatten(2, 3).contiguous() for i in (0, 1))
    return inputs


_NAMES = ("q", "slots", "slot_betas", "slot_rows", "block_ids", "lengths", "page_table")


def fast_attend(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.sparse_decode_attention.triton import sparse_decode_attention

    out, lse = sparse_decode_attention(*(inputs[name] for name in _NAMES))
    return {"out": out, "lse": lse}


def reference_attend(inputs: dict[str, Any]) -> Tensors:
    parts = []
    for i in range(len(inputs["q"])):  # one sequence at a time bounds the fp32 copy of its blocks
        rows = slice(i, i + 1)
        arguments = {name: inputs[name] for name in _NAMES}
        arguments |= {name: inputs[name][rows] for name in ("q", "block_ids", "lengths")}
        place = "slot_rows" if inputs["page_table"] is None else "page_table"
        arguments[place] = inputs[place][rows]
        arguments["q"] = arguments["q"].float()
        parts.append(reference.sparse_decode_attention(**arguments))
    return {"out": torch.cat([p[0] for p in parts]), "lse": torch.cat([p[1] for p in parts])}


def lse_error(lse: Tensor, expected: Tensor) -> float:
    """Largest absolute difference in natural-log units; infinite when the empty rows are not the same."""
    empty = expected == -math.inf
    if not torch.equal(empty, lse == -math.inf):
        return math.inf
    difference = (lse - expected).masked_fill(empty, 0.0).abs().max() if lse.numel() else torch.zeros(())
    return float(difference) if float(difference) == float(difference) else math.inf


def compare_attend(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, Any]:
    return {
        "out": (relative_error(out["out"], expected["out"]), RELATIVE_TOLERANCE[case.torch_dtype]),
        "lse": (lse_error(out["lse"], expected["lse"]), _LSE_LIMIT),
    }


def attend_bytes(case: Case, inputs: dict[str, Any]) -> int:
    """K, V and betas of valid tokens, queries, outputs."""
    q, slots = inputs["q"], inputs["slots"]
    token_bytes = 2 * slots.shape[3] * slots.element_size() + (4 if case.params["biased"] else 0)
    return inputs["n_tokens"] * token_bytes + 2 * q.numel() * q.element_size()


def attend_flops(case: Case, inputs: dict[str, Any]) -> int:
    return 4 * inputs["n_tokens"] * case.params["group"] * case.params["head_dim"]


def sdpa_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch's attention over the same K and V, gathered beforehand and without bias."""
    q = inputs["q"].unsqueeze(2)
    return functional.scaled_dot_product_attention(q, inputs["dense_keys"], inputs["dense_values"], enable_gqa=True)


# ---- merge


def merge_cases() -> list[Case]:
    both = "check small"
    return [
        _case("fp32-d96", both, "float32", head_dim=96),
        _case("bf16-d128", both, head_dim=128, batch=3),
        _case("fp16-d80", both, "float16", head_dim=80),
        _case("b64", "check bench", batch=64, group=16, head_dim=128),
    ]


def make_merge_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Two parts, some of them empty (zeros and -inf), one row empty in both."""
    p = case.params
    shape = (p["batch"], p["kv_heads"] * p["group"])
    inputs: dict[str, Any] = {}
    for part in ("a", "b"):
        lse = 3 * torch.randn(shape, generator=generator, device=device)
        out = torch.randn((*shape, p["head_dim"]), generator=generator, device=device)
        column = 0 if part == "a" else 1
        lse[0, column], lse[-1, -1] = -math.inf, -math.inf
        out[lse == -math.inf] = 0.0
        inputs |= {f"out_{part}": out.to(case.torch_dtype), f"lse_{part}": lse}
    return inputs


def fast_merge(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.sparse_decode_attention.triton import merge_partials

    out, lse = merge_partials(**inputs)
    return {"out": out, "lse": lse}


def reference_merge(inputs: dict[str, Any]) -> Tensors:
    out, lse = reference.merge_partials(**{name: x.float() for name, x in inputs.items()})
    return {"out": out, "lse": lse}


def merge_bytes(case: Case, inputs: dict[str, Any]) -> int:
    return 3 * sum(inputs[name].numel() * inputs[name].element_size() for name in ("out_a", "lse_a"))


OPERATIONS = (
    Operation(
        name="sparse_decode_attention",
        cases=attend_cases,
        make_inputs=make_attend_inputs,
        fast=fast_attend,
        reference=reference_attend,
        compare=compare_attend,
        bytes_moved=attend_bytes,
        flops=attend_flops,
        baselines={"sdpa": sdpa_baseline},
    ),
    Operation(
        name="merge_partials",
        cases=merge_cases,
        make_inputs=make_merge_inputs,
        fast=fast_merge,
        reference=reference_merge,
        compare=compare_attend,
        bytes_moved=merge_bytes,
        flops=lambda case, inputs: 3 * inputs["out_a"].numel(),
    ),
)
