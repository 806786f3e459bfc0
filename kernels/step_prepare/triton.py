"""A decode step's geometry in one launch, one program a row.

Floor: one launch and two dependent loads, about 3 us; in torch it is some twenty launches. Nothing to tune.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import on_device
from nosa_sys.kernels.step_prepare.reference import StepGeometry
from nosa_sys.work_splits import padded


@triton.jit(
    do_not_specialize=["n_blocks", "table_pitch"], do_not_specialize_on_alignment=["lanes", "positions", "page_table"]
)
def prepare_kernel(
    lanes,
    positions,
    page_table,
    inverse_frequencies,
    lengths,
    current_blocks,
    head_blocks,
    row_heads,
    page_rows,
    write_back_rows,
    cos,
    sin,
    n_blocks,
    table_pitch,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
):
    """One row: see ``reference.prepare_step``; PAIRS is head_dim / 2."""
    row = tl.program_id(0)
    lane = tl.load(lanes + row)
    real = lane >= 0
    position = tl.where(real, tl.load(positions + row), 0)
    block = position // BLOCK
    known = real & (block < n_blocks)
    # Unknown blocks and padding point at the table's start, so that no address is formed from a bad number.
    page = tl.load(page_table + tl.where(known, lane * table_pitch + block, 0), mask=known, other=-1)
    current = tl.where(real, block, -1).to(tl.int32)
    tl.store(lengths + row, tl.where(real, position + 1, 0).to(tl.int32))
    tl.store(current_blocks + row, current)

    head = tl.arange(0, HEADS_PAD)
    at = row * KV_HEADS + head
    inside = head < KV_HEADS
    page_row = tl.where(page >= 0, page * KV_HEADS + head, -1)
    filled = (position + 1) % BLOCK == 0
    tl.store(head_blocks + at, current + tl.zeros([HEADS_PAD], tl.int32), mask=inside)
    tl.store(row_heads + at, tl.where(real, lane * KV_HEADS + head, -1), mask=inside)
    tl.store(page_rows + at, page_row, mask=inside)
    tl.store(write_back_rows + at, tl.where(filled, page_row, -1), mask=inside)

    pair = tl.arange(0, PAIRS_PAD)
    angle = position.to(tl.float32) * tl.load(inverse_frequencies + pair, mask=pair < PAIRS, other=0.0)
    tl.store(cos + row * PAIRS + pair, tl.cos(angle), mask=pair < PAIRS)
    tl.store(sin + row * PAIRS + pair, tl.sin(angle), mask=pair < PAIRS)


def prepare_step(
    lanes: Tensor,
    positions: Tensor,
    page_table: Tensor,
    inverse_frequencies: Tensor,
    n_kv_heads: int,
    block_size: int,
) -> StepGeometry:
    """As ``reference.prepare_step``; capturable. Raises ConfigError for tables that are not int64 with contiguous rows,
    lists that are not contiguous int64, or frequencies that are not contiguous float32."""
    for name, tensor, dtype in (
        ("lanes", lanes, torch.int64),
        ("positions", positions, torch.int64),
        ("page_table", page_table, torch.int64),
        ("inverse_frequencies", inverse_frequencies, torch.float32),
    ):
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise ConfigError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; give contiguous {dtype}")
    n_rows, pairs = lanes.numel(), inverse_frequencies.numel()

    def numbers(width: int, dtype: torch.dtype) -> Tensor:
        return lanes.new_empty(n_rows * width, dtype=dtype)

    geometry = StepGeometry(
        lengths=numbers(1, torch.int32),
        current_blocks=numbers(1, torch.int32),
        head_blocks=numbers(n_kv_heads, torch.int32),
        row_heads=numbers(n_kv_heads, torch.int64),
        page_rows=numbers(n_kv_heads, torch.int64),
        write_back_rows=numbers(n_kv_heads, torch.int64),
        cos=numbers(pairs, torch.float32).view(n_rows, pairs),
        sin=numbers(pairs, torch.float32).view(n_rows, pairs),
    )
    if n_rows:
        with on_device(lanes):
            prepare_kernel[(n_rows,)](
                lanes,
                positions,
                page_table,
                inverse_frequencies,
                *geometry,
                n_blocks=page_table.shape[1],
                table_pitch=page_table.stride(0),
                KV_HEADS=n_kv_heads,
                HEADS_PAD=padded(n_kv_heads),
                BLOCK=block_size,
                PAIRS=pairs,
                PAIRS_PAD=padded(pairs),
                num_warps=1,
            )
    return geometry


def _aot_specs() -> list[AotSpec]:
    types = dict.fromkeys(("lanes", "positions", "page_table", "row_heads", "page_rows", "write_back_rows"), "*i64")
    types |= dict.fromkeys(("lengths", "current_blocks", "head_blocks"), "*i32")
    types |= dict.fromkeys(("inverse_frequencies", "cos", "sin"), "*fp32")
    types |= dict.fromkeys(("n_blocks", "table_pitch"), "i32")
    specs = []
    for heads, block, pairs in ((2, 64, 64), (3, 48, 40)):
        constants = {"KV_HEADS": heads, "HEADS_PAD": padded(heads), "BLOCK": block}
        constants |= {"PAIRS": pairs, "PAIRS_PAD": padded(pairs)}
        signature = types | dict.fromkeys(constants, "constexpr")
        specs.append(AotSpec(f"prepare-{heads}-{block}-{pairs}", prepare_kernel, signature, constants, 1))
    return specs


AOT_SPECS = _aot_specs()
