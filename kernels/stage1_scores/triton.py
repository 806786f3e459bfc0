"""Stage-1 scores: logits of each query head against the compressed keys, then probabilities summed over the group.

Two kernels. ``logits_kernel`` streams the means once, split along the windows over CTAs, and leaves fp32 logits (base
2) with a (maximum, sum) per query head and split. ``window_scores_kernel`` turns them into scores, or
``block_selection`` does so inside its own launch.

Floor: the bytes of the means (B 64, Hkv 2, M 1023, D 128: 67 MB in fp32, 34 MB in bf16) at the device's copy rate, so
about 16 and 8 us at 4.3 TB/s, plus the logits (4 B per query head and window), which stay in L2.
Knobs worth scanning: ``tile`` (32, 64, 128 windows), ``num_stages`` (2 to 5), ``ctas_per_sm`` (1 to 4), ``num_warps``.

Products are exact whatever the types: a bf16 or fp16 query meets fp32 means as a sum of three short floats, each on
the tensor cores; an fp32 query takes plain fp32 dots (ieee, not tf32).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import interpreting, n_sms, on_device
from nosa_sys.work_splits import choose_splits, padded

# Running maxima start here: finite, so that no infinity is ever subtracted from another.
_FLOOR: tl.constexpr = tl.constexpr(-1e38)


class SplitLogits(NamedTuple):
    """Unnormalised stage 1. logits float32 [batch * kv_head, group, pitch * 16], in base-2 units, written for existing
    windows only; maxima and sums float32 [batch * kv_head, split, group (padded)]."""

    logits: Tensor
    maxima: Tensor
    sums: Tensor


@triton.jit
def visible_windows(counts, row, limit, KERNEL: tl.constexpr, STRIDE: tl.constexpr):
    """Windows of one row: ``counts`` holds lengths in tokens, or the number of windows itself where KERNEL is 0."""
    n = tl.load(counts + row).to(tl.int32)
    if KERNEL > 0:
        n = tl.where(n >= KERNEL, (n - KERNEL) // STRIDE + 1, 0)
    return tl.minimum(tl.maximum(n, 0), limit)


@triton.jit
def _tf32_part(x):
    # Clearing the low 13 bits leaves a number that tf32 holds exactly.
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def exact_dot(q, k, MODE: tl.constexpr):
    """q [rows, dim] times k [dim, columns] with every product exact and fp32 sums; see the module docstring."""
    if MODE == "native":
        result = tl.dot(q, k.to(q.dtype))
    elif MODE == "ieee":
        result = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    elif MODE == "split_bf16":
        high = k.to(tl.bfloat16)
        rest = k - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(q, high, acc=tl.dot(q, middle, acc=tl.dot(q, low)))
    else:
        short = q.to(tl.float32)
        wide = k.to(tl.float32)
        high = _tf32_part(wide)
        middle = _tf32_part(wide - high)
        low = wide - high - middle
        result = tl.dot(short, low, input_precision="tf32")
        result = tl.dot(short, middle, acc=result, input_precision="tf32")
        result = tl.dot(short, high, acc=result, input_precision="tf32")
    return result


@triton.jit(do_not_specialize=["n_columns", "pitch", "q_batch_rows", "means_batch_rows", "means_head_rows"])
def logits_kernel(
    q,
    means,
    counts,
    logits,
    maxima,
    sums,
    n_columns,
    pitch,
    q_batch_rows,
    means_batch_rows,
    means_head_rows,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MODE: tl.constexpr,
    STAGES: tl.constexpr,
    RELEASE: tl.constexpr,
):
    """One CTA: one split of the windows of one (batch, kv_head). Strides of q and means come in rows of DIM elements,
    the pitch in units of 16, so that the compiler knows that rows are aligned. RELEASE: the next launch may start
    before this one ends.
    """
    if RELEASE:
        gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    pair = (tl.program_id(0) // SPLITS).to(tl.int64)
    batch = pair // KV_HEADS
    head = pair % KV_HEADS
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_group = heads < GROUP
    in_dim = dims < DIM

    query_at = q + (batch * q_batch_rows + head * GROUP) * DIM + heads[:, None] * DIM + dims[None, :]
    query = tl.load(query_at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
    means_at = means + (batch * means_batch_rows + head * means_head_rows) * DIM
    row_pitch = pitch * 16
    logits_at = logits + pair * GROUP * row_pitch

    n = visible_windows(counts, batch, n_columns, KERNEL, STRIDE)
    n_tiles = tl.cdiv(n, TILE)
    per_split = tl.cdiv(n_tiles, SPLITS)
    first = split * per_split
    # Each column of the tile keeps its own running maximum and sum: the loop needs no reduction across threads.
    running_max = tl.full([GROUP_PAD, TILE], _FLOOR, dtype=tl.float32)
    running_sum = tl.zeros([GROUP_PAD, TILE], dtype=tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, n_tiles), num_stages=STAGES):
        columns = tile * TILE + tl.arange(0, TILE)
        exists = columns < n
        key_at = means_at + columns.to(tl.int64)[None, :] * DIM + dims[:, None]
        keys = tl.load(key_at, mask=exists[None, :] & in_dim[:, None], other=0.0, eviction_policy="evict_first")
        scores = exact_dot(query, keys, MODE) * scale_log2
        tl.store(
            logits_at + heads[:, None] * row_pitch + columns[None, :], scores, mask=in_group[:, None] & exists[None, :]
        )
        scores = tl.where(exists[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, scores)
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.exp2(scores - new_max)
        running_max = new_max

    maximum = tl.max(running_max, axis=1)
    total = tl.sum(running_sum * tl.exp2(running_max - maximum[:, None]), axis=1)
    part = (pair * SPLITS + split) * GROUP_PAD
    tl.store(maxima + part + heads, maximum)
    tl.store(sums + part + heads, total)


@triton.jit
def softmax_terms(maxima, sums, pair, GROUP_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Maximum [group] and 1 / sum [group] of each query head over all splits."""
    splits = tl.arange(0, SPLITS_PAD)
    part = (pair * SPLITS + splits)[:, None] * GROUP_PAD + tl.arange(0, GROUP_PAD)[None, :]
    within = (splits < SPLITS)[:, None]
    part_max = tl.load(maxima + part, mask=within, other=_FLOOR)
    part_sum = tl.load(sums + part, mask=within, other=0.0)
    maximum = tl.max(part_max, axis=0)
    total = tl.sum(part_sum * tl.exp2(part_max - maximum[None, :]), axis=0)
    return maximum, 1.0 / tl.where(total == 0.0, 1.0, total)  # zero: a row without windows, whose scores are zero


@triton.jit
def summed_shares(logits, pair, pitch, columns, exists, maximum, inverse, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Scores of ``columns``: probabilities summed over the query heads of the group, zero where nothing exists."""
    heads = tl.arange(0, GROUP_PAD)
    row_pitch = pitch * 16
    at = logits + pair * GROUP * row_pitch + heads[:, None] * row_pitch + columns[None, :]
    valid = (heads < GROUP)[:, None] & exists[None, :]
    shares = tl.exp2(tl.load(at, mask=valid, other=float("-inf")) - maximum[:, None]) * inverse[:, None]
    return tl.sum(tl.where(valid, shares, 0.0), axis=0)


@triton.jit(do_not_specialize=["n_columns"])
def window_scores_kernel(
    logits,
    maxima,
    sums,
    counts,
    scores,
    n_columns,
    pitch,
    scores_pitch,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """One CTA: one tile of windows of one (batch, kv_head); scores [batch * kv_head, scores_pitch]."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = visible_windows(counts, pair // KV_HEADS, n_columns, KERNEL, STRIDE)
    maximum, inverse = softmax_terms(maxima, sums, pair, GROUP_PAD, SPLITS, SPLITS_PAD)
    result = summed_shares(logits, pair, pitch, columns, columns < n, maximum, inverse, GROUP, GROUP_PAD)
    tl.store(scores + pair * scores_pitch + columns, result, mask=columns < n_columns)


def dot_mode(query: torch.dtype, keys: torch.dtype) -> str:
    """How products stay exact for these types; see ``exact_dot``."""
    if interpreting() or torch.float32 == query:
        return "ieee"
    if query == keys:
        return "native"
    return "split_bf16" if (query, keys) == (torch.bfloat16, torch.float32) else "split_tf32"


def split_logits(
    q: Tensor,
    key_means: Tensor,
    counts: Tensor,
    *,
    kernel: int = 0,
    stride: int = 1,
    tile: int | None = None,
    ctas_per_sm: int = 2,
    num_warps: int = 4,
    num_stages: int = 3,
    release: bool = False,
) -> SplitLogits:
    """Launch ``logits_kernel``.

    q [batch, q_head, head_dim]; key_means [batch, kv_head, window, head_dim], contiguous in its last two dimensions
    (the batch stride may be 0: many queries of one sequence); counts [batch] windows that exist, or context lengths in
    tokens when ``kernel`` (tokens of a window, every ``stride``) is given. ``tile`` None: 32 KiB of means.
    ``release``: let a dependent launch start early; it waits by itself for these results.
    """
    batch, n_kv_heads, n_columns, dim = key_means.shape
    group = q.shape[1] // n_kv_heads
    if key_means.stride(3) != 1 or key_means.stride(2) != dim or any(s % dim for s in key_means.stride()[:2]):
        raise ConfigError(f"key means have strides {key_means.stride()}; windows must be contiguous rows of {dim}")
    q = q if q.stride(2) == 1 and q.stride(1) == dim and q.stride(0) % dim == 0 else q.contiguous()
    group_pad, pairs = max(16, padded(group)), batch * n_kv_heads
    if tile is None:  # fp32 dots run on registers, and spill with more than 32 columns
        tile = 32 if q.dtype == torch.float32 else 256 // key_means.element_size()
    places = n_sms(q.device) * ctas_per_sm
    splits = choose_splits(pairs, max(1, -(-n_columns // tile)), places)
    pitch = -(-max(1, n_columns) // 16)
    logits = torch.empty((pairs, group, pitch * 16), dtype=torch.float32, device=q.device)
    maxima = torch.empty((pairs, splits, group_pad), dtype=torch.float32, device=q.device)
    sums = torch.empty_like(maxima)
    with on_device(q):
        logits_kernel[(pairs * splits,)](
            q,
            key_means,
            counts,
            logits,
            maxima,
            sums,
            n_columns,
            pitch,
            q.stride(0) // dim,
            key_means.stride(0) // dim,
            key_means.stride(1) // dim,
            math.log2(math.e) / math.sqrt(dim),
            KV_HEADS=n_kv_heads,
            GROUP=group,
            GROUP_PAD=group_pad,
            DIM=dim,
            DIM_PAD=padded(dim),
            KERNEL=kernel,
            STRIDE=stride,
            TILE=tile,
            SPLITS=splits,
            MODE=dot_mode(q.dtype, key_means.dtype),
            STAGES=num_stages,
            RELEASE=release,
            num_warps=num_warps,
        )
    return SplitLogits(logits, maxima, sums)


def window_scores(
    split: SplitLogits,
    counts: Tensor,
    shape: tuple[int, int, int],
    *,
    kernel: int = 0,
    stride: int = 1,
    tile: int = 256,
    num_warps: int = 4,
) -> Tensor:
    """Scores float32 [batch, kv_head, window] of ``shape`` from the logits; zero at windows that do not exist."""
    scores = torch.empty(shape, dtype=torch.float32, device=counts.device)
    pairs, splits, group_pad = split.maxima.shape
    group, width = split.logits.shape[1:]
    if scores.numel() == 0:
        return scores
    with on_device(counts):
        window_scores_kernel[(pairs, -(-shape[2] // tile))](
            *split,
            counts,
            scores,
            shape[2],
            width // 16,
            shape[2],
            KV_HEADS=shape[1],
            GROUP=group,
            GROUP_PAD=group_pad,
            KERNEL=kernel,
            STRIDE=stride,
            TILE=tile,
            SPLITS=splits,
            SPLITS_PAD=padded(splits),
            num_warps=num_warps,
        )
    return scores


def stage1_scores(q: Tensor, key_means: Tensor, n_windows: Tensor) -> Tensor:
    """As ``reference.stage1_scores``, two launches."""
    shape = (key_means.shape[0], key_means.shape[1], key_means.shape[2])
    return window_scores(split_logits(q, key_means, n_windows), n_windows, shape)


def stage1_scores_causal(q: Tensor, key_means: Tensor, positions: Tensor, kernel: int, stride: int) -> Tensor:
    """As ``reference.stage1_scores_causal``: a batch of queries that share one sequence's means."""
    n_windows = torch.where(positions >= kernel - 1, (positions + 1 - kernel) // stride + 1, 0)
    return stage1_scores(q, key_means.expand(q.shape[0], -1, -1, -1), n_windows)


def _aot_specs() -> list[AotSpec]:
    specs = []
    shape: dict[str, Any] = {"KV_HEADS": 2, "GROUP": 16, "GROUP_PAD": 16, "KERNEL": 32, "STRIDE": 16}
    scalars = dict.fromkeys(("n_columns", "pitch", "q_batch_rows", "means_batch_rows", "means_head_rows"), "i32")
    for query, keys, mode, tile, dim in (
        ("bf16", "bf16", "native", 128, 128),
        ("bf16", "fp32", "split_bf16", 64, 128),
        ("fp16", "fp16", "native", 128, 96),
        ("fp16", "fp32", "split_tf32", 64, 80),
        ("fp32", "fp32", "ieee", 32, 64),
    ):
        constants = shape | {"DIM": dim, "DIM_PAD": padded(dim), "TILE": tile, "SPLITS": 2, "MODE": mode, "STAGES": 3}
        constants |= {"RELEASE": query == "bf16"}
        pointers = {"q": f"*{query}", "means": f"*{keys}", "counts": "*i32"}
        pointers |= dict.fromkeys(("logits", "maxima", "sums"), "*fp32")
        signature = pointers | scalars | {"scale_log2": "fp32"} | dict.fromkeys(constants, "constexpr")
        specs.append(AotSpec(f"logits-{query}-{keys}", logits_kernel, signature, constants, 4, 3))
    constants = shape | {"TILE": 256, "SPLITS": 2, "SPLITS_PAD": 2}
    signature = dict.fromkeys(("logits", "maxima", "sums"), "*fp32") | {"counts": "*i32", "scores": "*fp32"}
    signature |= dict.fromkeys(("n_columns", "pitch", "scores_pitch"), "i32") | dict.fromkeys(constants, "constexpr")
    specs.append(AotSpec("window_scores", window_scores_kernel, signature, constants, 4))
    return specs


AOT_SPECS = _aot_specs()
