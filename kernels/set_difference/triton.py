"""Set difference, slot assignment and load list of one step in one launch (one program a row, any k and slot count).

Everything is a count over pairs: a miss goes where the number of smaller misses says, a free slot is used in the
order of how many free slots come before it. Up to 128 wanted blocks and 128 slots all pairs live in registers; larger
sets walk over one side in chunks, with what the chunks share in a scratch row. A step's plan also writes the step's
token into its block, whose slot is known here first.

Floor: one launch and two dependent memory round trips, about 3 us; the bytes are negligible. Knobs worth scanning:
num_warps (4, 8) and tile_elements (8192, 16384).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.eviction_head.triton import write_token
from nosa_sys.kernels.launch import on_device
from nosa_sys.kernels.set_difference.plan_reference import TokenRows
from nosa_sys.kernels.set_difference.reference import SlotUpdate
from nosa_sys.work_splits import padded


@triton.jit
def _part(whole, scratch, offset, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Part [SIZE] of a vector: the vector itself where one part is all of it, else from the scratch row."""
    return whole if WHOLE else tl.load(scratch + offset + tl.arange(0, SIZE))


@triton.jit
def _share(whole, scratch, offset, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Put a vector [SIZE] where ``_part`` finds its parts."""
    if not WHOLE:
        tl.store(scratch + offset + tl.arange(0, SIZE), whole)
        tl.debug_barrier()


# Counts of several layers may lie side by side: their alignment must not make variants of the kernel.
@triton.jit(do_not_specialize_on_alignment=["list_count", "use_step"])
def update_slots_kernel(
    slot_blocks,
    wanted,
    eviction_rank,
    row_heads,
    current_blocks,
    updated_blocks,
    wanted_slots,
    slot_rows,
    load_blocks,
    load_slots,
    n_loads,
    current_rows,
    hit_rows,
    miss_rows,
    miss_ids,
    n_wasted,
    list_host_rows,
    list_slot_rows,
    list_count,
    page_table,
    host_row_base,
    use_step,
    token_betas,
    slot_betas,
    k,
    v,
    beta,
    positions,
    kv_slots,
    token_slot_betas,
    scratch,
    n_wanted,
    n_split,
    n_slots,
    rank_pitch,
    list_capacity,
    table_pitch,
    n_kv_heads,
    beta_blocks,
    k_pitch,
    v_pitch,
    beta_pitch,
    KEEP_UNWANTED: tl.constexpr,
    TOUCH_LOADS: tl.constexpr,
    WANTED: tl.constexpr,
    SLOTS: tl.constexpr,
    WANTED_PART: tl.constexpr,
    SLOTS_PART: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """One row: see ``plan_reference.plan_slots``. WANTED and SLOTS are powers of two, the parts divide them."""
    NOWHERE: tl.constexpr = 1 << 30
    ALL_WANTED: tl.constexpr = WANTED_PART == WANTED
    ALL_SLOTS: tl.constexpr = SLOTS_PART == SLOTS
    row = tl.program_id(0).to(tl.int64)
    head = row
    if row_heads is not None:
        head = tl.load(row_heads + row)
    present = head >= 0
    head = tl.maximum(head, 0)
    wanted += row * n_wanted
    slot_blocks += head * n_slots
    if not (ALL_WANTED and ALL_SLOTS):
        scratch += row * (2 * WANTED + 2 * SLOTS)

    entry = tl.arange(0, WANTED)
    block = tl.load(wanted + entry, mask=(entry < n_wanted) & present, other=-1)
    asked = block >= 0
    slot = tl.arange(0, SLOTS)
    old = tl.load(slot_blocks + slot, mask=slot < n_slots, other=-1)
    current = -1
    if current_blocks is not None:
        current = tl.load(current_blocks + row).to(tl.int32)
    if k is not None:
        # Read early: it arrives while the plan is made.
        token_row = (tl.program_id(0) // n_kv_heads).to(tl.int64)
        token_head = row - token_row * n_kv_heads
        channel = tl.arange(0, DIM_PAD)
        token_k = tl.load(k + token_row * k_pitch + token_head * DIM + channel, mask=channel < DIM, other=0.0)
        token_v = tl.load(v + token_row * v_pitch + token_head * DIM + channel, mask=channel < DIM, other=0.0)
        token_beta = tl.load(beta + token_row * beta_pitch + token_head)
        token_offset = tl.load(positions + token_row).to(tl.int64) % BLOCK

    # Where each wanted block is now, and whether the same id came earlier in the list.
    found = tl.full([WANTED], NOWHERE, tl.int32)
    for first in range(0, SLOTS, SLOTS_PART):
        other_slot = first + tl.arange(0, SLOTS_PART)
        other_old = tl.load(slot_blocks + other_slot, mask=other_slot < n_slots, other=-1)
        same = (block[None, :] == other_old[:, None]) & asked[None, :]
        found = tl.minimum(found, tl.min(tl.where(same, other_slot[:, None], NOWHERE), axis=0))
    resident = found < NOWHERE
    repeats = tl.zeros([WANTED], tl.int32)
    for first in range(0, WANTED, WANTED_PART):
        other_entry = first + tl.arange(0, WANTED_PART)
        other = tl.load(wanted + other_entry, mask=(other_entry < n_wanted) & present, other=-1)
        earlier = (block[None, :] == other[:, None]) & (other_entry[:, None] < entry[None, :])
        repeats = tl.maximum(repeats, tl.max(earlier.to(tl.int32), axis=0))
    missing = (asked & (found == NOWHERE) & (repeats == 0)).to(tl.int32)

    # Misses in ascending id.
    _share(missing, scratch, 0, WANTED, ALL_WANTED)
    order = tl.zeros([WANTED], tl.int32)
    for first in range(0, WANTED, WANTED_PART):
        other_entry = first + tl.arange(0, WANTED_PART)
        other = tl.load(wanted + other_entry, mask=(other_entry < n_wanted) & present, other=-1)
        other_missing = _part(missing, scratch, first, WANTED_PART, ALL_WANTED)
        smaller = tl.where(other[:, None] < block[None, :], other_missing[:, None], 0)
        order += tl.sum(smaller, axis=0)

    # Slots: 0 is free at once, 1 may be emptied, 2 stays.
    kept = tl.zeros([SLOTS], tl.int32)
    for first in range(0, WANTED, WANTED_PART):
        other_entry = first + tl.arange(0, WANTED_PART)
        other = tl.load(wanted + other_entry, mask=(other_entry < n_wanted) & present, other=-1)
        kept = tl.maximum(kept, tl.max(((old[None, :] == other[:, None]) & (other >= 0)[:, None]).to(tl.int32), axis=0))
    state = tl.where((kept > 0) | (slot >= n_slots), 2, 0)
    if KEEP_UNWANTED:
        state = tl.where((state == 0) & (old >= 0), 1, state)
    _share(state, scratch, 2 * WANTED, SLOTS, ALL_SLOTS)
    if KEEP_UNWANTED:
        eviction_rank += head * rank_pitch
        rank = tl.load(eviction_rank + slot, mask=state == 1, other=0)
    place = tl.zeros([SLOTS], tl.int32)
    for first in range(0, SLOTS, SLOTS_PART):
        other_slot = first + tl.arange(0, SLOTS_PART)
        other_state = _part(state, scratch, 2 * WANTED + first, SLOTS_PART, ALL_SLOTS)
        before = other_slot[:, None] < slot[None, :]
        if KEEP_UNWANTED:
            other_rank = tl.load(eviction_rank + other_slot, mask=other_state == 1, other=0)
            level = other_rank[:, None] == rank[None, :]
            before = (other_rank[:, None] < rank[None, :]) | (level & before)
        before = (other_state[:, None] < state[None, :]) | ((other_state[:, None] == state[None, :]) & before)
        place += tl.sum(before.to(tl.int32), axis=0)
    place = tl.where(state < 2, place, -1)

    # The r-th miss goes to the r-th free slot: both ends of that pairing.
    _share(place, scratch, 2 * WANTED + SLOTS, SLOTS, ALL_SLOTS)
    landing = tl.full([WANTED], -1, tl.int32)
    for first in range(0, SLOTS, SLOTS_PART):
        other_slot = first + tl.arange(0, SLOTS_PART)
        other_place = _part(place, scratch, 2 * WANTED + SLOTS + first, SLOTS_PART, ALL_SLOTS)
        pair = other_place[:, None] == order[None, :]
        landing = tl.maximum(landing, tl.max(tl.where(pair, other_slot[:, None], -1), axis=0))
    turn = tl.where(missing > 0, order, -2)
    _share(turn, scratch, WANTED, WANTED, ALL_WANTED)
    arriving = tl.full([SLOTS], -1, tl.int32)
    for first in range(0, WANTED, WANTED_PART):
        other_entry = first + tl.arange(0, WANTED_PART)
        other = tl.load(wanted + other_entry, mask=(other_entry < n_wanted) & present, other=-1)
        other_turn = _part(turn, scratch, WANTED + first, WANTED_PART, ALL_WANTED)
        arriving = tl.maximum(
            arriving, tl.max(tl.where(other_turn[:, None] == place[None, :], other[:, None], -1), axis=0)
        )
    updated = tl.where(arriving >= 0, arriving, old)
    if not KEEP_UNWANTED:
        updated = tl.where((arriving < 0) & (kept == 0), -1, updated)
    target = tl.where(asked, tl.where(resident, found, landing), -1)

    # The current block is born on the device: it has its slot and is on no load list.
    is_current = (block == current) & (missing > 0)
    born = tl.sum(is_current.to(tl.int32), axis=0)
    loaded = (missing > 0) & (block != current)
    order -= tl.where(block > current, born, 0)
    n_loaded = tl.sum(missing, axis=0) - born

    # Every read of the old map is behind this line: the new one may be the same memory.
    tl.debug_barrier()
    tl.store(updated_blocks + head * n_slots + slot, updated, mask=(slot < n_slots) & present)
    tl.store(wanted_slots + row * n_wanted + entry, target, mask=entry < n_wanted)
    tl.store(n_loads + row, n_loaded)
    slot_row = head * n_slots + target
    if slot_rows is not None:
        tl.store(slot_rows + row * n_wanted + entry, tl.where(target >= 0, slot_row, -1), mask=entry < n_wanted)
    if current_rows is not None:
        current_row = tl.max(tl.where((block == current) & (target >= 0), slot_row, -1), axis=0)
        tl.store(current_rows + row, current_row)
        if k is not None:
            inside, betas = channel < DIM, token_slot_betas
            if current_row >= 0:
                write_token(
                    kv_slots,
                    betas,
                    current_row,
                    token_offset,
                    channel,
                    inside,
                    BLOCK,
                    DIM,
                    token_k,
                    token_v,
                    token_beta,
                )
    if hit_rows is not None:
        here = asked & (resident | (block == current))
        tl.store(hit_rows + row * n_wanted + entry, tl.where(here, slot_row, -1), mask=entry < n_wanted)
        miss = row * n_split + order
        padding = (entry >= n_loaded) & (entry < n_split)
        tl.store(miss_rows + miss, slot_row, mask=loaded & (order < n_split))
        tl.store(miss_ids + miss, block, mask=loaded & (order < n_split))
        tl.store(miss_rows + row * n_split + entry, -1, mask=padding)
        tl.store(miss_ids + row * n_split + entry, -1, mask=padding)
    if n_wasted is not None:
        # With KEEP_UNWANTED alone: victims are the residents that may be emptied, whose rank was read above.
        lost = (arriving >= 0) & (state == 1) & (rank % 2 == 0)
        tl.store(n_wasted + row, tl.sum(lost.to(tl.int32), axis=0))
    if load_blocks is not None:
        padding = (entry >= n_loaded) & (entry < n_wanted)
        tl.store(load_blocks + row * n_wanted + order, block, mask=loaded)
        tl.store(load_blocks + row * n_wanted + entry, -1, mask=padding)
        tl.store(load_slots + row * n_wanted + order, target, mask=loaded)
        tl.store(load_slots + row * n_wanted + entry, -1, mask=padding)
    if use_step is not None:
        step = tl.load(use_step).to(eviction_rank.dtype.element_ty)
        used = tl.zeros([WANTED], eviction_rank.dtype.element_ty) + step
        # With KEEP_UNWANTED the pointer is at this row already: a rank that is touched is always read too.
        touched = target >= 0
        if TOUCH_LOADS:
            touched = loaded
        tl.store(eviction_rank + target, used, mask=touched)
    if list_count is not None:
        start = tl.atomic_add(list_count, n_loaded, sem="relaxed")
        if page_table is not None:
            lane = head // n_kv_heads
            page = tl.load(page_table + lane * table_pitch + block, mask=loaded, other=0).to(tl.int64)
            # An unknown page gives -1 in every head, which the copy skips.
            host_row = tl.where(page >= 0, page * n_kv_heads + (head - lane * n_kv_heads), -1)
        else:
            host_row = tl.load(host_row_base + row) + block
        position = start.to(tl.int64) + order
        listed = loaded & (position < list_capacity)
        tl.store(list_host_rows + position, host_row, mask=listed)
        tl.store(list_slot_rows + position, slot_row, mask=listed)
    if slot_betas is not None:
        for first in range(0, BLOCK, BLOCK_PART):
            token = first + tl.arange(0, BLOCK_PART)
            moved = loaded[:, None] & (token < BLOCK)[None, :]
            source = ((head * beta_blocks + block) * BLOCK)[:, None] + token[None, :]
            moving = tl.load(token_betas + source, mask=moved, other=0.0)
            tl.store(slot_betas + (slot_row * BLOCK)[:, None] + token[None, :], moving, mask=moved)


def launch_update(
    slot_blocks: Tensor,
    wanted: Tensor,
    eviction_rank: Tensor,
    keep_unwanted: bool,
    outputs: dict[str, Tensor | None],
    options: dict[str, Tensor | None],
    n_kv_heads: int,
    num_warps: int,
    tile_elements: int,
    *,
    touch_loads: bool = False,
    token: TokenRows | None = None,
) -> None:
    """Check shapes, choose parts and launch; ``outputs`` and ``options`` name every pointer, absent ones too."""
    n_rows, k = wanted.shape
    n_slots = slot_blocks.shape[1]
    if n_slots < k:
        raise CapacityError(f"{n_slots} slots cannot hold a selection of {k} blocks; give at least {k} slots")
    for name, tensor in (("slot_blocks", slot_blocks), ("wanted", wanted)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ConfigError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; give contiguous int32")
    if eviction_rank.stride(-1) != 1:
        raise ConfigError(f"eviction_rank has strides {eviction_rank.stride()}; its last dimension must be contiguous")
    if n_rows == 0:
        return
    wanted_pad, slots_pad = padded(k), padded(n_slots)
    part = max(1, tile_elements // max(wanted_pad, slots_pad))
    wanted_part, slots_part = min(wanted_pad, part), min(slots_pad, part)
    scratch = None
    if wanted_part < wanted_pad or slots_part < slots_pad:
        scratch = wanted.new_empty((n_rows, 2 * wanted_pad + 2 * slots_pad))
    table, betas, loads = options["page_table"], options["token_betas"], options["list_host_rows"]
    misses = outputs["miss_rows"]
    block = 1 if betas is None else betas.shape[-1]
    tokens = dict.fromkeys(("k", "v", "beta", "positions", "kv_slots", "token_slot_betas"))
    dim = 1
    if token is not None:
        tokens = dict(zip(tokens, token, strict=True))
        block, dim = token.slots.shape[2:]
    with on_device(wanted):
        update_slots_kernel[(n_rows,)](
            slot_blocks,
            wanted,
            eviction_rank,
            **outputs,
            **options,
            **tokens,
            scratch=scratch,
            n_wanted=k,
            n_split=0 if misses is None else misses.shape[1],
            n_slots=n_slots,
            rank_pitch=eviction_rank.stride(0),
            list_capacity=0 if loads is None else loads.numel(),
            table_pitch=0 if table is None else table.stride(0),
            n_kv_heads=n_kv_heads,
            beta_blocks=0 if betas is None else betas.shape[1],
            k_pitch=0 if token is None else token.k.stride(0),
            v_pitch=0 if token is None else token.v.stride(0),
            beta_pitch=0 if token is None else token.beta.stride(0),
            KEEP_UNWANTED=keep_unwanted,
            TOUCH_LOADS=touch_loads,
            WANTED=wanted_pad,
            SLOTS=slots_pad,
            WANTED_PART=wanted_part,
            SLOTS_PART=slots_part,
            BLOCK=block,
            BLOCK_PART=min(padded(block), max(1, 8192 // wanted_pad)),
            DIM=dim,
            DIM_PAD=padded(dim),
            num_warps=num_warps,
        )


OUTPUTS = (
    "updated_blocks",
    "wanted_slots",
    "slot_rows",
    "load_blocks",
    "load_slots",
    "n_loads",
    "current_rows",
    "hit_rows",
    "miss_rows",
    "miss_ids",
    "n_wasted",
)
OPTIONS = (
    "row_heads",
    "current_blocks",
    "list_host_rows",
    "list_slot_rows",
    "list_count",
    "page_table",
    "host_row_base",
    "use_step",
    "token_betas",
    "slot_betas",
)


def update_slots(
    slot_blocks: Tensor,
    wanted: Tensor,
    eviction_rank: Tensor,
    keep_unwanted: bool,
    *,
    num_warps: int = 8,
    tile_elements: int = 16384,
) -> SlotUpdate:
    """As ``reference.update_slots``; whether the wanted blocks fit is judged by k (slots >= k), without looking at
    the data. Raises CapacityError otherwise, ConfigError for maps that are not contiguous int32."""
    update = SlotUpdate(
        torch.empty_like(slot_blocks),
        torch.empty_like(wanted),
        torch.empty_like(wanted),
        torch.empty_like(wanted),
        wanted.new_empty(wanted.shape[0]),
    )
    outputs: dict[str, Tensor | None] = dict.fromkeys(OUTPUTS) | update._asdict()
    outputs["updated_blocks"] = outputs.pop("slot_blocks")
    options: dict[str, Tensor | None] = dict.fromkeys(OPTIONS)
    launch_update(slot_blocks, wanted, eviction_rank, keep_unwanted, outputs, options, 1, num_warps, tile_elements)
    return update


def _aot_specs() -> list[AotSpec]:
    specs = []
    ints = ("slot_blocks", "wanted", "updated_blocks", "wanted_slots", "n_loads")
    sizes = (
        "n_wanted",
        "n_split",
        "n_slots",
        "rank_pitch",
        "list_capacity",
        "table_pitch",
        "n_kv_heads",
        "beta_blocks",
        "k_pitch",
        "v_pitch",
        "beta_pitch",
    )
    for name, rank, keep, k, slots, token, dim in (
        ("lists-k64", "fp32", False, 64, 64, None, 1),
        ("lists-k1025", "i64", True, 1025, 1100, None, 1),
        ("plan-k64", "i64", True, 64, 128, None, 1),
        ("plan-k64-token", "i64", True, 64, 80, "bf16", 128),
        ("plan-exact-k64-token", "i64", False, 64, 64, "bf16", 128),
        ("plan-k256", "fp32", True, 256, 320, "fp16", 64),
        ("plan-split-exact-k64", "i64", False, 64, 64, "fp32", 80),
        ("plan-split-k64", "i64", True, 64, 80, "bf16", 128),
        ("plan-prefetch-k72", "i64", True, 72, 96, None, 1),
    ):
        prefetch = name.startswith("plan-prefetch")
        constants: dict[str, Any] = {"KEEP_UNWANTED": keep, "TOUCH_LOADS": prefetch}
        constants |= {"WANTED": padded(k), "SLOTS": padded(slots)}
        part = 16384 // max(constants["WANTED"], constants["SLOTS"])
        constants |= {"WANTED_PART": min(part, padded(k)), "SLOTS_PART": min(part, padded(slots))}
        constants |= {"BLOCK": 64, "BLOCK_PART": min(64, 8192 // padded(k)), "DIM": dim, "DIM_PAD": padded(dim)}
        types = dict.fromkeys(ints, "*i32") | dict.fromkeys(sizes, "i32") | {"eviction_rank": f"*{rank}"}
        if part < max(constants["WANTED"], constants["SLOTS"]):
            types["scratch"] = "*i32"
        if name.startswith("lists"):
            types |= {"load_blocks": "*i32", "load_slots": "*i32"}
        else:
            types |= dict.fromkeys(("slot_rows", "row_heads", "list_host_rows", "list_slot_rows"), "*i64")
            types |= {"current_rows": "*i64"} | ({"use_step": "*i64"} if keep else {})
            types |= {"hit_rows": "*i64", "miss_rows": "*i64", "miss_ids": "*i32"} if "split" in name else {}
            types |= {"n_wasted": "*i32"} if prefetch else {}
            types |= {"current_blocks": "*i64", "list_count": "*i32", "page_table": "*i64"}
            types |= {"token_betas": "*fp32", "slot_betas": "*fp32"}
        if token is not None:
            types |= dict.fromkeys(("k", "v", "kv_slots"), f"*{token}") | {"positions": "*i64"}
            types |= {"beta": "*fp32", "token_slot_betas": "*fp32"}
        for argument in update_slots_kernel.arg_names:
            if argument not in types:
                types[argument] = "constexpr"
                constants.setdefault(argument, None)
        specs.append(AotSpec(name, update_slots_kernel, types, constants, 8))
    return specs


AOT_SPECS = _aot_specs()
