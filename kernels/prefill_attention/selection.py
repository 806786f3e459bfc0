"""Selection of every query of a prompt or a training sequence, in Triton: stage-1 scores of many queries at once.

Decoding scores one query a sequence, so its kernel gives a CTA one query. Here a CTA takes a tile of queries of one KV
head, reads the key means once for all of them and keeps the logits to itself: a first pass over the windows finds each
row's softmax terms, a second one adds up the group's probabilities. ``select_windows`` pools and selects.

Floor: 2 * queries * query heads * windows seen * head_dim FLOPs twice (products of a short type with fp32 means are
made of three), and 4 B written a query, KV head and window.
Knobs worth scanning: ``TILE`` (32, 64, 128), ``num_warps`` (4, 8), ``num_stages`` (2, 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import CapacityError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.block_selection import raise_selection_errors
from nosa_sys.kernels.block_selection.reference import Selection, select_everything
from nosa_sys.kernels.block_selection.triton import select_windows
from nosa_sys.kernels.launch import on_device
from nosa_sys.kernels.sparse_decode_attention.triton import online_softmax
from nosa_sys.kernels.stage1_scores.triton import dot_mode, exact_dot
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.work_splits import padded

TILE = 64  # windows
_ROWS, _FP32_ROWS, _FP32_TILE = 128, 64, 32  # query heads times queries; fp32 products keep their operands in registers
_SCORE_BYTES = 2**28  # of scores held at once


@triton.jit(do_not_specialize=["n_queries", "first_position", "n_windows", "means_head_rows"])
def causal_scores_kernel(
    q,
    means,
    scores,
    n_queries,
    first_position,
    n_windows,
    means_head_rows,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One CTA: one tile of queries of one KV head, the last tiles first. q [query, q_head, DIM] at first_position on,
    means [kv_head, window, DIM], a head every ``means_head_rows`` rows of DIM, scores float32 [query, kv_head,
    n_windows], written where a window is visible."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head = place % KV_HEADS
    first_query = place // KV_HEADS * QUERIES
    rows = tl.arange(0, QUERIES * GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_dim = dims < DIM
    query = first_query + rows // GROUP_PAD
    in_group = (rows % GROUP_PAD < GROUP) & (query < n_queries)
    row_at = (query.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP_PAD) * DIM
    queries = tl.load(q + row_at[:, None] + dims[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0)
    length = first_position + query + 1
    visible = tl.minimum(tl.where(length >= KERNEL, (length - KERNEL) // STRIDE + 1, 0), n_windows)
    n_tiles = tl.cdiv(tl.max(visible, axis=0), TILE)
    means_at = means + head.to(tl.int64) * means_head_rows * DIM
    maximum = tl.full([QUERIES * GROUP_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], dtype=tl.float32)
    for tile in tl.range(0, n_tiles, num_stages=STAGES):
        columns = tile * TILE + tl.arange(0, TILE)
        mask = (columns < n_windows)[None, :] & in_dim[:, None]
        keys = tl.load(means_at + columns.to(tl.int64)[None, :] * DIM + dims[:, None], mask=mask, other=0.0)
        logits = exact_dot(queries, keys, MODE) * scale_log2
        logits = tl.where(columns[None, :] < visible[:, None], logits, float("-inf"))
        _, maximum, total, _ = online_softmax(logits, maximum, total)
    floor = tl.where(maximum == float("-inf"), 0.0, maximum)
    inverse = tl.where(in_group, 1.0 / tl.where(total == 0.0, 1.0, total), 0.0)
    owners = first_query + tl.arange(0, QUERIES)
    scores_at = scores + (owners.to(tl.int64) * KV_HEADS + head)[:, None] * n_windows
    for tile in tl.range(0, n_tiles, num_stages=STAGES):
        columns = tile * TILE + tl.arange(0, TILE)
        exists = columns < n_windows
        mask = exists[None, :] & in_dim[:, None]
        keys = tl.load(means_at + columns.to(tl.int64)[None, :] * DIM + dims[:, None], mask=mask, other=0.0)
        logits = exact_dot(queries, keys, MODE) * scale_log2
        logits = tl.where(columns[None, :] < visible[:, None], logits, float("-inf"))
        shares = tl.exp2(logits - floor[:, None]) * inverse[:, None]
        summed = tl.sum(tl.reshape(shares, [QUERIES, GROUP_PAD, TILE]), axis=1)
        tl.store(scores_at + columns[None, :], summed, mask=(owners < n_queries)[:, None] & exists[None, :])


def causal_scores(q: Tensor, key_means: Tensor, first_position: int, cfg: SparseConfig) -> Tensor:
    """Stage-1 scores float32 [query, kv_head, window]: probabilities over the visible windows, summed over the group.

    q [query, q_head, head_dim] roped, at first_position on; key_means [kv_head, window, head_dim], in fp32 or q's type,
    in place where each head's windows are contiguous (a slice of a larger buffer), else copied. Windows beyond those
    that the last query sees may hold anything; of a row of scores only the windows that its query sees are written.
    """
    n_queries, n_q_heads, dim = q.shape
    n_kv_heads, n_windows = key_means.shape[:2]
    q = q.contiguous()
    if key_means.stride(2) != 1 or key_means.stride(1) != dim or key_means.stride(0) % dim:
        key_means = key_means.contiguous()
    scores = torch.empty((n_queries, n_kv_heads, n_windows), dtype=torch.float32, device=q.device)
    constants = _constants(n_q_heads // n_kv_heads, n_kv_heads, dim, q.dtype, cfg)
    with on_device(q):
        causal_scores_kernel[(-(-n_queries // constants["QUERIES"]) * n_kv_heads,)](
            q, key_means, scores, n_queries, first_position, n_windows, key_means.stride(0) // dim,
            math.log2(math.e) / math.sqrt(dim), **constants, MODE=dot_mode(q.dtype, key_means.dtype), num_warps=8,
        )  # fmt: skip
    return scores


def _constants(group: int, n_kv_heads: int, dim: int, dtype: torch.dtype, cfg: SparseConfig) -> dict[str, Any]:
    group_pad = padded(group)
    rows, tile = (_FP32_ROWS, _FP32_TILE) if dtype == torch.float32 else (_ROWS, TILE)
    sizes = {"KV_HEADS": n_kv_heads, "GROUP": group, "GROUP_PAD": group_pad, "QUERIES": max(1, rows // group_pad)}
    sizes |= {"DIM": dim, "DIM_PAD": padded(dim), "KERNEL": cfg.kernel_size, "STRIDE": cfg.kernel_stride}
    return sizes | {"TILE": tile, "STAGES": 2}


@torch.no_grad()
def queue_selection(
    q: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    first_position: int,
    cfg: SparseConfig,
    method: Method,
    *,
    score_bytes: int = _SCORE_BYTES,
) -> tuple[Selection, Tensor | None]:
    """``prefill_selection`` without waiting: (selection, errors int32 [sparse query, kv_head] or None). The errors
    belong to the last queries, those with more than k blocks. ``score_bytes``: stage-1 scores held at once."""
    n_tokens, n_kv_heads = q.shape[0], key_means.shape[0]
    end = first_position + n_tokens
    if method.dense or n_tokens == 0 or end <= cfg.topk_tokens:
        width = cfg.n_blocks(end) if method.dense else cfg.topk
        positions = torch.arange(first_position, end, device=q.device)
        return select_everything(positions // cfg.block_size + 1, n_kv_heads, width, width), None
    if min(key_means.shape[1], beta_means.shape[1]) < cfg.n_windows(end):
        raise CapacityError(
            f"{key_means.shape[1]} key means and {beta_means.shape[1]} beta means do not cover the {end} tokens of "
            f"context; give all {cfg.n_windows(end)} windows"
        )
    scored = method.query_aware_picks(cfg, cfg.n_forced) > 0
    beta_means = beta_means if beta_means.stride(1) == 1 else beta_means.contiguous()
    lengths = torch.arange(first_position + 1, end + 1, dtype=torch.int32, device=q.device)
    parts = []
    step = max(1, score_bytes // (4 * n_kv_heads * cfg.n_windows(end))) if scored else n_tokens
    for start in range(0, n_tokens, step):
        queries = q[start : start + step]
        context = first_position + start + len(queries)
        n_windows = cfg.n_windows(context)
        scores = betas = beta_means[:, :n_windows].expand(len(queries), -1, -1)
        if scored:
            scores = causal_scores(queries, key_means[:, :n_windows], first_position + start, cfg)
        parts.append(select_windows(scores, betas, lengths[start : start + step], cfg.n_blocks(context), cfg, method))
    columns = zip(*((part.block_ids, part.origins, part.counts, part.errors) for part in parts), strict=True)
    block_ids, origins, counts, errors = (torch.cat(column) if len(column) > 1 else column[0] for column in columns)
    n_dense = max(0, cfg.topk_tokens - first_position)
    return Selection(block_ids, origins, counts), errors[n_dense:]


def prefill_selection(
    q: Tensor, key_means: Tensor, beta_means: Tensor, first_position: int, cfg: SparseConfig, method: Method
) -> Selection:
    """As ``reference.prefill_selection``; waits for the device once, at the end, to see whether a NaN was met."""
    selection, errors = queue_selection(q, key_means, beta_means, first_position, cfg, method)
    if errors is not None:
        raise_selection_errors(errors, first_row=first_position + q.shape[0] - len(errors))
    return selection


def _aot_specs() -> list[AotSpec]:
    specs = []
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for query, keys, mode, group, dim in (
        ("bf16", "fp32", "split_bf16", 3, 64),
        ("bf16", "fp32", "split_bf16", 16, 128),
        ("bf16", "bf16", "native", 16, 128),
        ("fp16", "fp32", "split_tf32", 16, 128),
        ("fp16", "fp16", "native", 4, 96),
        ("fp32", "fp32", "ieee", 3, 64),
        ("fp32", "fp32", "ieee", 16, 128),
    ):
        constants = _constants(group, 2, dim, kinds[query], SparseConfig()) | {"MODE": mode}
        signature = {"q": f"*{query}", "means": f"*{keys}", "scores": "*fp32"}
        signature |= dict.fromkeys(("n_queries", "first_position", "n_windows", "means_head_rows"), "i32")
        signature |= {"scale_log2": "fp32"} | dict.fromkeys(constants, "constexpr")
        name = f"causal-scores-{query}-{keys}-{group}-{dim}"
        specs.append(AotSpec(name, causal_scores_kernel, signature, constants, 8))
    return specs


AOT_SPECS = _aot_specs()
