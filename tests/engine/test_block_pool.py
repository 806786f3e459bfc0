"""Host pool against a dictionary of pages: random allocations, releases and growth; poison; exact bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.engine.block_pool import BlockPool
from nosa_sys.errors import CapacityError
from tests.engine.helpers import TINY

NO_BETAS = torch.empty(0)
PAGE_BYTES = 2 * 2 * (2 * 4 * 8 * 8)  # layers x heads x bytes of K and V of one 4-token block


def make_pool(limit_bytes: int | None = None, poison: float | None = math.nan) -> BlockPool:
    return BlockPool(TINY, 4, torch.float64, limit_bytes=limit_bytes, poison=poison)


@given(operations=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30))
def test_pages_keep_their_contents_through_growth(operations: list[tuple[bool, int]]) -> None:
    pool, held = make_pool(), {}
    for mark, (take, n) in enumerate(operations):
        if take:
            for page in pool.allocate(n):
                assert page not in held
                held[page] = float(mark * 100 + page)
                for layer in range(2):
                    pool.write(
                        layer, [page], torch.full((1, 2, 2, 4, 8), held[page] + layer, dtype=torch.float64), NO_BETAS
                    )
        else:
            gone = list(held)[:n]
            pool.release(gone)
            for page in gone:
                del held[page]
        assert pool.pages_in_use == len(held)
        for page, value in held.items():
            for layer in range(2):
                assert (pool.read(layer, [page]) == value + layer).all()
        rows = set(range(pool.layers[0].shape[0])) - set(pool.rows_of(list(held)).tolist())
        assert pool.layers[1][sorted(rows)].isnan().all()
    assert pool.allocated_bytes == sum(t.numel() * t.element_size() for t in pool.layers)


def test_one_run_of_k_and_v_a_block() -> None:
    """Rows are contiguous, K and V adjacent: a missed block is one run of 2 x block x D elements."""
    pool = make_pool()
    pool.allocate(3)
    row = pool.layers[0][4]
    assert row.is_contiguous()
    assert (row[0].data_ptr(), row[1].data_ptr()) == (row.data_ptr(), row.data_ptr() + 4 * 8 * 8)


def test_limit_is_exact_and_named() -> None:
    pool = make_pool(limit_bytes=5 * PAGE_BYTES + 1)
    assert pool.page_bytes == PAGE_BYTES
    pool.refuse_oversized(5)
    with pytest.raises(CapacityError, match=f"{6 * PAGE_BYTES} bytes.*host_memory_bytes={5 * PAGE_BYTES + 1}"):
        pool.refuse_oversized(6)
    assert pool.reserve(3)
    assert not pool.reserve(3)
    pool.unreserve(3)
    assert pool.reserve(5)
    pool.allocate(4)
    pool.allocate(1)
    assert pool.allocated_bytes == 5 * PAGE_BYTES
    with pytest.raises(CapacityError, match="host KV pool is full"):
        pool.allocate(1)
