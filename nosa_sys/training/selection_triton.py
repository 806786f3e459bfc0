"""Selection of every query of a training sequence on a GPU: stage-1 scores of many queries at once, in Triton.

Decoding scores one query a sequence, so its kernel gives a CTA one query. Here a CTA takes a tile of queries of one KV
head, reads the key means once for all of them and keeps the logits to itself: a first pass over the windows finds each
row's softmax terms, a second one adds up the group's probabilities. ``select_windows`` pools and selects.

Floor: 6 * tokens * query heads * windows * head_dim FLOPs twice, halved by causality (products of bfloat16 and fp32 are
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

from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.block_selection.reference import select_everything
from nosa_sys.kernels.block_selection.triton import select_windows
from nosa_sys.kernels.launch import on_device
from nosa_sys.kernels.sparse_decode_attention.triton import online_softmax
from nosa_sys.kernels.stage1_scores.triton import dot_mode, exact_dot
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.work_splits import padded

TILE = 64  # windows
_ROWS, _FP32_ROWS, _FP32_TILE = 128, 32, 32  # query heads times queries; fp32 products keep their operands in registers
_SCORE_BYTES = 2**28  # of scores held at once


@triton.jit(do_not_specialize=["n_queries", "first_position", "n_windows"])
def causal_scores_kernel(
    q,
    means,
    scores,
    n_queries,
    first_position,
    n_windows,
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
    means float32 [kv_head, window, DIM], scores float32 [query, kv_head, n_windows], written where a window is
    visible."""
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
    means_at = means + (head * n_windows).to(tl.int64) * DIM
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

    q [query, q_head, head_dim] roped, contiguous, at first_position on; key_means float32 [kv_head, window, head_dim],
    contiguous. Windows beyond those that the last query sees may hold anything.
    """
    n_queries, n_q_heads, dim = q.shape
    n_kv_heads, n_windows = key_means.shape[:2]
    scores = torch.empty((n_queries, n_kv_heads, n_windows), dtype=torch.float32, device=q.device)
    constants = _constants(n_q_heads // n_kv_heads, n_kv_heads, dim, q.dtype, cfg)
    with on_device(q):
        causal_scores_kernel[(-(-n_queries // constants["QUERIES"]) * n_kv_heads,)](
            q, key_means, scores, n_queries, first_position, n_windows, math.log2(math.e) / math.sqrt(dim),
            **constants, MODE=dot_mode(q.dtype, key_means.dtype), num_warps=8,
        )  # fmt: skip
    return scores


def _constants(group: int, n_kv_heads: int, dim: int, dtype: torch.dtype, cfg: SparseConfig) -> dict[str, Any]:
    group_pad = padded(group)
    rows, tile = (_FP32_ROWS, _FP32_TILE) if dtype == torch.float32 else (_ROWS, TILE)
    sizes = {"KV_HEADS": n_kv_heads, "GROUP": group, "GROUP_PAD": group_pad, "QUERIES": max(1, rows // group_pad)}
    sizes |= {"DIM": dim, "DIM_PAD": padded(dim), "KERNEL": cfg.kernel_size, "STRIDE": cfg.kernel_stride}
    return sizes | {"TILE": tile, "STAGES": 2}


def select_causal(
    q: Tensor, key_means: Tensor, beta_means: Tensor, cfg: SparseConfig, method: Method
) -> tuple[Tensor, Tensor]:
    """Blocks of every query of a whole sequence and the reports of NaN, as ``queue_selection`` gives them.

    q [tokens, q_head, head_dim] roped, key_means float32 [kv_head, window, head_dim], beta_means float32 [kv_head,
    window]; the method has query-aware picks. Does not wait for the GPU.
    """
    n_tokens, n_kv_heads = q.shape[0], key_means.shape[0]
    q, key_means = q.contiguous(), key_means.contiguous()
    positions = torch.arange(n_tokens, device=q.device)
    n_dense = min(n_tokens, cfg.topk_tokens)
    parts = [select_everything(positions[:n_dense] // cfg.block_size + 1, n_kv_heads, cfg.topk, cfg.topk).block_ids]
    errors = [torch.empty((0, n_kv_heads), dtype=torch.int32, device=q.device)]
    step = max(1, _SCORE_BYTES // (4 * n_kv_heads * max(1, key_means.shape[1])))
    for start in range(n_dense, n_tokens, step):
        chunk = q[start : start + step]
        lengths = (positions[start : start + step] + 1).to(torch.int32)
        scores = causal_scores(chunk, key_means, start, cfg)
        betas = beta_means.expand(len(chunk), -1, -1)
        result = select_windows(scores, betas, lengths, cfg.n_blocks(start + len(chunk)), cfg, method)
        parts.append(result.block_ids)
        errors.append(result.errors)
    return torch.cat(parts), torch.cat(errors)


def _aot_specs() -> list[AotSpec]:
    specs = []
    cfg = SparseConfig()
    for dtype, kind, group, dim in (
        ("bf16", torch.bfloat16, 3, 64),
        ("bf16", torch.bfloat16, 16, 128),
        ("fp32", torch.float32, 3, 64),
    ):
        mode = "ieee" if dtype == "fp32" else "split_bf16"
        constants = _constants(group, 2, dim, kind, cfg) | {"MODE": mode}
        signature = {"q": f"*{dtype}", "means": "*fp32", "scores": "*fp32"}
        signature |= dict.fromkeys(("n_queries", "first_position", "n_windows"), "i32") | {"scale_log2": "fp32"}
        signature |= dict.fromkeys(constants, "constexpr")
        specs.append(AotSpec(f"causal-scores-{dtype}-{group}-{dim}", causal_scores_kernel, signature, constants, 8))
    return specs


AOT_SPECS = _aot_specs()
