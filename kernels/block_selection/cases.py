"""Cases of block selection: from pooled scores, and a whole decode step's scoring, pooling and selection."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection import BETA_ERROR, reference
from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.case import Case, Operation, Tensors, relative_error
from nosa_sys.kernels.stage1_scores import reference as stage1_reference
from nosa_sys.methods import METHODS, Method, get_method
from nosa_sys.sparse_config import SparseConfig

_METHODS = tuple(METHODS)


def _case(name: str, uses: str, dtype: str = "float32", *, method: str = "nosa", **params: int) -> Case:
    """Sizes in blocks, the window too. ``levels``: how many values a ranking takes (0: all differ); ``broken``: one
    score and one beta are NaN."""
    filled = {"batch": 3, "kv_heads": 2, "blocks": 40, "block": 64, "topk": 12, "init": 1, "local": 3, "select": 6}
    filled |= {
        "levels": 0,
        "broken": 0,
        "method": _METHODS.index(method),
        "group": 4,
        "head_dim": 64,
        "fp32_means": 1,
        **params,
    }
    return Case(name, dtype, filled, frozenset(uses.split()))


def _default(name: str, uses: str, dtype: str = "float32", **params: int) -> Case:
    """The budgets of the paper: 64 of 64 tokens, 1 sink, 16 in the window, 16 query-aware."""
    sizes: dict[str, Any] = {"topk": 64, "init": 1, "local": 16, "select": 16, "head_dim": 128, "group": 16}
    return _case(name, uses, dtype, **(sizes | params))


def configuration(case: Case) -> tuple[SparseConfig, Method]:
    p = case.params
    cfg = SparseConfig(
        block_size=p["block"],
        topk=p["topk"],
        init_blocks=p["init"],
        window_size=p["local"] * p["block"],
        select_blocks=p["select"],
    )
    return cfg, get_method(_METHODS[p["method"]])


def _poisoned(case: Case, values: Tensor, existing: Tensor) -> Tensor:
    """Values [batch, kv_head, column], coarse where ties are wanted, NaN at columns that do not exist."""
    if case.params["levels"]:
        values = (values * case.params["levels"] / 4).round() * (4 / case.params["levels"])
    columns = torch.arange(values.shape[2], device=values.device)
    return values.masked_fill(columns >= existing.view(-1, 1, 1), math.nan)


def _mismatches(out: Tensors, expected: Selection) -> dict[str, tuple[float, float]]:
    return {
        "block_ids": (float((out["block_ids"] != expected.block_ids).sum()), 0.0),
        "origins": (float((out["origins"] != expected.origins).sum()), 0.0),
        "counts": (float((out["counts"] != expected.counts).sum()), 0.0),
        "errors": (float((out["errors"] != -1).sum()), 0.0),
    }


def _row_sizes(case: Case, largest: int, smallest: int, device: torch.device) -> Tensor:
    """Per row: the largest, then smaller ones down to ``smallest`` (all the largest in a benchmark)."""
    if "bench" in case.uses or case.params["batch"] == 1:
        return torch.full((case.params["batch"],), largest, dtype=torch.int32, device=device)
    return torch.linspace(largest, smallest, case.params["batch"], device=device).round().int()


# ---- from pooled scores


def pooled_cases() -> list[Case]:
    both = "check small"
    return [
        _case("plain", both),
        _case("ties", both, levels=3),
        _case("all-equal", both, levels=-1),
        _case("infllmv2", both, levels=7, method="infllmv2"),
        _case("dma", both, levels=7, method="dma"),
        _case("k-is-n-less-one", both, blocks=13),
        _case("odd-k", both, blocks=100, topk=7, local=2, select=3),
        _case("no-sinks", both, init=0, levels=5),
        _case("nan-is-reported", both, broken=1),
        _case("one-head", both, batch=1, kv_heads=1, blocks=300),
        _default("256-ties", "check", blocks=256, batch=64, levels=16),
        _default("2048-ties", "check", blocks=2048, batch=16, kv_heads=8, levels=64),
        _default("8192", "check", blocks=8191, batch=2, levels=512),
        _default("16384", "check", blocks=16384, batch=2, kv_heads=3),
        _default("16K-b64", "bench", blocks=256, batch=64),
        _default("128K-b16", "bench", blocks=2048, batch=16),
        _default("1M-b1", "bench", blocks=16384, batch=1),
    ]


def make_pooled_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    p = case.params
    shape = (p["batch"], p["kv_heads"], p["blocks"])
    n_blocks = _row_sizes(case, p["blocks"], 1, device)
    scores, betas = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    if p["levels"] < 0:
        scores, betas = torch.zeros_like(scores), torch.zeros_like(betas)
    elif p["levels"]:
        scores[..., ::5], betas[..., ::7] = -math.inf, -math.inf
        scores[..., 1::9] = -0.0
    cfg, method = configuration(case)
    scores, betas = (_poisoned(case, x, n_blocks) for x in (scores, betas))
    inputs: dict[str, Any] = {"scores": scores, "betas": betas, "n_blocks": n_blocks, "cfg": cfg, "method": method}
    if p["broken"]:
        # The window is blocks 36 to 39 of 40. A block that is surely no query-aware pick carries the broken beta.
        scores[0, 0, 7], scores[0, 1, 9], betas[0, 1, 9] = math.nan, -math.inf, math.nan
        # Nothing but NaN, of the bits that some CPU arithmetic leaves.
        scores[1, 0] = betas[1, 0] = torch.tensor(-1, dtype=torch.int32, device=device).view(torch.float32)
        inputs["expected_errors"] = torch.full(scores.shape[:2], -1, dtype=torch.int32, device=device)
        inputs["expected_errors"][0] = torch.tensor([7, 9 + BETA_ERROR], dtype=torch.int32, device=device)
        inputs["expected_errors"][1, 0] = p["init"]
    return inputs


def fast_pooled(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.block_selection.triton import select_pooled

    result = select_pooled(inputs["scores"], inputs["betas"], inputs["n_blocks"], inputs["cfg"], inputs["method"])
    return {name: x for name, x in result._asdict().items() if x is not None}


def reference_pooled(inputs: dict[str, Any]) -> Tensors:
    if "expected_errors" in inputs:
        return {"errors": inputs["expected_errors"]}
    return reference.select_blocks(
        inputs["scores"], inputs["betas"], inputs["n_blocks"], inputs["cfg"], inputs["method"]
    )._asdict()


def compare_pooled(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, Any]:
    if "errors" in expected:  # what a NaN selects is open, but every entry is written with an id of its own
        n_blocks, used = inputs["n_blocks"].view(-1, 1, 1), out["counts"].view(-1, 1, 1)
        ids, entry = out["block_ids"], torch.arange(case.params["topk"], device=out["counts"].device)
        before = torch.cat([torch.full_like(ids[..., :1], -1), ids[..., :-1]], dim=-1)
        right = torch.where(entry < used, (ids > before) & (ids < n_blocks), ids == -1)
        wrong = (out["errors"] != expected["errors"]).sum()
        return {"errors": (float(wrong), 0.0), "entries": (float((~right).sum()), 0.0)}
    return _mismatches(out, Selection(**expected))


def pooled_bytes(case: Case, inputs: dict[str, Any]) -> int:
    pairs = case.params["batch"] * case.params["kv_heads"]
    return 8 * inputs["scores"].numel() + pairs * case.params["topk"] * 5


def topk_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch.topk of the query-aware budget over the same scores: one of the two rankings, without ties or order."""
    return inputs["scores"].topk(min(inputs["cfg"].query_budget, inputs["scores"].shape[2]), dim=-1).indices


# ---- a whole decode step


def step_cases() -> list[Case]:
    both = "check small"
    return [
        _case("fp32", both, blocks=24, block=32, topk=8, local=2, select=3),
        _case("bf16-ties-in-betas", both, "bfloat16", blocks=20, group=3, levels=4),
        _case("fp16-block-16", both, "float16", blocks=60, block=16, group=1, head_dim=80),
        _case("bf16-block-80", both, "bfloat16", blocks=17, block=80, head_dim=96, kv_heads=1, group=16),
        _case("infllmv2", both, "bfloat16", blocks=20, method="infllmv2", fp32_means=0),
        _case("dma", both, "bfloat16", blocks=20, method="dma"),
        _case("dense-rows", both, "bfloat16", blocks=9),
        _default("bf16-16K", "check", "bfloat16", blocks=257, batch=64),
        _default("bf16-means-16K", "check", "bfloat16", blocks=256, batch=16, kv_heads=8, group=4, fp32_means=0),
        _default("fp32-16K", "check", blocks=255, batch=5, kv_heads=3, group=3, head_dim=64),
        _default("bf16-128K", "check", "bfloat16", blocks=2048, batch=16, levels=64),
        _default("bf16-1M", "check", "bfloat16", blocks=16384, batch=2, kv_heads=1, levels=64),
        _default("16K-b64-fp32-means", "bench", "bfloat16", blocks=256, batch=64),
        _default("16K-b64-bf16-means", "bench", "bfloat16", blocks=256, batch=64, fp32_means=0),
        _default("16K-b64-hkv8", "bench", "bfloat16", blocks=256, batch=64, kv_heads=8, group=4),
        _default("128K-b16-fp32-means", "bench", "bfloat16", blocks=2048, batch=16),
        _default("128K-b16-bf16-means", "bench", "bfloat16", blocks=2048, batch=16, fp32_means=0),
    ]


def make_step_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Contexts from full ones down to one token; means and betas of windows that do not exist are NaN."""
    p = case.params
    cfg, method = configuration(case)
    full = p["blocks"] * p["block"]
    lengths = _row_sizes(case, full, 1, device)
    n_windows = ((lengths - cfg.kernel_size) // cfg.kernel_stride + 1).clamp(min=0)
    shape = (p["batch"], p["kv_heads"], cfg.n_windows(full))
    q = 2 * torch.randn((p["batch"], p["kv_heads"] * p["group"], p["head_dim"]), generator=generator, device=device)
    means = torch.randn((*shape, p["head_dim"]), generator=generator, device=device)
    columns = torch.arange(shape[2], device=device)
    means = means.masked_fill_((columns >= n_windows.view(-1, 1, 1)).unsqueeze(-1), math.nan)
    betas = torch.randn(shape, generator=generator, device=device)
    return {
        "q": q.to(case.torch_dtype),
        "key_means": means if p["fp32_means"] else means.to(case.torch_dtype),
        "beta_means": _poisoned(case, betas, n_windows),
        "lengths": lengths,
        "n_windows": n_windows,
        "n_blocks": p["blocks"],
        "cfg": cfg,
        "method": method,
        "keep_pooled": "small" in case.uses,
    }


def fast_step(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.block_selection.triton import score_and_select

    names = ("q", "key_means", "beta_means", "lengths", "n_blocks", "cfg", "method")
    result = score_and_select(*(inputs[name] for name in names), keep_pooled=inputs["keep_pooled"])
    return {name: x for name, x in result._asdict().items() if x is not None}


def reference_step(inputs: dict[str, Any]) -> Tensors:
    return {
        "window_scores": stage1_reference.stage1_scores(
            inputs["q"].float(), inputs["key_means"].float(), inputs["n_windows"]
        )
    }


def compare_step(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, Any]:
    """Scores against the reference's; the selection against the reference's rule on the kernel's own scores."""
    cfg, method, n_windows = inputs["cfg"], inputs["method"], inputs["n_windows"]
    scores = out.get("window_scores", expected["window_scores"])
    n_blocks = (inputs["lengths"] + cfg.block_size - 1) // cfg.block_size
    pooled_scores, pooled_betas = (
        pool_windows(x, n_windows, inputs["n_blocks"], cfg) for x in (scores, inputs["beta_means"])
    )
    selection = reference.select_blocks(pooled_scores, pooled_betas, n_blocks, cfg, method)
    result = _mismatches(out, selection)
    limit = 1e-5 if case.dtype == "float32" else 1e-4
    result["window_scores"] = (relative_error(scores, expected["window_scores"]), limit)
    if inputs["keep_pooled"]:
        exists = torch.arange(inputs["n_blocks"], device=scores.device) < n_blocks.view(-1, 1, 1)
        for name, values in (("pooled_scores", pooled_scores), ("pooled_betas", pooled_betas)):
            result[name] = (float(((out[name] != values) & exists).sum()), 0.0)
    return result


def step_bytes(case: Case, inputs: dict[str, Any]) -> int:
    """Means and betas of existing windows and the queries in, the selection out."""
    means, q, pairs = inputs["key_means"], inputs["q"], case.params["batch"] * case.params["kv_heads"]
    row_bytes = means.shape[1] * (means.shape[3] * means.element_size() + 4)
    selected = pairs * case.params["topk"] * 5
    return int(inputs["n_windows"].sum()) * row_bytes + q.numel() * q.element_size() + selected


def step_flops(case: Case, inputs: dict[str, Any]) -> int:
    return 2 * int(inputs["n_windows"].sum()) * inputs["q"].shape[1] * inputs["q"].shape[2]


OPERATIONS = (
    Operation(
        name="block_selection",
        cases=pooled_cases,
        make_inputs=make_pooled_inputs,
        fast=fast_pooled,
        reference=reference_pooled,
        compare=compare_pooled,
        bytes_moved=pooled_bytes,
        flops=lambda case, inputs: 0,
        baselines={"torch_topk": topk_baseline},
    ),
    Operation(
        name="score_and_select",
        cases=step_cases,
        make_inputs=make_step_inputs,
        fast=fast_step,
        reference=reference_step,
        compare=compare_step,
        bytes_moved=step_bytes,
        flops=step_flops,
    ),
)
