"""Biased block-sparse attention with exact gradients on a GPU: three Triton kernels, tile by tile.

A query head's tile of queries walks the tiles of keys that any query of it selected (forward, and again for the
gradient of q); a tile of keys walks the tiles of queries that selected any of it (gradients of k, v and beta). Which
query sees which block is one byte a query and block. beta is added in fp32 after the scaling, and its gradient is the
sum of a key's score gradients, gathered in registers: no atomics, so the same inputs give the same bits.

Floor: 2 products a pair of tiles forward and 7 backward (4 * tokens^2 * head_dim FLOPs a product pair and query head,
halved by causality, times the share of tiles that are walked). At k = 1/4 of 8K most tiles are walked: neighbouring
queries differ in a few blocks, 128 of them together see more than half of the past.
Knobs worth scanning: ``ROWS`` (64, 128), ``COLS`` (64, 128), ``num_warps`` (4, 8), ``num_stages`` (2, 3).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import interpreting, on_device
from nosa_sys.kernels.sparse_decode_attention.triton import accumulate, dot_scores, online_softmax
from nosa_sys.work_splits import padded

_LOG2_E = math.log2(math.e)
ROWS, COLS = 128, 64  # queries and keys of a tile
_FP32_SIDE = 32  # fp32 products keep their operands in registers


@triton.jit
def _add_dot(a, b, total, UPCAST: tl.constexpr):
    """total + a . b, fp32; a takes the type of b."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=total, input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, acc=total, input_precision="ieee")


@triton.jit
def _selected(member, kv_head, column_tile, rows, cols, n_tokens, n_blocks, BLOCK: tl.constexpr, COLS: tl.constexpr):
    """Whether a query selected a key's block: [rows, cols], or [rows, 1] where a tile of keys lies in one block."""
    member_at = member + kv_head.to(tl.int64) * n_blocks * n_tokens
    in_rows = rows < n_tokens
    if BLOCK % COLS == 0:
        block = (column_tile * COLS // BLOCK).to(tl.int64)
        byte = tl.load(member_at + block * n_tokens + rows, mask=in_rows, other=0)
        return (byte != 0)[:, None]
    else:
        blocks = (cols // BLOCK).to(tl.int64)
        mask = in_rows[:, None] & (blocks < n_blocks)[None, :]
        return tl.load(member_at + blocks[None, :] * n_tokens + rows[:, None], mask=mask, other=0) != 0


@triton.jit(do_not_specialize=["n_tokens", "n_blocks", "n_row_tiles", "n_col_tiles"])
def forward_kernel(
    q,
    k,
    v,
    beta,
    member,
    counts,
    listed,
    out,
    lse,
    n_tokens,
    n_blocks,
    n_row_tiles,
    n_col_tiles,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One CTA: one tile of queries of one query head, the last tiles first. q and out [token, q_head, DIM], k and v
    [token, kv_head, DIM], beta [token, kv_head], member [kv_head, block, token]; counts [kv_head, row tile] of the
    tiles of keys in listed [kv_head, row tile, column tile]; lse [q_head, token] in base 2. member None: all blocks."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head = place % (KV_HEADS * GROUP)
    row_tile = place // (KV_HEADS * GROUP)
    kv_head = head // GROUP
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    in_rows = rows < n_tokens
    in_dim = dims < DIM
    row_at = (rows.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    row_mask = in_rows[:, None] & in_dim[None, :]
    queries = tl.load(q + row_at[:, None] + dims[None, :], mask=row_mask, other=0.0)
    if member is None:
        n_listed = tl.cdiv(tl.minimum((row_tile + 1) * ROWS, n_tokens), COLS)
    else:
        n_listed = tl.load(counts + kv_head * n_row_tiles + row_tile)
    listed_at = listed + (kv_head * n_row_tiles + row_tile).to(tl.int64) * n_col_tiles
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)
    for step in tl.range(0, n_listed, num_stages=STAGES):
        column_tile = step
        if member is not None:
            column_tile = tl.load(listed_at + step)
        cols = column_tile * COLS + tl.arange(0, COLS)
        in_cols = cols < n_tokens
        col_at = (cols.to(tl.int64) * KV_HEADS + kv_head) * DIM
        keys = tl.load(k + col_at[None, :] + dims[:, None], mask=in_cols[None, :] & in_dim[:, None], other=0.0)
        scores = dot_scores(queries, keys, UPCAST) * scale_log2
        if beta is not None:
            bias = tl.load(beta + cols * KV_HEADS + kv_head, mask=in_cols, other=0.0)
            scores += bias[None, :] * 1.4426950408889634
        seen = rows[:, None] >= cols[None, :]
        if member is not None:
            seen = seen & _selected(member, kv_head, column_tile, rows, cols, n_tokens, n_blocks, BLOCK, COLS)
        scores = tl.where(seen, scores, float("-inf"))
        weights, maximum, total, factor = online_softmax(scores, maximum, total)
        values = tl.load(v + col_at[:, None] + dims[None, :], mask=in_cols[:, None] & in_dim[None, :], other=0.0)
        sums = accumulate(weights, values, sums, factor, UPCAST)
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=row_mask)
    tl.store(lse + head * n_tokens + rows, maximum + tl.log2(total), mask=in_rows)


@triton.jit(do_not_specialize=["n_tokens", "n_blocks", "n_row_tiles", "n_col_tiles"])
def query_gradient_kernel(
    q,
    k,
    v,
    beta,
    member,
    counts,
    listed,
    gradient,
    lse,
    drops,
    q_gradient,
    n_tokens,
    n_blocks,
    n_row_tiles,
    n_col_tiles,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As ``forward_kernel``, with ``gradient`` of the output [token, q_head, DIM] and ``drops`` [q_head, token], the
    products of output and gradient."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head = place % (KV_HEADS * GROUP)
    row_tile = place // (KV_HEADS * GROUP)
    kv_head = head // GROUP
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    in_rows = rows < n_tokens
    in_dim = dims < DIM
    row_at = (rows.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    row_mask = in_rows[:, None] & in_dim[None, :]
    queries = tl.load(q + row_at[:, None] + dims[None, :], mask=row_mask, other=0.0)
    received = tl.load(gradient + row_at[:, None] + dims[None, :], mask=row_mask, other=0.0)
    row_lse = tl.load(lse + head * n_tokens + rows, mask=in_rows, other=0.0)
    row_drop = tl.load(drops + head * n_tokens + rows, mask=in_rows, other=0.0)
    if member is None:
        n_listed = tl.cdiv(tl.minimum((row_tile + 1) * ROWS, n_tokens), COLS)
    else:
        n_listed = tl.load(counts + kv_head * n_row_tiles + row_tile)
    listed_at = listed + (kv_head * n_row_tiles + row_tile).to(tl.int64) * n_col_tiles
    total = tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)
    for step in tl.range(0, n_listed, num_stages=STAGES):
        column_tile = step
        if member is not None:
            column_tile = tl.load(listed_at + step)
        cols = column_tile * COLS + tl.arange(0, COLS)
        in_cols = cols < n_tokens
        col_at = (cols.to(tl.int64) * KV_HEADS + kv_head) * DIM
        col_mask = in_cols[None, :] & in_dim[:, None]
        keys = tl.load(k + col_at[None, :] + dims[:, None], mask=col_mask, other=0.0)
        scores = dot_scores(queries, keys, UPCAST) * (scale * 1.4426950408889634)
        if beta is not None:
            bias = tl.load(beta + cols * KV_HEADS + kv_head, mask=in_cols, other=0.0)
            scores += bias[None, :] * 1.4426950408889634
        seen = rows[:, None] >= cols[None, :]
        if member is not None:
            seen = seen & _selected(member, kv_head, column_tile, rows, cols, n_tokens, n_blocks, BLOCK, COLS)
        weights = tl.exp2(tl.where(seen, scores - row_lse[:, None], float("-inf")))
        values = tl.load(v + col_at[None, :] + dims[:, None], mask=col_mask, other=0.0)
        slopes = weights * (dot_scores(received, values, UPCAST) - row_drop[:, None])
        total = _add_dot(slopes, tl.trans(keys), total, UPCAST)
    result = (total * scale).to(q_gradient.dtype.element_ty)
    tl.store(q_gradient + row_at[:, None] + dims[None, :], result, mask=row_mask)


@triton.jit(do_not_specialize=["n_tokens", "n_blocks", "n_row_tiles", "n_col_tiles"])
def key_gradient_kernel(
    q,
    k,
    v,
    beta,
    member,
    counts,
    listed,
    gradient,
    lse,
    drops,
    k_gradient,
    v_gradient,
    beta_gradient,
    n_tokens,
    n_blocks,
    n_row_tiles,
    n_col_tiles,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One CTA: one tile of keys under one query head, the first tiles first since most queries see them. counts
    [kv_head, column tile] of the tiles of queries in listed [kv_head, column tile, row tile]. fp32 gradients by query
    head: of k and v [q_head, token, DIM], of beta [q_head, token] (None: there is no beta)."""
    head = tl.program_id(0) % (KV_HEADS * GROUP)
    column_tile = tl.program_id(0) // (KV_HEADS * GROUP)
    kv_head = head // GROUP
    cols = column_tile * COLS + tl.arange(0, COLS)
    dims = tl.arange(0, DIM_PAD)
    in_cols = cols < n_tokens
    in_dim = dims < DIM
    col_at = (cols.to(tl.int64) * KV_HEADS + kv_head) * DIM
    col_mask = in_cols[:, None] & in_dim[None, :]
    keys = tl.load(k + col_at[:, None] + dims[None, :], mask=col_mask, other=0.0)
    values = tl.load(v + col_at[:, None] + dims[None, :], mask=col_mask, other=0.0)
    if beta is not None:
        bias = tl.load(beta + cols * KV_HEADS + kv_head, mask=in_cols, other=0.0) * 1.4426950408889634
    first = column_tile * COLS // ROWS
    n_listed = n_row_tiles - first
    if member is not None:
        n_listed = tl.load(counts + kv_head * n_col_tiles + column_tile)
    listed_at = listed + (kv_head * n_col_tiles + column_tile).to(tl.int64) * n_row_tiles
    of_keys = tl.zeros([COLS, DIM_PAD], dtype=tl.float32)
    of_values = tl.zeros([COLS, DIM_PAD], dtype=tl.float32)
    of_beta = tl.zeros([COLS], dtype=tl.float32)
    for step in tl.range(0, n_listed, num_stages=STAGES):
        row_tile = first + step
        if member is not None:
            row_tile = tl.load(listed_at + step)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_tokens
        row_at = (rows.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
        queries = tl.load(q + row_at[None, :] + dims[:, None], mask=in_rows[None, :] & in_dim[:, None], other=0.0)
        row_lse = tl.load(lse + head * n_tokens + rows, mask=in_rows, other=0.0)
        row_drop = tl.load(drops + head * n_tokens + rows, mask=in_rows, other=0.0)
        scores = dot_scores(keys, queries, UPCAST) * (scale * 1.4426950408889634)
        if beta is not None:
            scores += bias[:, None]
        seen = (rows[None, :] >= cols[:, None]) & in_rows[None, :]
        if member is not None:
            chosen = _selected(member, kv_head, column_tile, rows, cols, n_tokens, n_blocks, BLOCK, COLS)
            seen = seen & tl.trans(chosen)
        weights = tl.exp2(tl.where(seen, scores - row_lse[None, :], float("-inf")))
        row_mask = in_rows[:, None] & in_dim[None, :]
        received = tl.load(gradient + row_at[:, None] + dims[None, :], mask=row_mask, other=0.0)
        of_values = _add_dot(weights, received, of_values, UPCAST)
        slopes = weights * (dot_scores(values, tl.trans(received), UPCAST) - row_drop[None, :])
        of_keys = _add_dot(slopes, tl.trans(queries), of_keys, UPCAST)
        of_beta += tl.sum(slopes, axis=1)
    at = (head.to(tl.int64) * n_tokens + cols)[:, None] * DIM + dims[None, :]
    tl.store(k_gradient + at, of_keys * scale, mask=col_mask)
    tl.store(v_gradient + at, of_values, mask=col_mask)
    if beta_gradient is not None:
        tl.store(beta_gradient + head * n_tokens + cols, of_beta, mask=in_cols)


class TileLists(NamedTuple):
    """What is walked: member int8 [kv_head, block, token]; tiles of keys by tile of queries (counts int32 [kv_head,
    row tile], ids int32 [kv_head, row tile, column tile], the first ``counts`` of them), and the other way round."""

    member: Tensor
    row_counts: Tensor
    row_tiles: Tensor
    column_counts: Tensor
    column_tiles: Tensor


def tile_sides(dtype: torch.dtype, dim: int) -> tuple[int, int]:
    """(queries, keys) of a tile, for heads of that many channels."""
    if dtype == torch.float32:
        return _FP32_SIDE, _FP32_SIDE
    return (ROWS if dim <= 64 else ROWS // 2), COLS


def tile_lists(member: Tensor, block_size: int, rows: int, cols: int) -> TileLists:
    """Lists of the tiles of ``rows`` queries and ``cols`` keys in which a query of member bool [kv_head, token, block]
    selected a key at or before it. Does not wait for a GPU."""
    n_tokens, n_blocks = member.shape[1:]
    n_row_tiles, n_col_tiles = -(-n_tokens // rows), -(-n_tokens // cols)
    some = F.pad(member, (0, 0, 0, n_row_tiles * rows - n_tokens)).unflatten(1, (n_row_tiles, rows)).any(2)
    first = torch.arange(n_col_tiles, device=member.device) * cols
    block = torch.arange(n_blocks, device=member.device).unsqueeze(1) * block_size
    overlap = (block < first + cols) & (block + block_size > first)  # [block, column tile]
    walked = (some.float() @ overlap.float()) > 0
    last_row = (torch.arange(n_row_tiles, device=member.device) + 1) * rows - 1
    walked &= first <= last_row.unsqueeze(1)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().sort(dim=-1, descending=True, stable=True).indices
        return chosen.sum(-1, dtype=torch.int32), order.int()

    bytes_of = member.transpose(1, 2).to(torch.int8).contiguous()
    return TileLists(bytes_of, *listed(walked), *listed(walked.transpose(1, 2).contiguous()))


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, member: Tensor | None, block_size: int
) -> Tensor:
    """Causal attention over the selected blocks, differentiable in q, k, v and beta.

    q [tokens, q_head, head_dim], k and v [tokens, kv_head, head_dim] of one type (bfloat16, float16 or float32), beta
    float32 [tokens, kv_head] or None, member bool [kv_head, tokens, block] or None for all blocks. Every query must
    see a token. Returns [tokens, q_head, head_dim] in q's type.
    """
    lists = None if member is None else tile_lists(member, block_size, *tile_sides(q.dtype, q.shape[2]))
    return _BlockAttention.apply(q, k, v, beta, lists, block_size)  # type: ignore[no-any-return, no-untyped-call]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lists: TileLists | None, block_size: int
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        beta = None if beta is None else beta.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        plan = _Plan(q, k, block_size, lists)
        with on_device(q):
            forward_kernel[(plan.n_row_tiles * q.shape[1],)](
                q, k, v, beta, *plan.by_rows, out, lse, *plan.sizes, plan.scale * _LOG2_E,
                **plan.constants, STAGES=2, num_warps=4 if plan.rows * plan.cols <= 64 * 64 else 8,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, beta, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def, override]
        q, k, v, beta, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradient = gradient.contiguous()
        drops = (out.float() * gradient.float()).sum(-1).T.contiguous()
        n_tokens, n_q_heads, dim = q.shape
        q_gradient = torch.empty_like(q)
        by_head = [torch.empty((n_q_heads, n_tokens, dim), dtype=torch.float32, device=q.device) for _ in range(2)]
        of_beta = None if beta is None else torch.empty_like(lse)
        shared = (gradient, lse, drops)
        with on_device(q):
            query_gradient_kernel[(plan.n_row_tiles * n_q_heads,)](
                q, k, v, beta, *plan.by_rows, *shared, q_gradient, *plan.sizes, plan.scale,
                **plan.constants, STAGES=2, num_warps=8,
            )  # fmt: skip
            key_gradient_kernel[(plan.n_col_tiles * n_q_heads,)](
                q, k, v, beta, *plan.by_columns, *shared, *by_head, of_beta, *plan.sizes, plan.scale,
                **plan.constants, STAGES=2, num_warps=8,
            )  # fmt: skip
        k_gradient, v_gradient = (x.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(k.dtype) for x in by_head)
        beta_gradient = None if of_beta is None else of_beta.unflatten(0, (k.shape[1], -1)).sum(1).T.contiguous()
        return q_gradient, k_gradient, v_gradient, beta_gradient, None, None


class _Plan:
    """Arguments that the three kernels share."""

    def __init__(self, q: Tensor, k: Tensor, block_size: int, lists: TileLists | None) -> None:
        n_tokens, n_q_heads, dim = q.shape
        self.rows, self.cols = tile_sides(q.dtype, dim)
        self.n_row_tiles, self.n_col_tiles = -(-n_tokens // self.rows), -(-n_tokens // self.cols)
        self.sizes = (n_tokens, -(-n_tokens // block_size), self.n_row_tiles, self.n_col_tiles)
        self.scale = 1.0 / math.sqrt(dim)
        none = torch.empty(0, dtype=torch.int32, device=q.device)  # pointers that are not followed
        self.by_rows: tuple[Tensor | None, ...] = (None, none, none)
        self.by_columns: tuple[Tensor | None, ...] = self.by_rows
        if lists is not None:
            self.by_rows = (lists.member, lists.row_counts, lists.row_tiles)
            self.by_columns = (lists.member, lists.column_counts, lists.column_tiles)
        upcast = interpreting() or q.dtype == torch.float32
        self.constants: dict[str, Any] = {"KV_HEADS": k.shape[1], "GROUP": n_q_heads // k.shape[1], "DIM": dim}
        self.constants |= {"DIM_PAD": padded(dim), "BLOCK": block_size, "ROWS": self.rows, "COLS": self.cols}
        self.constants |= {"UPCAST": upcast}


def _aot_specs() -> list[AotSpec]:
    ints = dict.fromkeys(("n_tokens", "n_blocks", "n_row_tiles", "n_col_tiles"), "i32")
    specs = []
    for dtype, dim, block, dense in (
        ("bf16", 64, 64, False),
        ("bf16", 64, 16, False),
        ("bf16", 64, 64, True),
        ("bf16", 128, 64, False),
        ("fp32", 64, 64, False),
    ):
        rows, cols = tile_sides(torch.float32 if dtype == "fp32" else torch.bfloat16, dim)
        pointers = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | {"beta": "*fp32"}
        pointers |= {"member": "*i8", "counts": "*i32", "listed": "*i32"}
        constants: dict[str, Any] = {"KV_HEADS": 3, "GROUP": 3, "DIM": dim, "DIM_PAD": padded(dim), "BLOCK": block}
        constants |= {"ROWS": rows, "COLS": cols, "UPCAST": dtype == "fp32", "STAGES": 2}
        constants |= {"member": None} if dense else {}
        backward = {"gradient": f"*{dtype}", "lse": "*fp32", "drops": "*fp32"}
        by_head = dict.fromkeys(("k_gradient", "v_gradient", "beta_gradient"), "*fp32")
        for name, kernel, more, scale in (
            ("forward", forward_kernel, {"out": f"*{dtype}", "lse": "*fp32"}, "scale_log2"),
            ("query-gradient", query_gradient_kernel, backward | {"q_gradient": f"*{dtype}"}, "scale"),
            ("key-gradient", key_gradient_kernel, backward | by_head, "scale"),
        ):
            signature = pointers | more | ints | {scale: "fp32"} | dict.fromkeys(constants, "constexpr")
            warps = 4 if name == "forward" and rows * cols <= 64 * 64 else 8
            label = f"{name}-{dtype}-{dim}-{'dense' if dense else block}"
            specs.append(AotSpec(label, kernel, signature, constants, warps))
    return specs


AOT_SPECS = _aot_specs()
