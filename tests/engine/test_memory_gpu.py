"""Registered host memory, streamed blocks and prefill on a real GPU, against the same on the CPU."""

from __future__ import annotations

import mmap

import pytest
import torch

from nosa_sys.engine.block_pool import BlockPool
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.pinned import PinnedArena, PinnedBuffer
from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.errors import CapacityError
from nosa_sys.kernels.block_fetch import fetch_blocks
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_tensors
from nosa_sys.sparse_config import SparseConfig
from tests.engine.helpers import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = ModelShape("small", 2, 8, 2, 64, 128, 256, 64, dtype="float32")
SPARSE = SparseConfig(topk=8, window_size=128, select_blocks=3)


def small_model(device: str) -> LlamaModel:
    """The same weights on either device."""
    return LlamaModel(LlamaConfig(SHAPE), random_tensors(SHAPE, torch.Generator().manual_seed(1)), device=device)


def test_case_23_registered_memory_is_exact_and_seen_as_pinned() -> None:
    buffer = PinnedBuffer(5 * 2**20 + 1, register=True)
    view = buffer.tensor((5 * 2**20,), torch.uint8)
    assert view.is_pinned()
    assert 0 <= buffer.pinned_bytes - (5 * 2**20 + 1) < mmap.PAGESIZE
    view.fill_(3)
    assert int(view.to("cuda", non_blocking=True).sum()) == 3 * 5 * 2**20
    buffer.release()
    assert not view.is_pinned()
    with pytest.raises(CapacityError, match="bytes of host memory are needed"):
        PinnedBuffer(2**60, register=True)


@pytest.mark.parametrize("in_arena", [False, True])
def test_streamed_blocks_arrive_where_they_belong(in_arena: bool) -> None:
    """Scattered and consecutive pages, and growth while copies run; a fetch by the kernel reads them back."""
    arena = PinnedArena(2**26) if in_arena else None
    pool = BlockPool(SHAPE, 64, torch.float32, register=True, arena=arena)
    generator = torch.Generator("cuda").manual_seed(0)
    order = [3, 4, 5, 9, 2, 0, 1]
    pool.allocate(10)
    blocks = torch.randn((7, 2, 64, 2, 64), generator=generator, device="cuda").transpose(2, 3)
    for layer in range(2):
        pool.write(layer, order, blocks + layer, torch.empty(0))
    pool.allocate(30)
    for layer in range(2):
        assert torch.equal(pool.read(layer, order), (blocks + layer).cpu())
        rows = pool.rows_of(order).cuda()
        slots = torch.zeros((len(rows), *pool.layers[layer].shape[1:]), device="cuda")
        fetch_blocks(pool.layers[layer], slots, rows, torch.arange(len(rows), device="cuda"))
        assert torch.equal(slots.view_as(blocks), blocks + layer)


@pytest.mark.parametrize("chunk", [100, 2048])
@pytest.mark.parametrize(("method", "offload"), [("nosa", True), ("nosa", False), ("infllmv2", True), ("full", False)])
def test_prefill_equals_the_cpu(method: str, offload: bool, chunk: int) -> None:
    tokens = random_tokens(1500, 3)
    expected = prefill_logits(small_model("cpu"), tokens, SPARSE, method=method, first=1000, offload=offload)
    found = prefill_logits(small_model("cuda"), tokens, SPARSE, method=method, first=1000, chunk=chunk, offload=offload)
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=2e-3)
    for mine, theirs in zip(found.block_ids, expected.block_ids, strict=True):
        assert (mine.cpu() == theirs).all(-1).float().mean() > 0.99  # a near tie may fall the other way


def test_a_saved_lane_is_what_was_filled() -> None:
    """Synthetic contents: the host pool, read back, is what was drawn on the device."""
    memory = Memory(small_model("cuda"), SPARSE, get_method("nosa"), n_slots=8, offload=True)
    memory.preallocate(2, 1000)
    assert 0 <= memory.pool.pinned_bytes - memory.host_pool_bytes < 2 * mmap.PAGESIZE
    pages = memory.pool.allocate(memory.pages_for(1000))
    memory.clear_lane(1, [])
    memory.fill_synthetic(1, pages, 1000, seed=5)
    first, second = (memory.read_context(layer, 1, pages, 1000) for layer in range(2))
    drawn = torch.randn((2, 2, 1000, 64), generator=torch.Generator("cuda").manual_seed(5), device="cuda")
    assert torch.equal(first, drawn)
    assert torch.equal(second, drawn)
