"""Block copies against indexing one block at a time; unnamed rows stay untouched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.block_fetch.reference import fetch_blocks, write_back
from nosa_sys.kernels.set_difference.reference import update_slots


@given(
    n_host=st.integers(1, 8),
    n_slots=st.integers(1, 6),
    block=st.sampled_from([1, 16]),
    dim=st.sampled_from([1, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    data=st.data(),
)
def test_fetch_and_write_back_copy_the_named_rows(
    n_host: int, n_slots: int, block: int, dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    targets = data.draw(st.lists(st.integers(0, n_slots - 1), unique=True, max_size=n_slots))
    slot_rows = [data.draw(st.sampled_from([row, row, -1])) for row in targets]
    host_rows = [data.draw(st.integers(-1, n_host - 1)) for _ in targets]
    rng = torch.Generator().manual_seed(0)
    host = torch.randn(n_host, 2, block, dim, generator=rng).to(dtype)
    slots = torch.full((n_slots, 2, block, dim), 777.0, dtype=dtype)
    host_before = host.clone()
    fetch_blocks(host, slots, torch.tensor(host_rows).long(), torch.tensor(slot_rows).long())
    pairs = {s: h for h, s in zip(host_rows, slot_rows, strict=True) if h >= 0 and s >= 0}
    for slot in range(n_slots):
        expected = host_before[pairs[slot]] if slot in pairs else torch.full_like(slots[slot], 777.0)
        assert torch.equal(slots[slot], expected)
    assert torch.equal(host, host_before)

    saved = torch.full_like(slots, -1.0)
    write_back(slots, saved, torch.tensor(targets).long(), torch.tensor(targets).long())
    for row in range(n_slots):
        assert torch.equal(saved[row], slots[row] if row in targets else torch.full_like(saved[row], -1.0))


def test_case_18_gathers_match_the_host_copy_after_many_swaps() -> None:
    """Case 18: 300 blocks, 64 slots, 50 random sets; logical ids are never used as slots."""
    n_blocks, n_slots = 300, 64
    host = torch.arange(n_blocks, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 2, 4, 3).clone()
    slots = torch.full((n_slots, 2, 4, 3), torch.nan)
    held = torch.full((1, n_slots), -1, dtype=torch.int32)
    rng = torch.Generator().manual_seed(0)
    for step in range(50):
        wanted = torch.randperm(n_blocks, generator=rng)[:60]
        if step % 5 == 0:
            others = wanted[~torch.isin(wanted, torch.tensor([0, 63, 64, 299]))]
            wanted = torch.cat([torch.tensor([0, 63, 64, 299, -1]), others[:40]])
        update = update_slots(held, wanted.int()[None], torch.zeros(1, n_slots), True)
        fetch_blocks(host, slots, update.load_blocks[0].long(), update.load_slots[0].long())
        held = update.slot_blocks
        for block, slot in zip(wanted.tolist(), update.wanted_slots[0].tolist(), strict=True):
            if block < 0:
                assert slot == -1
            else:
                assert torch.equal(slots[slot], host[block])


def test_case_12_rows_past_2_31_elements_keep_their_own_constant() -> None:
    """Only the rows that are written take real memory of the 4.3 GB."""
    n_rows = 2**31 // (2 * 64 * 128) + 128
    try:
        host = torch.empty((n_rows, 2, 64, 128), dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine grants no 4.3 GB of address space")
    rows = torch.tensor([0, 131_071, 131_072, n_rows - 1])
    for i, row in enumerate(rows):
        host[row] = i + 1.0
    slots = torch.zeros((4, 2, 64, 128), dtype=torch.bfloat16)
    fetch_blocks(host, slots, rows, torch.arange(4))
    write_back(slots, host, torch.tensor([3]), torch.tensor([n_rows - 2]))
    assert [(float(slot.min()), float(slot.max())) for slot in slots] == [(i, i) for i in (1.0, 2.0, 3.0, 4.0)]
    assert (host[n_rows - 2] == 4.0).all()


def test_case_24_an_empty_list_of_loads_is_a_no_op() -> None:
    slots = torch.full((2, 2, 4, 3), 777.0)
    nothing = torch.empty(0, dtype=torch.int64)
    fetch_blocks(torch.zeros(1, 2, 4, 3), slots, nothing, nothing)
    fetch_blocks(torch.zeros(1, 2, 4, 3), slots, torch.tensor([-1, 0]), torch.tensor([0, -1]))
    assert (slots == 777.0).all()


@pytest.mark.parametrize(
    ("host_row", "slot_row", "message"),
    [(3, 0, "host row 3"), (-2, 0, "host row -2"), (0, 2, "slot row 2"), (0, -5, "slot row -5")],
)
def test_case_18_rows_outside_a_pool_are_refused(host_row: int, slot_row: int, message: str) -> None:
    host, slots = torch.zeros(3, 2, 4, 3), torch.zeros(2, 2, 4, 3)
    with pytest.raises(CapacityError, match=message):
        fetch_blocks(host, slots, torch.tensor([host_row]), torch.tensor([slot_row]))


def test_pools_of_two_types_or_shapes_are_refused() -> None:
    rows = torch.tensor([0])
    with pytest.raises(ConfigError, match="bfloat16"):
        fetch_blocks(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3).bfloat16(), rows, rows)
    with pytest.raises(ConfigError, match="block shape"):
        write_back(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 8, 3), rows, rows)
