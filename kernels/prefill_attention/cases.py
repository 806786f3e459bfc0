"""Cases of prefill attention and of the selection for every prefill query."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.prefill_attention import reference
from nosa_sys.methods import METHODS, get_method
from nosa_sys.sparse_config import SparseConfig

_METHODS = tuple(METHODS)


def _case(name: str, uses: str, dtype: str = "bfloat16", *, method: str = "nosa", **params: int) -> Case:
    """``first``: position of the first query. ``drift`` in percent: how different the rankings of two queries are."""
    filled = {"tokens": 20, "first": 90, "kv_heads": 2, "group": 4, "head_dim": 64, "block": 32, "topk": 4}
    filled |= {"dense": 0, "biased": 1, "drift": 50, "method": _METHODS.index(method)}
    return Case(name, dtype, filled | params, frozenset(uses.split()))


# ---- attention


def attend_cases() -> list[Case]:
    both = "check small"
    chunk: dict[str, Any] = {"tokens": 512, "first": 15872, "block": 64, "topk": 64, "head_dim": 128, "drift": 5}
    return [
        _case("fp32-g3", both, "float32", group=3, tokens=33),
        _case("fp32-dense-d80", both, "float32", dense=1, head_dim=80, group=1, tokens=40, first=0),
        _case("bf16-d96-block-48", both, head_dim=96, block=48, kv_heads=3, tokens=17),
        _case("bf16-g16-d128", both, head_dim=128, group=16, kv_heads=1, block=64, tokens=9),
        _case("fp16-block-16", both, "float16", block=16, group=2, topk=7),
        _case("fp16-block-128-unbiased", both, "float16", block=128, topk=2, biased=0, first=300, tokens=5),
        _case("bf16-dense", both, dense=1, block=64, first=63, tokens=3),
        _case("first-tokens", both, first=0, tokens=40, block=16),
        _case("fp32-chunk", "check", "float32", **(chunk | {"tokens": 100, "first": 4097, "kv_heads": 3, "group": 3})),
        _case("bf16-chunk", "check", **(chunk | {"group": 16})),
        _case("bf16-chunk-unrelated", "check", **(chunk | {"group": 16, "drift": 1000, "tokens": 130})),
        _case("bf16-chunk-dense", "check", **(chunk | {"dense": 1, "kv_heads": 8, "first": 4001})),
        _case("16K-chunk-hkv2", "bench", **(chunk | {"group": 16})),
        _case("16K-chunk-hkv8", "bench", **(chunk | {"kv_heads": 8})),
        _case("16K-chunk-hkv2-dense", "bench", **(chunk | {"group": 16, "dense": 1})),
    ]


def _selected(case: Case, device: torch.device, generator: torch.Generator) -> Tensor:
    """int32 [token, kv_head, k], ascending, -1 padded: the current block and the best of slowly drifting rankings."""
    p = case.params
    positions = p["first"] + torch.arange(p["tokens"], device=device)
    n_blocks = int(positions[-1]) // p["block"] + 1
    blocks = torch.arange(n_blocks, device=device)
    shape = (p["tokens"], p["kv_heads"], n_blocks)
    ranking = torch.randn(shape[1:], generator=generator, device=device)
    ranking = ranking + p["drift"] / 100 * torch.randn(shape, generator=generator, device=device)
    current = (positions // p["block"]).view(-1, 1, 1)
    ranking = torch.where(blocks == current, math.inf, ranking).masked_fill(blocks > current, -math.inf)
    picked = ranking.topk(min(p["topk"], n_blocks), dim=-1)
    ids = torch.where(picked.values == -math.inf, n_blocks, picked.indices).sort(-1).values
    ids = functional.pad(ids, (0, p["topk"] - ids.shape[2]), value=n_blocks)
    return torch.where(ids == n_blocks, -1, ids).int()


def make_attend_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """K, V and betas hold some tokens more than the last query sees, NaN; one query selects nothing."""
    p, dtype = case.params, case.torch_dtype
    context = p["first"] + p["tokens"]
    shape = (context + 40, p["kv_heads"], p["head_dim"])

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    k, v = draw(*shape).to(dtype), draw(*shape).to(dtype)
    beta = draw(*shape[:2])
    for x in (k, v, beta):
        x[context:] = math.nan
    block_ids = None
    if not p["dense"]:
        block_ids = _selected(case, device, generator)
        if "bench" not in case.uses:
            block_ids[1] = -1
    return {
        "q": draw(p["tokens"], p["kv_heads"] * p["group"], p["head_dim"]).to(dtype),
        "k": k,
        "v": v,
        "beta": beta if p["biased"] else None,
        "block_ids": block_ids,
        "first_position": p["first"],
        "block_size": p["block"],
    }


def fast_attend(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.prefill_attention.triton import prefill_attention

    return {"out": prefill_attention(**inputs)}


def reference_attend(inputs: dict[str, Any]) -> Tensors:
    floats = {name: inputs[name].float() for name in ("q", "k", "v")}
    return {"out": reference.prefill_attention(**(inputs | floats))}


def compare_attend(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, Any]:
    return {"out": (relative_error(out["out"], expected["out"]), RELATIVE_TOLERANCE[case.torch_dtype])}


def _seen_tokens(inputs: dict[str, Any]) -> int:
    """Tokens seen, summed over queries and KV heads."""
    n_tokens, n_kv_heads = inputs["q"].shape[0], inputs["k"].shape[1]
    positions = inputs["first_position"] + torch.arange(n_tokens, device=inputs["q"].device).view(-1, 1, 1)
    if inputs["block_ids"] is None:
        return int((positions + 1).sum()) * n_kv_heads
    starts = inputs["block_ids"] * inputs["block_size"]
    seen = (positions + 1 - starts).clamp(0, inputs["block_size"])
    return int(torch.where(inputs["block_ids"] >= 0, seen, 0).sum())


def attend_bytes(case: Case, inputs: dict[str, Any]) -> int:
    """Compulsory traffic: K, V, betas and queries read once, outputs written. The kernel is bound by its FLOPs."""
    context = inputs["first_position"] + inputs["q"].shape[0]
    k, q = inputs["k"], inputs["q"]
    token_bytes = k.shape[1] * (2 * k.shape[2] * k.element_size() + 4)
    return context * token_bytes + 2 * q.numel() * q.element_size()


def attend_flops(case: Case, inputs: dict[str, Any]) -> int:
    return 4 * _seen_tokens(inputs) * case.params["group"] * case.params["head_dim"]


def sdpa_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch's dense causal attention over the same context, without selection or bias."""
    from torch.nn.attention.bias import causal_lower_right

    context = inputs["first_position"] + inputs["q"].shape[0]
    q, k, v = (inputs[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v"))
    k, v = (x[:, :, :context].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], context))


# ---- selection


def selection_cases() -> list[Case]:
    both = "check small"
    sizes: dict[str, Any] = {"topk": 6, "first": 170, "block": 32}
    full: dict[str, Any] = {"topk": 64, "block": 64, "head_dim": 128, "group": 16, "tokens": 512}
    return [
        _case("fp32", both, "float32", **sizes),
        _case("bf16-infllmv2", both, method="infllmv2", **sizes),
        _case("fp16-dma", both, "float16", method="dma", **sizes),
        _case("bf16-means", both, means=1, **sizes),
        _case("full", both, method="full", **(sizes | {"tokens": 5})),
        _case("from-the-start", both, "float32", topk=5, first=0, tokens=200, kv_heads=1, group=2),
        _case("fp32-g3", both, "float32", **(sizes | {"group": 3, "kv_heads": 3, "first": 333, "tokens": 45})),
        _case("across-the-budget", both, group=3, topk=5, first=141, tokens=40),
        _case("bf16-16K", "check", first=15872, **full),
        _case("bf16-16K-g3", "check", first=9000, **(full | {"group": 3, "kv_heads": 3, "head_dim": 64})),
        _case("fp32-16K-g3", "check", "float32", first=9000, **(full | {"group": 3, "kv_heads": 3, "head_dim": 64})),
        _case("fp32-16K", "check", "float32", first=15872, **(full | {"tokens": 130})),
        _case("fp16-16K", "check", "float16", first=7000, **(full | {"tokens": 130})),
        _case("bf16-means-16K", "check", means=1, first=15000, **full),
        _case("bf16-16K-odd", "check", first=8191, **(full | {"tokens": 129, "kv_heads": 3})),
        _case("16K-chunk", "bench", first=15872, **full),
        _case("128K-chunk", "bench", first=130_560, **full),
    ]


def _configuration(case: Case) -> SparseConfig:
    p = case.params
    small = p["topk"] < 64
    return SparseConfig(
        block_size=p["block"],
        topk=p["topk"],
        init_blocks=1,
        window_size=p["block"] * (1 if small else 16),
        select_blocks=2 if small else 16,
    )


def make_selection_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Means of windows past the last query's are NaN; ``means`` 1 keeps those of keys in the queries' type."""
    p, cfg = case.params, _configuration(case)
    n_windows = cfg.n_windows(p["first"] + p["tokens"])

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    key_means, beta_means = draw(p["kv_heads"], n_windows + 5, p["head_dim"]), draw(p["kv_heads"], n_windows + 5)
    key_means[:, n_windows:], beta_means[:, n_windows:] = math.nan, math.nan
    return {
        "q": (2 * draw(p["tokens"], p["kv_heads"] * p["group"], p["head_dim"])).to(case.torch_dtype),
        "key_means": key_means.to(case.torch_dtype) if p.get("means") else key_means,
        "beta_means": beta_means,
        "first_position": p["first"],
        "cfg": cfg,
        "method": get_method(_METHODS[p["method"]]),
    }


def fast_selection(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.prefill_attention.selection import prefill_selection

    return prefill_selection(**inputs)._asdict()


def launch_selection(inputs: dict[str, Any]) -> Selection:
    """Without the look at the errors, which waits for the device and so cannot be captured."""
    from nosa_sys.kernels.prefill_attention.selection import queue_selection

    return queue_selection(**inputs)[0]


def reference_selection(inputs: dict[str, Any]) -> Tensors:
    return reference.prefill_selection(**(inputs | {"q": inputs["q"].float()}))._asdict()


def compare_selection(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, Any]:
    """Two scores closer than their rounding may rank differently: a few blocks in ten thousand may differ."""
    share = float((out["block_ids"] != expected["block_ids"]).double().mean())
    return {"block_ids": (share, 1e-3), "counts": (float((out["counts"] != expected["counts"]).sum()), 0.0)}


def selection_bytes(case: Case, inputs: dict[str, Any]) -> int:
    """Compulsory traffic: means once, queries once, selections out."""
    q, means = inputs["q"], inputs["key_means"]
    selected = q.shape[0] * means.shape[0] * case.params["topk"] * 5
    return means.numel() * means.element_size() + q.numel() * q.element_size() + selected


def selection_flops(case: Case, inputs: dict[str, Any]) -> int:
    q, cfg = inputs["q"], inputs["cfg"]
    first = inputs["first_position"]
    return sum(2 * cfg.n_windows(first + t + 1) * q.shape[1] * q.shape[2] for t in range(q.shape[0]))


OPERATIONS = (
    Operation(
        name="prefill_attention",
        cases=attend_cases,
        make_inputs=make_attend_inputs,
        fast=fast_attend,
        reference=reference_attend,
        compare=compare_attend,
        bytes_moved=attend_bytes,
        flops=attend_flops,
        baselines={"sdpa_dense": sdpa_baseline},
    ),
    Operation(
        name="prefill_selection",
        cases=selection_cases,
        make_inputs=make_selection_inputs,
        fast=fast_selection,
        reference=reference_selection,
        compare=compare_selection,
        bytes_moved=selection_bytes,
        flops=selection_flops,
        launch=launch_selection,
    ),
)
