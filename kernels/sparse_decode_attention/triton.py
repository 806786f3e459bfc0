"""Decode attention over KV blocks, split along the context: slots or pages of a selection, pages of a whole context.

``attend_kernel`` gives one CTA a run of blocks of one (batch, kv_head): an online softmax over tiles of tokens, K and V
of the next tiles already on their way (``num_stages``). ``combine_kernel`` merges the splits by their log-sum-exp; it
is not launched when there is one split.

Floor: the bytes of the attended K and V at the device's copy rate. B 64, k 64, Hkv 2, block 64, D 128, bf16: 268 MB,
62 us at 4.3 TB/s; Hkv 8: 1.07 GB, 250 us; dense 16K, B 16, Hkv 8: 1.07 GB.
Knobs worth scanning: ``ctas_per_sm`` (1, 2, 3), ``num_stages`` (2 to 5), ``num_warps`` (4, 8), ``tile`` (64, 128).
One CTA's stages hold 2 * tile * D * e bytes each: 32 KiB at the defaults, of 227 KiB an SM.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import interpreting, n_sms, on_device
from nosa_sys.kernels.sparse_decode_attention.reference import slots_or_pages
from nosa_sys.work_splits import choose_splits, padded, tile_units

_LOG2_E = math.log2(math.e)


@triton.jit
def online_softmax(scores, maximum, total):
    """One tile of base-2 scores: (weights, new maximum, new total, factor for what was accumulated before)."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
    floor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    factor = tl.exp2(maximum - floor)
    weights = tl.exp2(scores - floor[:, None])
    return weights, new_maximum, total * factor + tl.sum(weights, axis=1), factor


@triton.jit
def accumulate(weights, values, sums, factor, UPCAST: tl.constexpr):
    """sums * factor + weights . values, fp32."""
    if UPCAST:
        return tl.dot(weights, values.to(tl.float32), acc=sums * factor[:, None], input_precision="ieee")
    return tl.dot(weights.to(values.dtype), values, acc=sums * factor[:, None], input_precision="ieee")


@triton.jit
def dot_scores(query, keys, UPCAST: tl.constexpr):
    """query [rows, dim] . keys [dim, tokens], fp32."""
    if UPCAST:
        return tl.dot(query.to(tl.float32), keys.to(tl.float32), input_precision="ieee")
    return tl.dot(query, keys.to(query.dtype), input_precision="ieee")


@triton.jit(do_not_specialize=["n_entries", "table_width", "table_pitch", "q_batch_rows"])
def attend_kernel(
    q,
    kv,
    betas,
    rows,
    block_ids,
    counts,
    lengths,
    out,
    lse,
    n_entries,
    table_width,
    table_pitch,
    q_batch_rows,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGED: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """kv [row, 2, BLOCK, DIM]. Slots: rows int64 and block_ids int32 [batch, kv_head, n_entries]. PAGED: rows is a
    table [batch, table_width] of pages, its rows table_pitch apart; row = page * KV_HEADS + kv_head. Its entries are
    those that block_ids name, or, without block_ids, every block of the context (n_entries = table_width). With counts
    int32 [batch, kv_head] only so many entries of block_ids are looked at.

    A tile holds TILE / BLOCK_PAD blocks, or the TILE-token part of one block. out [batch, q_head, SPLITS, DIM] and lse
    [batch, q_head, SPLITS], natural log. The same block id in two neighbouring entries counts once.
    """
    PACK: tl.constexpr = TILE // BLOCK_PAD if TILE > BLOCK_PAD else 1
    PARTS: tl.constexpr = (BLOCK + TILE - 1) // TILE
    split = tl.program_id(0) % SPLITS
    pair = (tl.program_id(0) // SPLITS).to(tl.int64)
    batch = pair // KV_HEADS
    head = pair % KV_HEADS
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    lanes = tl.arange(0, TILE)
    in_group = heads < GROUP
    in_dim = dims < DIM

    query_at = q + (batch * q_batch_rows + head * GROUP) * DIM + heads[:, None] * DIM + dims[None, :]
    query = tl.load(query_at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
    length = tl.load(lengths + batch).to(tl.int32)
    LISTED: tl.constexpr = block_ids is not None
    BY_ID: tl.constexpr = PAGED and LISTED
    entries_at = rows + (batch * table_pitch if PAGED else pair * n_entries)
    n_listed = n_entries
    if LISTED:
        ids_at = block_ids + pair * n_entries
        if counts is not None:
            n_listed = tl.minimum(tl.load(counts + pair), n_entries)
    else:
        n_listed = tl.minimum(tl.cdiv(length, BLOCK), n_entries)

    n_tiles = tl.cdiv(n_listed, PACK) * PARTS
    per_split = tl.cdiv(n_tiles, SPLITS)
    first = split * per_split
    maximum = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PAD], dtype=tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], dtype=tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, n_tiles), num_stages=STAGES):
        if PACK == 1:
            entry = tile // PARTS
            offset = (tile % PARTS) * TILE + lanes
            block = entry
            if not BY_ID:
                row = tl.load(entries_at + entry).to(tl.int64)
            if LISTED:
                block = tl.load(ids_at + entry)
                same = tl.load(ids_at + entry - 1, mask=entry > 0, other=-1) == block
            if BY_ID:
                row = tl.load(entries_at + block, mask=(block >= 0) & (block < table_width), other=-1).to(tl.int64)
            elif LISTED:
                same = same & (tl.load(entries_at + entry - 1, mask=entry > 0, other=-1) >= 0)
        else:
            entry = tile * PACK + lanes // BLOCK_PAD
            offset = lanes % BLOCK_PAD
            there = entry < n_listed
            block = entry
            if not BY_ID:
                row = tl.load(entries_at + entry, mask=there, other=-1).to(tl.int64)
            if LISTED:
                block = tl.load(ids_at + entry, mask=there, other=-1)
                behind = there & (entry > 0)
                same = tl.load(ids_at + entry - 1, mask=behind, other=-1) == block
            if BY_ID:
                row = tl.load(entries_at + block, mask=(block >= 0) & (block < table_width), other=-1).to(tl.int64)
            elif LISTED:
                same = same & (tl.load(entries_at + entry - 1, mask=behind, other=-1) >= 0)
        listed = row >= 0
        if LISTED:
            listed = listed & (block >= 0) & (same == 0)
        if PAGED:
            row = row * KV_HEADS + head
        # Entries that are skipped point at row 0, so that no address is ever formed from a bad row number.
        row = tl.where(listed, row, 0)
        valid = listed & (offset < BLOCK) & (block * BLOCK + offset < length)
        token_at = kv + (row * (2 * BLOCK) + offset) * DIM
        keys = tl.load(token_at[None, :] + dims[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
        scores = dot_scores(query, keys, UPCAST) * scale_log2
        if betas is not None:
            beta = tl.load(betas + row * BLOCK + offset, mask=valid, other=0.0).to(tl.float32)
            scores += beta[None, :] * 1.4426950408889634
        scores = tl.where(valid[None, :], scores, float("-inf"))
        weights, maximum, total, factor = online_softmax(scores, maximum, total)
        value_at = token_at[:, None] + BLOCK * DIM + dims[None, :]
        values = tl.load(value_at, mask=valid[:, None] & in_dim[None, :], other=0.0)
        sums = accumulate(weights, values, sums, factor, UPCAST)

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    log_sum = (maximum + tl.log2(total)) * 0.6931471805599453
    log_sum = tl.where(total == 0.0, float("-inf"), log_sum)
    place = (pair * GROUP + heads) * SPLITS + split
    tl.store(lse + place, log_sum, mask=in_group)
    out_at = out + place[:, None] * DIM + dims[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=in_group[:, None] & in_dim[None, :])


@triton.jit
def combine_kernel(
    part_out,
    part_lse,
    out,
    lse,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Merge part_out [row, SPLITS, DIM] by part_lse [row, SPLITS]; one CTA a row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    within = splits < SPLITS
    logs = tl.load(part_lse + row * SPLITS + splits, mask=within, other=float("-inf"))
    parts_at = part_out + (row * SPLITS + splits)[:, None] * DIM + dims[None, :]
    parts = tl.load(parts_at, mask=within[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    largest = tl.max(logs, axis=0)
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(logs - floor)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), floor + tl.log(total)))


@triton.jit
def merge_kernel(out_a, lse_a, out_b, lse_b, out, lse, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Two parts into one; one CTA a row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    in_dim = dims < DIM
    log_a = tl.load(lse_a + row)
    log_b = tl.load(lse_b + row)
    a = tl.load(out_a + row * DIM + dims, mask=in_dim, other=0.0).to(tl.float32)
    b = tl.load(out_b + row * DIM + dims, mask=in_dim, other=0.0).to(tl.float32)
    largest = tl.maximum(log_a, log_b)
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(log_a - floor)
    weight_b = tl.exp(log_b - floor)
    total = weight_a + weight_b
    merged = (weight_a * a + weight_b * b) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=in_dim)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), floor + tl.log(total)))


def default_tile(dtype: torch.dtype) -> int:
    """Tokens of a tile (small blocks are packed, large ones cut); fp32 dots keep their operands in registers."""
    return 32 if dtype == torch.float32 else 64


def attend(
    q: Tensor,
    kv: Tensor,
    betas: Tensor | None,
    rows: Tensor,
    block_ids: Tensor | None,
    lengths: Tensor,
    n_kv_heads: int,
    *,
    counts: Tensor | None = None,
    splits: int | None = None,
    ctas_per_sm: int = 2,
    tile: int | None = None,
    num_warps: int = 4,
    num_stages: int = 4,
) -> tuple[Tensor, Tensor]:
    """Launch ``attend_kernel`` and, where the work was split, ``combine_kernel``.

    ``rows`` [batch, kv_head, entry] are slots, ``rows`` [batch, block] a page table; ``block_ids`` [batch, kv_head,
    entry], None (with a page table alone): every block of the context; ``counts`` int32 [batch, kv_head]: so many of
    its entries, the rest is not looked at. Returns (out [batch, q_head, head_dim], lse
    float32 [batch, q_head])."""
    batch, n_q_heads, dim = q.shape
    block_size = kv.shape[2]
    if not kv.is_contiguous():
        raise ConfigError(f"KV rows have strides {kv.stride()}; blocks must be contiguous runs")
    if kv.dtype != q.dtype and q.dtype != torch.float32:
        raise ConfigError(f"queries are {q.dtype}, KV blocks {kv.dtype}; they must be of one type")
    group = n_q_heads // n_kv_heads
    paged = rows.dim() == 2
    if not (paged and rows.stride(1) == 1):
        rows = rows.contiguous()
    lengths = lengths.contiguous()
    block_ids = None if block_ids is None else block_ids.contiguous()
    q = q if q.stride(2) == 1 and q.stride(1) == dim and q.stride(0) % dim == 0 else q.contiguous()
    n_entries = rows.shape[-1] if block_ids is None else block_ids.shape[-1]
    tile = tile or default_tile(q.dtype)
    units, places = tile_units(n_entries, block_size, tile), n_sms(q.device) * ctas_per_sm
    splits = splits or choose_splits(batch * n_kv_heads, units, places)

    out = torch.empty((batch, n_q_heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_q_heads), dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, lse
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = torch.empty((batch, n_q_heads, splits, dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((batch, n_q_heads, splits), dtype=torch.float32, device=q.device)
    with on_device(q):
        attend_kernel[(batch * n_kv_heads * splits,)](
            q,
            kv,
            betas,
            rows,
            block_ids,
            counts,
            lengths,
            part_out,
            part_lse,
            n_entries,
            rows.shape[-1],
            rows.stride(0),
            q.stride(0) // dim,
            _LOG2_E / math.sqrt(dim),
            KV_HEADS=n_kv_heads,
            GROUP=group,
            GROUP_PAD=max(16, padded(group)),
            DIM=dim,
            DIM_PAD=padded(dim),
            BLOCK=block_size,
            BLOCK_PAD=padded(block_size),
            TILE=tile,
            SPLITS=splits,
            PAGED=paged,
            UPCAST=interpreting() or q.dtype == torch.float32,
            STAGES=num_stages,
            num_warps=num_warps,
        )
        if splits > 1:
            combine_kernel[(batch * n_q_heads,)](
                part_out,
                part_lse,
                out,
                lse,
                SPLITS=splits,
                SPLITS_PAD=padded(splits),
                DIM=dim,
                DIM_PAD=padded(dim),
                num_warps=1 if splits <= 8 else 4,
            )
    return out, lse


def sparse_decode_attention(
    q: Tensor,
    slots: Tensor,
    slot_betas: Tensor | None,
    slot_rows: Tensor | None,
    block_ids: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``reference.sparse_decode_attention``, without gradient. Of equal block ids only neighbours are recognised:
    ids come in ascending order, as the selection gives them, or distinct."""
    rows = slots_or_pages(slot_rows, page_table)
    return attend(q, slots, slot_betas, rows, block_ids, lengths, block_ids.shape[1], counts=counts)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.merge_partials``, one launch."""
    dim = out_a.shape[-1]
    parts = [t.contiguous() for t in (out_a, lse_a, out_b, lse_b)]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    if lse.numel():
        with on_device(out_a):
            merge_kernel[(lse.numel(),)](*parts, out, lse, DIM=dim, DIM_PAD=padded(dim), num_warps=1)
    return out, lse


def attend_spec(dtype: str, dim: int, block: int, *, paged: bool, biased: bool, listed: bool = False) -> AotSpec:
    """``attend_kernel`` for a type ("bf16", "fp16", "fp32"), as ``attend`` launches it; ``listed``: pages by id."""
    constants: dict[str, Any] = {"KV_HEADS": 2, "GROUP": 16, "GROUP_PAD": 16, "DIM": dim, "DIM_PAD": padded(dim)}
    constants |= {"BLOCK": block, "BLOCK_PAD": padded(block), "TILE": 32 if dtype == "fp32" else 64, "SPLITS": 2}
    constants |= {"PAGED": paged, "UPCAST": dtype == "fp32", "STAGES": 4}
    constants |= {} if biased else {"betas": None}
    constants |= {} if dim == 96 else {"counts": None}
    constants |= {"block_ids": None} if paged and not listed else {}
    signature = {
        "q": f"*{dtype}",
        "kv": f"*{dtype}",
        "betas": "*fp32",
        "rows": "*i32" if paged and not listed else "*i64",
    }
    signature |= {"block_ids": "*i32", "counts": "*i32", "lengths": "*i32", "out": "*fp32", "lse": "*fp32"}
    signature |= dict.fromkeys(("n_entries", "table_width", "table_pitch", "q_batch_rows"), "i32") | {
        "scale_log2": "fp32"
    }
    signature |= dict.fromkeys(constants, "constexpr")
    name = f"attend-{'listed-' if listed else ''}{'pages' if paged else 'slots'}-{dtype}-{dim}-{block}"
    return AotSpec(name, attend_kernel, signature, constants, 4, 4)


def _aot_specs() -> list[AotSpec]:
    shapes = (("bf16", 128, 64), ("bf16", 80, 16), ("fp16", 96, 48), ("fp32", 64, 64))
    specs = [attend_spec(dtype, dim, block, paged=False, biased=dim != 96) for dtype, dim, block in shapes]
    for dtype, dim, block in (("bf16", 128, 64), ("bf16", 80, 16), ("fp16", 128, 128), ("fp32", 64, 64)):
        specs.append(attend_spec(dtype, dim, block, paged=True, biased=dim != 128 or block == 64, listed=True))
    dims = {"DIM": 96, "DIM_PAD": 128}
    for dtype in ("bf16", "fp16", "fp32"):
        constants = {"SPLITS": 5, "SPLITS_PAD": 8} | dims
        signature = dict.fromkeys(("part_out", "part_lse", "lse"), "*fp32") | {"out": f"*{dtype}"}
        signature |= dict.fromkeys(constants, "constexpr")
        specs.append(AotSpec(f"combine-{dtype}", combine_kernel, signature, constants, 1))
        signature = dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32")
        signature |= dict.fromkeys(("out_a", "out_b", "out"), f"*{dtype}") | dict.fromkeys(dims, "constexpr")
        specs.append(AotSpec(f"merge-{dtype}", merge_kernel, signature, dims, 1))
    return specs


AOT_SPECS = _aot_specs()
