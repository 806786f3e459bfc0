"""A whole step's slot bookkeeping, in place: what a decode step does between its selection and its copies.

Beside the slot update it leaves out the block that is born at the step, appends all loads to one list (what
``block_fetch`` reads), copies the betas of loaded blocks beside their slots, notes the last use of slots and writes the
step's token into its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.eviction_head.append_reference import CurrentBlocks, place_token
from nosa_sys.kernels.set_difference.reference import update_slots

Touch = Literal["wanted", "loads"]
"""Which slots get the rank of this call: those of all wanted blocks, or only those that it loads."""


@dataclass(frozen=True)
class LoadList:
    """The loads of all rows side by side: host_rows and slot_rows int64 [capacity], count int32 [1]. Loads are appended
    at ``count``, which the caller sets to 0 once a step (one fill for all layers). Their order is row by row in
    ascending block id in the reference, and free in the kernel."""

    host_rows: Tensor
    slot_rows: Tensor
    count: Tensor


@dataclass(frozen=True)
class SlotPlan:
    """What attention and the recorder need of one step.

    wanted_slots int32 and slot_rows int64 [row, k]: where every wanted block is (-1 padding); n_loads int32 [row];
    current_rows int64 [row]: where each row's current block is (-1: there is none, or it is not wanted).
    With ``split``: hit_rows int64 [row, k], slot_rows where the block was resident or is the current one, else -1;
    miss_rows int64 and miss_ids int32 [row, split], the row's loads in ascending block id, -1 padded at the end.
    With ``count_wasted``: n_wasted int32 [row], residents of even rank that lost their slot.
    """

    wanted_slots: Tensor
    slot_rows: Tensor
    n_loads: Tensor
    current_rows: Tensor
    hit_rows: Tensor | None = None
    miss_rows: Tensor | None = None
    miss_ids: Tensor | None = None
    n_wasted: Tensor | None = None


class TokenRows(NamedTuple):
    """The step's token of every row of lanes, and where its block is kept.

    k and v [row, kv_head, head_dim], rows may be strided, heads lie side by side; beta [row, kv_head]; positions int64
    [row]; slots [slot_row, 2, block, head_dim] and slot_betas [slot_row, block] (None: not kept). Row r, head h belong
    to row r * kv_head + h of the plan."""

    k: Tensor
    v: Tensor
    beta: Tensor
    positions: Tensor
    slots: Tensor
    slot_betas: Tensor | None


def check_plan(
    slot_blocks: Tensor,
    wanted: Tensor,
    eviction_rank: Tensor,
    keep_unwanted: bool,
    loads: LoadList,
    *,
    page_table: Tensor | None,
    host_row_base: Tensor | None,
    use_step: Tensor | None,
    touch: str,
    split: int | None,
    count_wasted: bool,
    token: TokenRows | None,
    n_kv_heads: int,
) -> None:
    """Refuse arguments of ``plan_slots`` that do not go together; looks at shapes and types alone."""
    n_rows, k = wanted.shape
    if slot_blocks.shape[1] < k:
        raise CapacityError(f"{slot_blocks.shape[1]} slots cannot hold {k} wanted blocks; give at least {k} slots")
    if loads.host_rows.numel() < n_rows * k:
        raise CapacityError(f"a list of {loads.host_rows.numel()} cannot hold {n_rows} x {k} loads; enlarge it")
    if (page_table is None) == (host_row_base is None):
        raise ConfigError("give either page_table or host_row_base: one of them says where a block lies on the host")
    if use_step is not None and not keep_unwanted:
        raise ConfigError("use_step ranks slots that keep_unwanted=False would empty at once; leave it out")
    if touch not in get_args(Touch):
        raise ConfigError(f"touch={touch!r} is unknown; give one of {', '.join(get_args(Touch))}")
    if split is not None and not 1 <= split <= k:
        raise ConfigError(f"split={split} must lie in 1..{k}, the wanted blocks of a row")
    if count_wasted and (not keep_unwanted or eviction_rank.is_floating_point()):
        raise ConfigError(
            f"count_wasted reads the parity of integer ranks of kept blocks; ranks are {eviction_rank.dtype}, "
            f"keep_unwanted={keep_unwanted}: give int64 ranks and keep_unwanted=True"
        )
    if token is not None:
        dim = token.slots.shape[3]
        if token.k.shape[0] * n_kv_heads != n_rows or any(x.shape[1:] != (n_kv_heads, dim) for x in (token.k, token.v)):
            raise ConfigError(
                f"token rows k {tuple(token.k.shape)} and v {tuple(token.v.shape)} do not fit {n_rows} rows of the "
                f"plan, {n_kv_heads} KV heads each, and slots of head_dim {dim}; give [row, kv_head, head_dim]"
            )
        if any(x.stride()[1:] != (dim, 1) for x in (token.k, token.v)) or not token.slots.is_contiguous():
            raise ConfigError(
                f"token rows have strides {token.k.stride()} and {token.v.stride()}, slots {token.slots.stride()}; "
                "heads must lie side by side, slots be contiguous"
            )


@torch.no_grad()
def plan_slots(
    slot_blocks: Tensor,
    wanted: Tensor,
    eviction_rank: Tensor,
    keep_unwanted: bool,
    loads: LoadList,
    *,
    row_heads: Tensor | None = None,
    current_blocks: Tensor | None = None,
    page_table: Tensor | None = None,
    n_kv_heads: int = 1,
    host_row_base: Tensor | None = None,
    use_step: Tensor | None = None,
    touch: Touch = "wanted",
    token_betas: Tensor | None = None,
    slot_betas: Tensor | None = None,
    split: int | None = None,
    count_wasted: bool = False,
    token: TokenRows | None = None,
) -> SlotPlan:
    """Place every row's wanted blocks, in place.

    slot_blocks int32 [lane_head, slot] is updated; wanted int32 [row, k]; row_heads int64 [row] gives each row's
    lane_head = lane * n_kv_heads + head (None: the row itself), no two alike but for -1, a row of padding that changes
    nothing and whose outputs are -1 and 0. current_blocks [row] gets its slot but no load. Every other miss is appended
    to ``loads``: slot_row = lane_head * slots + slot, host_row = page_table[lane, block] * n_kv_heads + head
    (page_table [lane, block]), or host_row_base[row] + block (int64 [row]). A block whose page is unknown (negative in
    the table) is listed with host_row -1 in every head, which the copy skips: its slot keeps what it held.

    eviction_rank [lane_head, >= slot] as in ``update_slots``; with use_step [1] the slots of the wanted blocks get that
    rank (last use), or with touch="loads" only the slots of the blocks loaded by this call. With token_betas
    [lane_head, block, token] and slot_betas [slot_row, token] the betas of loaded blocks are copied beside their slots.

    Prefetching asks a second time with wanted = the step's blocks and the guesses behind them: the former are all
    resident and stay. By convention a block that was used has rank 2 * step + 1 and one that was only prefetched
    2 * step (touch="loads"): then ``count_wasted`` counts the prefetched blocks that left without having been used.

    ``split`` gives hits and misses apart; no row may have more misses than that, and k is always enough.

    ``token`` goes into the row's current block, into slot row current_rows (-1: it is not written).

    Raises CapacityError when slots < k or this call's rows alone could overflow the list, and in the reference when
    what the list holds already makes it overflow or a row has more than ``split`` misses (the kernel leaves out what
    does not fit, which count and n_loads tell); ConfigError for arguments that do not go together.
    """
    check_plan(
        slot_blocks,
        wanted,
        eviction_rank,
        keep_unwanted,
        loads,
        page_table=page_table,
        host_row_base=host_row_base,
        use_step=use_step,
        touch=touch,
        split=split,
        count_wasted=count_wasted,
        token=token,
        n_kv_heads=n_kv_heads,
    )
    (n_rows, k), n_slots = wanted.shape, slot_blocks.shape[1]
    every = torch.arange(n_rows, device=wanted.device)
    row = every if row_heads is None else every[row_heads >= 0]
    head = row if row_heads is None else row_heads[row].long()
    asked, old, ranks = wanted[row], slot_blocks[head], eviction_rank[head, :n_slots]
    update = update_slots(old, asked, ranks, keep_unwanted)
    slot_blocks[head] = update.slot_blocks
    first_row = head[:, None] * n_slots
    slot_rows = torch.where(update.wanted_slots >= 0, first_row + update.wanted_slots, -1)

    current = asked.new_full((row.numel(), 1), -1) if current_blocks is None else current_blocks[row, None].int()
    is_current = (asked == current) & (asked >= 0)
    loaded = (update.load_blocks >= 0) & (update.load_blocks != current)
    at, entry = loaded.nonzero(as_tuple=True)
    ids, slots = update.load_blocks[at, entry].long(), update.load_slots[at, entry].long()
    load_rows = head[at] * n_slots + slots
    if page_table is not None:
        page = page_table[head[at] // n_kv_heads, ids].long()
        host_rows = torch.where(page >= 0, page * n_kv_heads + head[at] % n_kv_heads, -1)
    else:
        assert host_row_base is not None
        host_rows = host_row_base[row[at]] + ids
    start, capacity = int(loads.count), loads.host_rows.numel()
    if start + ids.numel() > capacity:
        raise CapacityError(
            f"{ids.numel()} loads after {start} exceed the list of {capacity}; set count to 0 or enlarge it"
        )
    loads.host_rows[start : start + ids.numel()] = host_rows
    loads.slot_rows[start : start + ids.numel()] = load_rows
    loads.count.add_(ids.numel())

    if use_step is not None and touch == "wanted":
        of, column = (update.wanted_slots >= 0).nonzero(as_tuple=True)
        eviction_rank[head[of], update.wanted_slots[of, column].long()] = use_step.to(eviction_rank.dtype)
    elif use_step is not None:
        eviction_rank[head[at], slots] = use_step.to(eviction_rank.dtype)
    if slot_betas is not None and token_betas is not None:
        slot_betas[load_rows] = token_betas[head[at], ids]

    def by_row(values: Tensor, padding: int) -> Tensor:
        return values.new_full((n_rows, *values.shape[1:]), padding).index_copy_(0, row, values)

    hit_rows = miss_rows = miss_ids = n_wasted = None
    if split is not None:
        resident = ((asked.unsqueeze(2) == old.unsqueeze(1)) & (asked >= 0).unsqueeze(2)).any(2)
        hit_rows = by_row(torch.where(resident | is_current, slot_rows, -1), -1)
        most = int(loaded.sum(-1).max()) if row.numel() else 0
        if most > split:
            raise CapacityError(f"a row has {most} misses, more than split={split}; give split up to {k}")
        place = loaded.cumsum(-1)[at, entry] - 1
        miss_rows = slot_rows.new_full((n_rows, split), -1)
        miss_ids = wanted.new_full((n_rows, split), -1)
        miss_rows[row[at], place], miss_ids[row[at], place] = load_rows, ids.int()
    if count_wasted:
        lost = (old >= 0) & (update.slot_blocks != old)
        n_wasted = by_row((lost & (ranks % 2 == 0)).sum(-1).int(), 0)
    current_rows = by_row(torch.where(is_current, slot_rows, -1).amax(-1), -1)
    if token is not None:
        blocks = CurrentBlocks(token.slots, token.slot_betas, current_rows.view(-1, n_kv_heads))
        place_token(token.k, token.v, token.beta, token.positions, blocks)
    return SlotPlan(
        by_row(update.wanted_slots, -1),
        by_row(slot_rows, -1),
        by_row(loaded.sum(-1).int(), 0),
        current_rows,
        hit_rows,
        miss_rows,
        miss_ids,
        n_wasted,
    )
