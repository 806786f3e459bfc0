"""Exact stable selection of blocks, one CTA for a (batch, kv_head), with what comes before it fused in.

The kernel starts from pooled block scores, from window scores, or from the split logits of stage 1; in the last two
cases it pools windows to blocks itself. The k-th largest score is found by radix search on the order-preserving
integer form of fp32 (4 bits a pass: 16 counts at once), ties are taken from the lowest index by a running count, and
the chosen ids leave in ascending order. Nothing is sorted.

Floor: latency, not bytes: about 6 us at 256 blocks (two searches of 4 to 8 passes, each two barriers and a short
tile), of which 1 to 2 us read the logits (16 x 1023 x 4 B a CTA) out of L2. Beyond ``UNFUSED_COLUMNS`` windows the
scores are made by a kernel of their own that fills the device. Knobs worth scanning: ``num_warps``, ``radix_bits``,
``score_tile``, ``UNFUSED_COLUMNS``, ``early`` (hides this kernel's launch behind the logits kernel).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.block_selection.step_reference import StepSelection
from nosa_sys.kernels.launch import on_device
from nosa_sys.kernels.stage1_scores.triton import (
    SplitLogits,
    softmax_terms,
    split_logits,
    summed_shares,
    visible_windows,
    window_scores,
)
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.work_splits import padded

# One CTA holds every block of its row in registers (beyond 4096 blocks a few spill).
MAX_BLOCKS = 65536
# More windows than this are turned into scores by a grid of their own.
UNFUSED_COLUMNS = 2048

_FROM_BLOCKS, _FROM_WINDOWS, _FROM_LOGITS = range(3)


@triton.jit
def _pool(windows, n_windows, blocks, exists, RATIO: tl.constexpr):
    """Best existing window of each block, -inf without any, NaN when one is NaN."""
    best = tl.full(blocks.shape, float("-inf"), dtype=tl.float32)
    for i in tl.static_range(RATIO + 1):
        column = blocks * RATIO + (i - 1)
        value = tl.load(windows + column, mask=exists & (column >= 0) & (column < n_windows), other=float("-inf"))
        best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def _ranking_keys(values, candidates):
    """Unsigned integers in the order of the values, NaN above all; 0, below every value, outside the candidates."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 and +0 tie
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    ordered = tl.where(values == values, ordered, -1)  # a NaN of all bits set would be no candidate, and k not filled
    return tl.where(candidates, ordered, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _best(keys, need, RADIX_BITS: tl.constexpr):
    """Mask of the ``need`` largest keys, ties from the lowest index; there are at least ``need`` keys above 0.

    The threshold is found digit by digit from the top, and the search ends as soon as exactly ``need`` keys reach it:
    after about half of the digits unless keys tie.
    """
    digits = tl.arange(0, 1 << RADIX_BITS)
    threshold = tl.full([], 0, dtype=tl.uint32)
    count = tl.full([], -1, dtype=tl.int32)
    shift = tl.full([], 32 - RADIX_BITS, dtype=tl.int32)
    while (shift >= 0) & (count != need):
        if RADIX_BITS == 1:
            trial = threshold + (tl.full([], 1, dtype=tl.uint32) << shift.to(tl.uint32))
            reached = tl.sum((keys >= trial).to(tl.int32), axis=0)
            threshold = tl.where(reached >= need, trial, threshold)
            count = tl.where(reached >= need, reached, count)
        else:
            trials = threshold + (digits.to(tl.uint32) << shift.to(tl.uint32))
            reached = tl.sum((keys[:, None] >= trials[None, :]).to(tl.int32), axis=0)
            # Counts fall as digits rise, and digit 0 always has enough: of those that have, the last one is the least
            # by (count, digit from the top).
            last = tl.min(tl.where(reached >= need, reached * 256 + (255 - digits), 2147483647), axis=0)
            threshold += (255 - last % 256).to(tl.uint32) << shift.to(tl.uint32)
            count = last // 256
        shift -= RADIX_BITS
    chosen = keys >= threshold
    if count != need:
        above = keys > threshold
        equal = keys == threshold
        room = need - tl.sum(above.to(tl.int32), axis=0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
    return chosen


@triton.jit
def _first_nan(values, candidates, blocks):
    return tl.min(tl.where(candidates & (values != values), blocks, 2147483647), axis=0)


@triton.jit(
    do_not_specialize=["n_columns", "pitch", "score_columns", "beta_head_stride", "beta_batch_stride", "n_blocks_limit"]
)
def select_kernel(
    logits,
    maxima,
    sums,
    scores,
    betas,
    window_counts,
    block_counts,
    block_ids,
    origins,
    counts,
    errors,
    pooled_scores,
    pooled_betas,
    n_columns,
    pitch,
    score_columns,
    beta_head_stride,
    beta_batch_stride,
    n_blocks_limit,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    QUERY_AWARE: tl.constexpr,
    AGNOSTIC: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    SCORE_TILE: tl.constexpr,
    RADIX_BITS: tl.constexpr,
    SOURCE: tl.constexpr,
    KEEP_POOLED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """SOURCE 0: ``scores`` and ``betas`` are pooled [.., block]. 1: both are of windows. 2: ``scores`` is written here,
    from the logits, first. BLOCK > 0: ``block_counts`` holds lengths in tokens. A ranking that is not used
    (QUERY_AWARE or AGNOSTIC 0) is not read. EARLY: launched before the logits kernel has ended."""
    pair = tl.program_id(0).to(tl.int64)
    batch = pair // KV_HEADS
    head = pair % KV_HEADS
    blocks = tl.arange(0, BLOCKS_PAD)
    n_blocks = tl.load(block_counts + batch).to(tl.int32)
    if BLOCK > 0:
        n_blocks = tl.cdiv(n_blocks, BLOCK)
    n_blocks = tl.minimum(n_blocks, n_blocks_limit)
    exists = blocks < n_blocks
    scores_at = scores + pair * score_columns
    betas_at = betas + batch * beta_batch_stride + head * beta_head_stride

    n_windows = n_columns
    if SOURCE > 0:
        n_windows = visible_windows(window_counts, batch, n_columns, KERNEL, STRIDE)
    beta = tl.full([BLOCKS_PAD], float("-inf"), dtype=tl.float32)
    if (AGNOSTIC > 0) | KEEP_POOLED:
        if SOURCE > 0:
            beta = _pool(betas_at, n_windows, blocks, exists, RATIO)
        else:
            beta = tl.load(betas_at + blocks, mask=exists, other=float("-inf"))
    if EARLY:
        # The betas were pooled while the logits kernel still ran; its results, and any write of ours, come after it.
        gdc_wait()
    if SOURCE == 2:
        maximum, inverse = softmax_terms(maxima, sums, pair, GROUP_PAD, SPLITS, SPLITS_PAD)
        for start in range(0, n_columns, SCORE_TILE):
            columns = start + tl.arange(0, SCORE_TILE)
            shares = summed_shares(
                logits, pair, pitch, columns, columns < n_windows, maximum, inverse, GROUP, GROUP_PAD
            )
            tl.store(scores_at + columns, shares, mask=columns < n_columns)
        # Pooling reads what other threads of this CTA wrote: one value a window, whoever looks at it.
        tl.debug_barrier()
    score = tl.full([BLOCKS_PAD], float("-inf"), dtype=tl.float32)
    if (QUERY_AWARE > 0) | KEEP_POOLED:
        if SOURCE > 0:
            score = _pool(scores_at, n_windows, blocks, exists, RATIO)
        else:
            score = tl.load(scores_at + blocks, mask=exists, other=float("-inf"))
    if KEEP_POOLED:
        pooled_at = pair * n_blocks_limit + blocks
        tl.store(pooled_scores + pooled_at, score, mask=blocks < n_blocks_limit)
        tl.store(pooled_betas + pooled_at, beta, mask=blocks < n_blocks_limit)

    window = exists & (blocks >= n_blocks - 1 - LOCAL)
    chosen = exists
    origin = tl.full([BLOCKS_PAD], 4, dtype=tl.int32)
    error = 2147483647
    if n_blocks > TOPK:
        chosen = window | (blocks < INIT)
        origin = tl.where(window, 1, 0)
        candidates = exists & (chosen == 0)
        if QUERY_AWARE > 0:
            error = _first_nan(score, candidates, blocks)
            picked = _best(_ranking_keys(score, candidates), QUERY_AWARE, RADIX_BITS)
            origin = tl.where(picked, 2, origin)
            chosen = chosen | picked
            candidates = candidates & (picked == 0)
        if AGNOSTIC > 0:
            broken = _first_nan(beta, candidates, blocks)
            error = tl.where((error == 2147483647) & (broken != 2147483647), broken + 1073741824, error)
            picked = _best(_ranking_keys(beta, candidates), AGNOSTIC, RADIX_BITS)
            origin = tl.where(picked, 3, origin)
            chosen = chosen | picked
    tl.store(errors + pair, tl.where(error == 2147483647, -1, error))

    row_at = pair * TOPK
    position = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(block_ids + row_at + position, blocks, mask=chosen)
    tl.store(origins + row_at + position, origin.to(tl.int8), mask=chosen)
    count = tl.minimum(n_blocks, TOPK)
    places = tl.arange(0, TOPK_PAD)
    unused = (places >= count) & (places < TOPK)
    tl.store(block_ids + row_at + places, tl.full([TOPK_PAD], -1, dtype=tl.int32), mask=unused)
    tl.store(origins + row_at + places, tl.full([TOPK_PAD], -1, dtype=tl.int8), mask=unused)
    if head == 0:
        tl.store(counts + batch, count)


def launch_plan(n_blocks: int) -> tuple[int, int]:
    """(num_warps, radix_bits) for rows of that many blocks: more counts at once while the tile is small."""
    if n_blocks <= 512:
        return 4, 4
    if n_blocks <= 2048:
        return 8, 2
    return (16, 2) if n_blocks <= 4096 else (32, 1)


def _launch(
    split: SplitLogits | None,
    scores: Tensor,
    betas: Tensor,
    window_counts: Tensor,
    block_counts: Tensor,
    n_blocks: int,
    cfg: SparseConfig,
    method: Method,
    *,
    source: int,
    lengths_given: bool,
    keep_pooled: bool,
    num_warps: int | None,
    radix_bits: int | None,
    score_tile: int = 512,
    early: bool = False,
) -> StepSelection:
    if n_blocks > MAX_BLOCKS:
        raise CapacityError(f"{n_blocks} blocks a row exceed {MAX_BLOCKS}; use a larger block_size")
    if betas.stride(2) != 1:
        raise ConfigError(f"betas have strides {betas.stride()}; the last dimension must be contiguous")
    batch, n_kv_heads = scores.shape[:2]
    device, pairs = scores.device, batch * n_kv_heads
    block_ids = torch.empty((batch, n_kv_heads, cfg.topk), dtype=torch.int32, device=device)
    origins = torch.empty((batch, n_kv_heads, cfg.topk), dtype=torch.int8, device=device)
    counts = torch.empty((batch,), dtype=torch.int32, device=device)
    errors = torch.empty((batch, n_kv_heads), dtype=torch.int32, device=device)
    pooled = [
        torch.empty((batch, n_kv_heads, n_blocks), dtype=torch.float32, device=device) if keep_pooled else None
        for _ in range(2)
    ]
    splits, group_pad = split.maxima.shape[1:] if split else (1, 16)
    plan_warps, plan_bits = launch_plan(n_blocks)
    with on_device(scores):
        select_kernel[(pairs,)](
            split.logits if split else None,
            split.maxima if split else None,
            split.sums if split else None,
            scores,
            betas,
            window_counts,
            block_counts,
            block_ids,
            origins,
            counts,
            errors,
            *pooled,
            scores.shape[2],
            split.logits.shape[2] // 16 if split else 0,
            scores.shape[2],
            betas.stride(1),
            betas.stride(0),
            n_blocks,
            KV_HEADS=n_kv_heads,
            GROUP=split.logits.shape[1] if split else 1,
            GROUP_PAD=group_pad,
            SPLITS=splits,
            SPLITS_PAD=padded(splits),
            KERNEL=cfg.kernel_size if lengths_given else 0,
            STRIDE=cfg.kernel_stride,
            BLOCK=cfg.block_size if lengths_given else 0,
            RATIO=cfg.windows_per_block,
            INIT=cfg.init_blocks,
            LOCAL=cfg.local_blocks,
            QUERY_AWARE=method.query_aware_picks(cfg, cfg.n_forced),
            AGNOSTIC=method.fill(cfg, cfg.n_forced),
            TOPK=cfg.topk,
            TOPK_PAD=padded(cfg.topk),
            BLOCKS_PAD=max(16, padded(n_blocks)),
            SCORE_TILE=score_tile,
            RADIX_BITS=radix_bits or plan_bits,
            SOURCE=source,
            KEEP_POOLED=keep_pooled,
            EARLY=early,
            num_warps=num_warps or plan_warps,
            **({"launch_pdl": True} if early else {}),
        )
    return StepSelection(block_ids, origins, counts, errors, None, *pooled)


def select_pooled(
    scores: Tensor,
    betas: Tensor,
    n_blocks: Tensor,
    cfg: SparseConfig,
    method: Method,
    *,
    num_warps: int | None = None,
    radix_bits: int | None = None,
) -> StepSelection:
    """Select from pooled scores and betas float32 [batch, kv_head, block]; n_blocks [batch]. Never synchronises: NaN
    is reported in ``errors``. The method is not dense."""
    scores, betas = scores.float().contiguous(), betas.float().contiguous()
    return _launch(
        None,
        scores,
        betas,
        n_blocks,
        n_blocks,
        scores.shape[2],
        cfg,
        method,
        source=_FROM_BLOCKS,
        lengths_given=False,
        keep_pooled=False,
        num_warps=num_warps,
        radix_bits=radix_bits,
    )


def select_windows(
    scores: Tensor, betas: Tensor, lengths: Tensor, n_blocks: int, cfg: SparseConfig, method: Method
) -> StepSelection:
    """Pool and select from window scores and beta means float32 [batch, kv_head, window] (scores contiguous, betas in
    the last dimension); lengths int32 [batch], context tokens; n_blocks, how many blocks a row can have. Windows that
    a row's length does not complete are not read. Never synchronises. The method is not dense."""
    return _launch(
        None,
        scores,
        betas,
        lengths,
        lengths,
        n_blocks,
        cfg,
        method,
        source=_FROM_WINDOWS,
        lengths_given=True,
        keep_pooled=False,
        num_warps=None,
        radix_bits=None,
    )


def score_and_select(
    q: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    lengths: Tensor,
    n_blocks: int,
    cfg: SparseConfig,
    method: Method,
    *,
    keep_pooled: bool = False,
    num_warps: int | None = None,
    radix_bits: int | None = None,
    score_tile: int = 512,
    unfused_columns: int = UNFUSED_COLUMNS,
    early: bool = False,
) -> StepSelection:
    """Stage 1, pooling and selection of one decode step: two launches (three beyond ``unfused_columns`` windows).

    q [batch, q_head, head_dim] roped; key_means [batch, kv_head, window, head_dim] (batch stride 0 for many queries of
    one sequence); beta_means float32 [batch, kv_head, window]; lengths [batch], context tokens, read on the device;
    n_blocks, how many blocks a row can have. A method without query-aware picks needs one launch and returns no
    window scores. Never synchronises: NaN is reported in ``errors``. The method is not dense. ``early``: the second of
    two launches starts while the first runs (programmatic dependent launch) and pools the betas meanwhile.
    """
    batch, n_kv_heads, n_windows = key_means.shape[:3]
    split, source = None, _FROM_WINDOWS
    if method.query_aware_picks(cfg, cfg.n_forced) == 0 and not keep_pooled:
        scores = beta_means
    else:
        early = early and n_windows <= unfused_columns
        split = split_logits(q, key_means, lengths, kernel=cfg.kernel_size, stride=cfg.kernel_stride, release=early)
        if n_windows > unfused_columns:
            shape = (batch, n_kv_heads, n_windows)
            scores = window_scores(split, lengths, shape, kernel=cfg.kernel_size, stride=cfg.kernel_stride)
        else:
            scores = torch.empty((batch, n_kv_heads, n_windows), dtype=torch.float32, device=q.device)
            source = _FROM_LOGITS
    result = _launch(
        split,
        scores,
        beta_means,
        lengths,
        lengths,
        n_blocks,
        cfg,
        method,
        source=source,
        lengths_given=True,
        keep_pooled=keep_pooled,
        num_warps=num_warps,
        radix_bits=radix_bits,
        score_tile=score_tile,
        early=early and source == _FROM_LOGITS,
    )
    return result._replace(window_scores=scores if split else None)


def _aot_specs() -> list[AotSpec]:
    pointers = dict.fromkeys(("logits", "maxima", "sums", "scores", "betas"), "*fp32")
    pointers |= dict.fromkeys(("window_counts", "block_counts"), "*i32")
    pointers |= {"block_ids": "*i32", "origins": "*i8", "counts": "*i32", "errors": "*i32"}
    pointers |= dict.fromkeys(("pooled_scores", "pooled_betas"), "*fp32")
    names = ("n_columns", "pitch", "score_columns", "beta_head_stride", "beta_batch_stride", "n_blocks_limit")
    scalars = dict.fromkeys(names, "i32")
    specs = []
    for source, name in ((_FROM_BLOCKS, "blocks"), (_FROM_WINDOWS, "windows"), (_FROM_LOGITS, "logits")):
        for n_blocks in (256, 2048, 4096) if source != _FROM_LOGITS else (256,):
            num_warps, radix_bits = launch_plan(n_blocks)
            constants = {"KV_HEADS": 2, "GROUP": 16, "GROUP_PAD": 16, "SPLITS": 2, "SPLITS_PAD": 2, "KERNEL": 32}
            constants |= {"STRIDE": 16, "BLOCK": 64, "RATIO": 4, "INIT": 1, "LOCAL": 16, "QUERY_AWARE": 15}
            constants |= {"AGNOSTIC": 31, "TOPK": 64, "TOPK_PAD": 64, "BLOCKS_PAD": n_blocks, "SCORE_TILE": 512}
            constants |= {"RADIX_BITS": radix_bits, "SOURCE": source, "KEEP_POOLED": source > 0}
            constants |= {"EARLY": source == _FROM_LOGITS}
            signature = pointers | scalars | dict.fromkeys(constants, "constexpr")
            specs.append(AotSpec(f"select-{name}-{n_blocks}", select_kernel, signature, constants, num_warps))
    return specs


AOT_SPECS = _aot_specs()
