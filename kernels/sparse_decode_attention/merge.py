"""Merging partial attention by log-sum-exp: splits of a launch by its last CTA or by a second launch, and two parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import on_device, padded

# One CTA reads about 100 GB/s out of the L2: a little more than what a second launch costs.
MERGE_BYTES = 128 * 1024


@triton.jit
def merge_group(
    part_out,
    part_lse,
    first_row,
    out,
    lse,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Merge part_out [row, SPLITS, DIM] by part_lse [row, SPLITS] for GROUP rows from ``first_row`` on. Reads go past
    the L1: other CTAs wrote during this launch. The order of the sums does not depend on who merges."""
    PART: tl.constexpr = SPLITS_PAD if SPLITS_PAD < 4 else 4
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    in_group = heads < GROUP
    rows = first_row + heads
    splits = tl.arange(0, SPLITS_PAD)
    there = in_group[:, None] & (splits < SPLITS)[None, :]
    logs_at = part_lse + rows[:, None] * SPLITS + splits[None, :]
    logs = tl.load(logs_at, mask=there, other=float("-inf"), cache_modifier=".cg")
    largest = tl.max(logs, axis=1)
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logs - floor[:, None]), axis=1)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], dtype=tl.float32)
    for first in range(0, SPLITS, PART):
        part = first + tl.arange(0, PART)
        in_part = (part < SPLITS)[:, None] & in_group[None, :]
        place = rows[None, :] * SPLITS + part[:, None]
        part_logs = tl.load(part_lse + place, mask=in_part, other=float("-inf"), cache_modifier=".cg")
        weights = tl.exp(part_logs - floor[None, :])
        parts_at = part_out + place[:, :, None] * DIM + dims[None, None, :]
        inside = in_part[:, :, None] & (dims < DIM)[None, None, :]
        parts = tl.load(parts_at, mask=inside, other=0.0, cache_modifier=".cg")
        sums += tl.sum(parts * weights[:, :, None], axis=0)
    merged = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out + rows[:, None] * DIM + dims[None, :]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=in_group[:, None] & (dims < DIM)[None, :])
    tl.store(lse + rows, tl.where(total == 0.0, float("-inf"), floor + tl.log(total)), mask=in_group)


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


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.merge_partials``, one launch."""
    dim = out_a.shape[-1]
    parts = [t.contiguous() for t in (out_a, lse_a, out_b, lse_b)]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    if lse.numel():
        with on_device(out_a):
            merge_kernel[(lse.numel(),)](*parts, out, lse, DIM=dim, DIM_PAD=padded(dim), num_warps=1)
    return out, lse


def merge_specs() -> list[AotSpec]:
    """The launches of this file, for ahead-of-time compilation."""
    specs = []
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
