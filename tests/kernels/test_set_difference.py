"""Set difference against a dictionary model of the slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CapacityError
from nosa_sys.kernels.set_difference.reference import SlotUpdate, update_slots


def i32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def model_step(
    slots: dict[int, int], wanted: list[int], rank: list[float], n_slots: int, keep: bool
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """slots: slot -> block. Returns the new dictionary and the loads as (block, slot)."""
    need = {block for block in wanted if block >= 0}
    after = {slot: block for slot, block in slots.items() if keep or block in need}
    loads = []
    for block in sorted(need - set(slots.values())):
        free = [slot for slot in range(n_slots) if slot not in after]
        if free:
            slot = free[0]
        else:
            victims = [slot for slot, held in after.items() if held not in need]
            slot = min(victims, key=lambda s: (rank[s], s))
        after[slot] = block
        loads.append((block, slot))
    return after, loads


def as_row(slots: dict[int, int], n_slots: int) -> list[int]:
    return [slots.get(slot, -1) for slot in range(n_slots)]


def check_row(
    got: SlotUpdate, row: int, wanted: list[int], after: dict[int, int], loads: list[tuple[int, int]]
) -> None:
    n_slots = got.slot_blocks.shape[1]
    padding = [-1] * (len(wanted) - len(loads))
    assert got.slot_blocks[row].tolist() == as_row(after, n_slots)
    assert got.load_blocks[row].tolist() == [block for block, _ in loads] + padding
    assert got.load_slots[row].tolist() == [slot for _, slot in loads] + padding
    assert got.n_loads[row].item() == len(loads)
    slot_of = {block: slot for slot, block in after.items()}
    assert got.wanted_slots[row].tolist() == [slot_of[block] if block >= 0 else -1 for block in wanted]
    for tensor in got:
        assert tensor.dtype == torch.int32


@given(
    n_rows=st.integers(1, 3),
    n_slots=st.integers(1, 9),
    n_wanted=st.integers(1, 9),
    keep=st.booleans(),
    n_steps=st.integers(1, 8),
    data=st.data(),
)
def test_steps_equal_a_dictionary_model(
    n_rows: int, n_slots: int, n_wanted: int, keep: bool, n_steps: int, data: st.DataObject
) -> None:
    models: list[dict[int, int]] = [{} for _ in range(n_rows)]
    slot_blocks = torch.full((n_rows, n_slots), -1, dtype=torch.int32)
    ids = st.integers(-1, 14)
    for _ in range(n_steps):
        row_of_ids = st.lists(ids, min_size=n_wanted, max_size=n_wanted)
        row_of_ids = row_of_ids.filter(lambda row: len(set(row) - {-1}) <= n_slots)
        wanted = [data.draw(row_of_ids) for _ in range(n_rows)]
        ranks = [
            data.draw(st.lists(st.sampled_from([float("-inf"), 0.0, 1.0, 2.5]), min_size=n_slots, max_size=n_slots))
            for _ in range(n_rows)
        ]
        # Empty slots have no rank: what is left there, NaN or an old value, must not matter.
        poisoned = torch.tensor(ranks).masked_fill((slot_blocks < 0) & (torch.arange(n_slots) % 3 == 0), torch.nan)
        got = update_slots(slot_blocks, i32(wanted), poisoned, keep)
        for row in range(n_rows):
            before = models[row]
            models[row], loads = model_step(before, wanted[row], ranks[row], n_slots, keep)
            check_row(got, row, wanted[row], models[row], loads)
            for slot, block in before.items():  # wanted residents stay where they are
                if block in wanted[row]:
                    assert models[row][slot] == block
        slot_blocks = got.slot_blocks


OLD = [5, 9, 2, 7]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "slots_if_kept", "loads", "wanted_slots"),
    [
        (OLD, [9, 5, 11, 2], [5, 9, 2, 11], [(11, 3)], [1, 0, 3, 2]),
        (OLD, [9, 9, 5, 2], [5, 9, 2, 7], [], [1, 1, 0, 2]),
        (OLD, [5, -1, -1, -1], [5, 9, 2, 7], [], [0, -1, -1, -1]),
        (OLD, OLD, OLD, [], [0, 1, 2, 3]),
        ([-1] * 4, OLD, [2, 5, 7, 9], [(2, 0), (5, 1), (7, 2), (9, 3)], [1, 3, 0, 2]),
        ([-1] * 4, [-1] * 4, [-1] * 4, [], [-1] * 4),
    ],
)
def test_case_03_set_difference_with_padding(
    keep: bool,
    old: list[int],
    new: list[int],
    slots_if_kept: list[int],
    loads: list[tuple[int, int]],
    wanted_slots: list[int],
) -> None:
    """Case 3: duplicates, padding, equal sets and an empty map; every output entry is written."""
    got = update_slots(i32([old]), i32([new]), torch.zeros(1, 4), keep)
    expected = slots_if_kept if keep else [block if block in new else -1 for block in slots_if_kept]
    assert got.slot_blocks.tolist() == [expected]
    padding = [-1] * (4 - len(loads))
    assert got.load_blocks.tolist() == [[block for block, _ in loads] + padding]
    assert got.load_slots.tolist() == [[slot for _, slot in loads] + padding]
    assert got.wanted_slots.tolist() == [wanted_slots]
    assert got.n_loads.tolist() == [len(loads)]


def test_case_24_an_empty_miss_set_is_a_no_op() -> None:
    """Case 24: two equal steps move nothing, at k = 1 and k = 3 too."""
    for k in (1, 3, 48):
        wanted = torch.arange(k, dtype=torch.int32)[None]
        first = update_slots(torch.full((1, k), -1, dtype=torch.int32), wanted, torch.zeros(1, k), True)
        second = update_slots(first.slot_blocks, wanted, torch.zeros(1, k), True)
        assert first.n_loads.item() == k
        assert second.n_loads.item() == 0
        assert torch.equal(second.slot_blocks, first.slot_blocks)


def test_case_30_too_few_slots_are_refused_with_the_minimum() -> None:
    """Case 30: 3 slots for 4 wanted blocks are refused, duplicates and padding not counted; 4 slots fit."""
    empty = torch.full((2, 3), -1, dtype=torch.int32)
    with pytest.raises(CapacityError, match=r"3 slots.*4 blocks that row 1 .* at least 4"):
        update_slots(empty, i32([[1, 2, 3, 3, -1], [4, 5, 6, 7, 7]]), torch.zeros(2, 3), True)
    fits = update_slots(i32([[-1] * 4]), i32([[4, 5, 6, 7, 7]]), torch.zeros(1, 4), True)
    assert fits.slot_blocks.tolist() == [[4, 5, 6, 7]]


def test_case_30_a_wanted_block_is_never_the_victim() -> None:
    """Case 30: the lowest rank belongs to a block of this very step; another one leaves."""
    rank = torch.tensor([[0.0, 5.0, 1.0]])
    got = update_slots(i32([[10, 11, 12]]), i32([[10, 13, -1]]), rank, True)
    assert got.slot_blocks.tolist() == [[10, 11, 13]]


def test_victims_leave_by_rank_and_then_by_slot() -> None:
    rank = torch.tensor([[2.0, 1.0, 1.0, float("-inf"), 0.0]])
    got = update_slots(i32([[10, 11, 12, 13, -1]]), i32([[3, 2, 1, -1]]), rank, True)
    # block 1 takes the empty slot, then the lowest rank, then the lower slot of two equals
    assert got.slot_blocks.tolist() == [[10, 3, 12, 2, 1]]
    assert got.load_blocks.tolist() == [[1, 2, 3, -1]]
    assert got.load_slots.tolist() == [[4, 3, 1, -1]]


@given(seed=st.integers(0, 99), keep=st.booleans())
def test_case_20_residency_balances(seed: int, keep: bool) -> None:
    """Case 20: blocks in less blocks out equals what is resident, never above the capacity, and a reload costs one."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.full((1, 6), -1, dtype=torch.int32)
    blocks_in = blocks_out = 0
    for _ in range(60):
        wanted = torch.randint(-1, 12, (1, 5), generator=rng, dtype=torch.int32)
        before = set(slots[0].tolist()) - {-1}
        got = update_slots(slots, wanted, torch.rand(1, 6, generator=rng), keep)
        slots = got.slot_blocks
        resident = [block for block in slots[0].tolist() if block >= 0]
        assert len(set(resident)) == len(resident) <= 6
        assert set(wanted[0].tolist()) - {-1} <= set(resident)
        blocks_in += int(got.n_loads)
        blocks_out += len(before - set(resident))
        assert blocks_in - blocks_out == len(resident)
