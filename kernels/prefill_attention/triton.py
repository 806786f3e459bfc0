"""Prefill attention with a selection of its own for every query.

Neighbouring queries select nearly the same blocks. ``union_kernel`` lists, for a tile of queries of one KV head, the
blocks that any of them selected, with one bit a query; ``attend_tile_kernel`` walks that list once for all of them
(query heads x queries = the rows of a tensor-core tile) and masks by bit and causality. Without a selection it walks
all blocks up to the tile's last query.

Floor: 4 * rows * tokens * D FLOPs a block and tile; K and V come from L2. With k = 64 and g = 16 four queries share a
list of about 70 blocks, a quarter of the traffic and of the matrix work of one query at a time.
Knobs worth scanning: ``rows`` (64, 128), ``tile`` (64, 128), ``num_warps`` (4, 8), ``num_stages`` (2, 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import interpreting, on_device
from nosa_sys.kernels.prefill_attention import selection
from nosa_sys.kernels.sparse_decode_attention.triton import accumulate, default_tile, dot_scores, online_softmax
from nosa_sys.work_splits import padded

_LOG2_E = math.log2(math.e)
# One bit a query in an int32 word.
_MAX_QUERIES = 32


@triton.jit(do_not_specialize=["n_queries", "first_position", "n_blocks", "n_listed"])
def union_kernel(
    block_ids,
    words,
    union_ids,
    union_words,
    union_counts,
    n_queries,
    first_position,
    n_blocks,
    n_listed,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    """One CTA: one (tile of QUERIES queries, kv_head). block_ids [query, kv_head, TOPK]; words int32 scratch
    [tile, kv_head, n_blocks]; union_ids and union_words [tile, kv_head, n_listed], ascending; union_counts
    [tile, kv_head]. Blocks after a query are dropped."""
    place = tl.program_id(0).to(tl.int64)
    tile = place // KV_HEADS
    head = place % KV_HEADS
    blocks = tl.arange(0, BLOCKS_PAD)
    words_at = words + place * n_blocks
    tl.store(words_at + blocks, tl.zeros([BLOCKS_PAD], dtype=tl.int32), mask=blocks < n_blocks)
    tl.debug_barrier()
    queries = tl.arange(0, QUERIES)
    columns = tl.arange(0, TOPK_PAD)
    query = tile * QUERIES + queries
    ids_at = block_ids + (query * KV_HEADS + head)[:, None] * TOPK + columns[None, :]
    ids = tl.load(ids_at, mask=(query < n_queries)[:, None] & (columns < TOPK)[None, :], other=-1)
    last_block = (first_position + query) // BLOCK
    wanted = (ids >= 0) & (ids < n_blocks) & (ids <= last_block[:, None])
    bits = tl.zeros([QUERIES, TOPK_PAD], dtype=tl.int32) + (tl.full([QUERIES], 1, dtype=tl.int32) << queries)[:, None]
    tl.atomic_or(words_at + tl.where(wanted, ids, 0), bits, mask=wanted, sem="relaxed")
    tl.debug_barrier()
    # The atomics were done in L2: do not read the zeros that L1 may hold.
    word = tl.load(words_at + blocks, mask=blocks < n_blocks, other=0, cache_modifier=".cg")
    used = word != 0
    position = tl.cumsum(used.to(tl.int32), axis=0) - 1
    tl.store(union_ids + place * n_listed + position, blocks, mask=used)
    tl.store(union_words + place * n_listed + position, word, mask=used)
    tl.store(union_counts + place, tl.sum(used.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["n_queries", "first_position", "n_listed", "q_rows", "kv_rows"])
def attend_tile_kernel(
    q,
    k,
    v,
    beta,
    union_ids,
    union_words,
    union_counts,
    out,
    n_queries,
    first_position,
    n_listed,
    q_rows,
    kv_rows,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One CTA: one tile of queries of one KV head, the last tiles first since they see most. ``q_rows`` and
    ``kv_rows``: rows of DIM elements from one token to the next. union_ids None: every block."""
    PACK: tl.constexpr = TILE // BLOCK_PAD if TILE > BLOCK_PAD else 1
    PARTS: tl.constexpr = (BLOCK + TILE - 1) // TILE
    place = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    head = place % KV_HEADS
    first_query = (place // KV_HEADS) * QUERIES
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    lanes = tl.arange(0, TILE)
    in_dim = dims < DIM
    query = rows // GROUP_PAD
    in_query = (query < QUERIES) & (first_query + query < n_queries) & (rows % GROUP_PAD < GROUP)
    row_at = (first_query + query) * q_rows + head * GROUP + rows % GROUP_PAD
    mask = in_query[:, None] & in_dim[None, :]
    queries = tl.load(q + row_at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    positions = first_position + first_query.to(tl.int32) + query
    last_position = first_position + tl.minimum(first_query.to(tl.int32) + QUERIES, n_queries) - 1

    if union_ids is None:
        n_entries = last_position // BLOCK + 1
    else:
        n_entries = tl.load(union_counts + place)
        ids_at = union_ids + place * n_listed
        words_at = union_words + place * n_listed
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(n_entries, PACK) * PARTS, num_stages=STAGES):
        if PACK == 1:
            entry = step // PARTS
            offset = (step % PARTS) * TILE + lanes
            if union_ids is None:
                token = entry * BLOCK + offset
                seen = positions[:, None] >= token[None, :]
            else:
                token = tl.load(ids_at + entry) * BLOCK + offset
                member = (tl.load(words_at + entry) >> query) & 1
                seen = (positions[:, None] >= token[None, :]) & (member != 0)[:, None]
            exists = (offset < BLOCK) & (token <= last_position)
        else:
            entry = step * PACK + lanes // BLOCK_PAD
            offset = lanes % BLOCK_PAD
            there = entry < n_entries
            if union_ids is None:
                token = entry * BLOCK + offset
                seen = positions[:, None] >= token[None, :]
            else:
                token = tl.load(ids_at + entry, mask=there, other=0) * BLOCK + offset
                word = tl.load(words_at + entry, mask=there, other=0)
                seen = (positions[:, None] >= token[None, :]) & (((word[None, :] >> query[:, None]) & 1) != 0)
            exists = there & (offset < BLOCK) & (token <= last_position)
        token_row = token.to(tl.int64) * kv_rows + head
        keys = tl.load(k + token_row[None, :] * DIM + dims[:, None], mask=exists[None, :] & in_dim[:, None], other=0.0)
        scores = dot_scores(queries, keys, UPCAST) * scale_log2
        if beta is not None:
            bias = tl.load(beta + token.to(tl.int64) * KV_HEADS + head, mask=exists, other=0.0).to(tl.float32)
            scores += bias[None, :] * 1.4426950408889634
        scores = tl.where(seen & exists[None, :], scores, float("-inf"))
        weights, maximum, total, factor = online_softmax(scores, maximum, total)
        values = tl.load(
            v + token_row[:, None] * DIM + dims[None, :], mask=exists[:, None] & in_dim[None, :], other=0.0
        )
        sums = accumulate(weights, values, sums, factor, UPCAST)

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = ((first_query + query) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP_PAD)[:, None] * DIM
    tl.store(out + out_at + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


def _rows_of(x: Tensor) -> Tensor:
    """x [token, head, dim] with heads contiguous; a view of a fused projection stays what it is."""
    dim = x.shape[2]
    return x if x.stride(2) == 1 and x.stride(1) == dim and x.stride(0) % dim == 0 else x.contiguous()


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    block_ids: Tensor | None,
    first_position: int,
    block_size: int,
    *,
    rows: int | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 2,
) -> Tensor:
    """As ``reference.prefill_attention``, without gradient. ``rows`` None: 64 with a selection, whose union grows with
    the tile, else 128; ``num_warps`` None: one for 16 rows."""
    n_tokens, n_q_heads, dim = q.shape
    n_kv_heads = k.shape[1]
    out = torch.empty((n_tokens, n_q_heads, dim), dtype=q.dtype, device=q.device)
    if n_tokens == 0:
        return out
    q, k, v = _rows_of(q), _rows_of(k), _rows_of(v)
    v = v if v.stride(0) == k.stride(0) else v.contiguous()
    k = k if v.stride(0) == k.stride(0) else k.contiguous()
    beta = None if beta is None else beta.contiguous()
    group = n_q_heads // n_kv_heads
    group_pad = padded(group)
    rows = rows or (128 if block_ids is None else 64)
    if q.dtype == torch.float32:  # fp32 dots keep their operands in registers
        rows = min(rows, 32)
    n_queries = max(1, rows // group_pad)
    n_queries = n_queries if block_ids is None else min(_MAX_QUERIES, n_queries)
    rows = max(16, n_queries * group_pad)
    n_tiles = -(-n_tokens // n_queries)
    union: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    n_listed = 0
    with on_device(q):
        if block_ids is not None:
            n_blocks, topk = -(-(first_position + n_tokens) // block_size), block_ids.shape[2]
            n_listed = min(n_blocks, n_queries * topk)
            shape = (n_tiles, n_kv_heads)
            words = torch.empty((*shape, n_blocks), dtype=torch.int32, device=q.device)
            union_ids = torch.empty((*shape, n_listed), dtype=torch.int32, device=q.device)
            union = (union_ids, torch.empty_like(union_ids), torch.empty(shape, dtype=torch.int32, device=q.device))
            union_kernel[(n_tiles * n_kv_heads,)](
                block_ids.contiguous(),
                words,
                *union,
                n_tokens,
                first_position,
                n_blocks,
                n_listed,
                KV_HEADS=n_kv_heads,
                TOPK=topk,
                TOPK_PAD=padded(topk),
                QUERIES=n_queries,
                BLOCK=block_size,
                BLOCKS_PAD=padded(n_blocks),
                num_warps=4,
            )
        attend_tile_kernel[(n_tiles * n_kv_heads,)](
            q,
            k,
            v,
            beta,
            *union,
            out,
            n_tokens,
            first_position,
            n_listed,
            q.stride(0) // dim,
            k.stride(0) // dim,
            _LOG2_E / math.sqrt(dim),
            KV_HEADS=n_kv_heads,
            GROUP=group,
            GROUP_PAD=group_pad,
            QUERIES=n_queries,
            ROWS=rows,
            DIM=dim,
            DIM_PAD=padded(dim),
            BLOCK=block_size,
            BLOCK_PAD=padded(block_size),
            TILE=tile or default_tile(q.dtype),
            UPCAST=interpreting() or q.dtype == torch.float32,
            STAGES=num_stages,
            num_warps=num_warps or max(4, rows // 16),
        )
    return out


def _aot_specs() -> list[AotSpec]:
    names = ("n_queries", "first_position", "n_blocks", "n_listed")
    constants: dict[str, Any] = {"KV_HEADS": 2, "TOPK": 64, "TOPK_PAD": 64, "QUERIES": 4, "BLOCK": 64}
    constants |= {"BLOCKS_PAD": 256}
    lists = dict.fromkeys(("union_ids", "union_words", "union_counts"), "*i32")
    signature = {"block_ids": "*i32", "words": "*i32"} | lists | dict.fromkeys(names, "i32")
    specs = [AotSpec("union", union_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, 4)]
    scalars = dict.fromkeys(("n_queries", "first_position", "n_listed", "q_rows", "kv_rows"), "i32")
    for dtype, dim, block, group, queries, dense in (
        ("bf16", 128, 64, 16, 4, False),
        ("bf16", 128, 64, 16, 8, True),
        ("bf16", 80, 16, 3, 16, False),
        ("fp16", 96, 48, 4, 16, False),
        ("fp16", 64, 128, 1, 32, True),
        ("fp32", 64, 64, 3, 8, False),
        ("fp32", 128, 16, 4, 8, True),
    ):
        constants = {"KV_HEADS": 2, "GROUP": group, "GROUP_PAD": padded(group), "QUERIES": queries}
        constants |= {"ROWS": queries * padded(group), "DIM": dim, "DIM_PAD": padded(dim), "BLOCK": block}
        constants |= {"BLOCK_PAD": padded(block), "TILE": 32 if dtype == "fp32" else 64, "UPCAST": dtype == "fp32"}
        constants |= {"STAGES": 2} | (dict.fromkeys(["beta", *lists]) if dense else {})
        pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {"beta": "*fp32"} | lists
        signature = pointers | scalars | {"scale_log2": "fp32"} | dict.fromkeys(constants, "constexpr")
        name = f"attend-{'dense' if dense else 'selected'}-{dtype}-{dim}-{block}"
        specs.append(AotSpec(name, attend_tile_kernel, signature, constants, max(4, constants["ROWS"] // 16), 2))
    return specs


AOT_SPECS = [*_aot_specs(), *selection.AOT_SPECS]
