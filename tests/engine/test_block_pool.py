"""Block pool against a dictionary of pages: random allocations, releases and growth; poison; exact bytes."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.engine import block_pool, pinned, tensors
from nosa_sys.engine.block_pool import BlockPool
from nosa_sys.engine.pinned import PinnedArena
from nosa_sys.errors import CapacityError
from tests.engine.helpers import TINY
from tests.engine.test_pinned import Runtime

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


def test_case_23_growth_takes_what_is_needed_and_no_more() -> None:
    pool = make_pool()
    for n in (3, 2, 1):
        pool.allocate(n)
        assert pool.allocated_bytes == pool.pages_in_use * PAGE_BYTES
        assert [t.untyped_storage().nbytes() - t.numel() * 8 < mmap.PAGESIZE for t in pool.layers] == [True] * 2
    assert pool.generation == 3
    pool.reserve(20)
    pool.allocate(1)  # at once for all that was reserved
    assert (pool.allocated_bytes, pool.generation) == (20 * PAGE_BYTES, 4)
    pool.allocate(13)
    pool.preallocate(20)
    assert pool.generation == 4
    pool.preallocate(33)
    assert (pool.allocated_bytes, pool.generation, pool.pages_in_use) == (33 * PAGE_BYTES, 5, 20)


def test_case_23_pinned_bytes_are_the_bytes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered through a stand-in for the CUDA runtime: each layer within a page; what is outgrown is given back."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    pool = BlockPool(TINY, 4, torch.float64, register=True)
    for n_pages in (5, 300):
        pool.preallocate(n_pages)
        assert sorted(runtime.registered) == sorted(t.data_ptr() for t in pool.layers)
        assert sum(runtime.registered.values()) == pool.pinned_bytes
        assert 0 <= pool.pinned_bytes - pool.allocated_bytes < 2 * mmap.PAGESIZE
    arena = PinnedArena(1000 * PAGE_BYTES, register=True)
    carved = BlockPool(TINY, 4, torch.float64, register=True, arena=arena)
    carved.preallocate(10)
    assert (carved.allocated_bytes, carved.pinned_bytes) == (10 * PAGE_BYTES, arena.pinned_bytes)


@pytest.mark.parametrize("place", ["host", "device"])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    pool = BlockPool(TINY, 4, torch.float64, device=None if place == "host" else torch.device("cpu"))
    pool.allocate(4)
    before = [t.data_ptr() for t in pool.layers]
    # six pages more, and one layer's old pages beside its new ones while it grows
    free = 6 * PAGE_BYTES + 2 * PAGE_BYTES
    for module in (block_pool, pinned, tensors):
        monkeypatch.setattr(module, "memory_available_bytes", lambda: free - 1)
    with pytest.raises(CapacityError, match=f"{free} bytes of {place} memory for the KV pool.* {free - 1} are free"):
        pool.preallocate(10)
    assert ([t.data_ptr() for t in pool.layers], pool.generation) == (before, 1)
    for module in (block_pool, pinned, tensors):
        monkeypatch.setattr(module, "memory_available_bytes", lambda: free)
    pool.preallocate(10)


def test_pools_in_an_arena_follow_one_another_and_grow_in_place() -> None:
    arena = PinnedArena(8 * PAGE_BYTES + 100, register=False)

    def pool_in_arena() -> BlockPool:
        return BlockPool(TINY, 4, torch.float64, arena=arena, poison=math.nan)

    pool = pool_in_arena()
    pool.allocate(3)
    block = torch.arange(2.0 * 2 * 4 * 8, dtype=torch.float64).view(1, 2, 2, 4, 8)
    for layer in range(2):
        pool.write(layer, [1], block + layer, NO_BETAS)
    before = [t.data_ptr() for t in pool.layers]
    pool.allocate(5)
    assert [t.data_ptr() for t in pool.layers] == before
    assert all(torch.equal(pool.read(layer, [1]), block + layer) for layer in range(2))
    assert pool.layers[1][2 * 2 :].isnan().all()
    with pytest.raises(CapacityError, match=f"{9 * PAGE_BYTES} bytes of the arena.*{8 * PAGE_BYTES} are free.*reset"):
        pool.allocate(1)
    with pytest.raises(CapacityError, match=r"0 are free.*reset"):
        pool_in_arena().allocate(1)
    arena.reset()
    after = pool_in_arena()
    after.allocate(8)
    assert [t.data_ptr() for t in after.layers] == before


def test_betas_lie_beside_the_pages_of_a_device() -> None:
    pool = BlockPool(TINY, 4, torch.float64, device=torch.device("cpu"), beta_dtype=torch.float64, poison=math.nan)
    assert pool.page_bytes == PAGE_BYTES + 2 * 2 * 4 * 8
    kv = torch.ones((2, 2, 2, 4, 8), dtype=torch.float64)
    betas = torch.arange(16, dtype=torch.float64).view(2, 2, 4)
    pages = pool.allocate(3)
    pool.write(1, [pages[2], pages[0]], kv, betas)
    pool.write_partial(1, pages[1], kv[0, :, :, :3], betas[0, :, :3] + 50)
    found = pool.betas[1]
    assert found is not None
    rows = {page: found[pool.rows_of([page])].tolist() for page in pages}
    assert rows[pages[2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows[pages[0]] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [head[:3] for head in rows[pages[1]]] == [[50, 51, 52], [54, 55, 56]]
    assert all(math.isnan(head[3]) for head in rows[pages[1]])
    pool.release([pages[0]])
    assert found[pool.rows_of([pages[0]])].isnan().all()
