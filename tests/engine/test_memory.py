"""Memory: planned against allocated bytes, refusals, addresses that move, synthetic contents."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nosa_sys.engine import memory as memory_module
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.memory_plan import device_bytes, prefill_buffer_bytes, required_bytes
from nosa_sys.engine.prefill_context import KeptContext
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from tests.engine.helpers import NAN, SMALL, TINY, tiny_model

PLACES = [("nosa", True), ("nosa", False), ("infllmv2", False), ("full", False)]


def make_memory(
    method: str = "nosa", *, offload: bool = True, n_slots: int = 7, dtype: str = "float64", **options
) -> Memory:
    model = tiny_model(dtype=dtype)
    return Memory(model, SMALL, get_method(method), n_slots=n_slots, offload=offload, poison=NAN, **options)


def every_tensor(memory: Memory) -> dict[str, list[torch.Tensor]]:
    slots, pool, context = memory.slots, memory.pool, memory.context
    pages = [*pool.layers, *(b for b in pool.betas if b is not None)]
    return {
        "device_slot_bytes": [] if slots is None else slots.kv,
        "device_map_bytes": [
            memory.page_table,
            *([] if slots is None else slots.betas + slots.blocks + slots.last_use),
        ],
        "device_context_bytes": context.key_means + context.beta_means + context.token_betas + context.ring,
        "device_pool_bytes": [] if memory.offload else pages,
        "host_pool_bytes": pages if memory.offload else [],
    }


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 170])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("means", ["float32", "model"])
@pytest.mark.parametrize(("method", "offload"), PLACES)
def test_what_is_planned_is_what_is_allocated(method: str, offload: bool, means: str, dtype: str, tokens: int) -> None:
    memory = make_memory(method, offload=offload, dtype=dtype, key_means_dtype=means)
    memory.preallocate(3, tokens)
    shape = dataclasses.replace(TINY, dtype=dtype)
    planned = required_bytes(
        shape,
        SMALL,
        get_method(method),
        n_slots=7,
        offload=offload,
        lanes=3,
        tokens_a_lane=tokens,
        key_means_dtype=means,
    )
    found = {name: sum(t.numel() * t.element_size() for t in list_) for name, list_ in every_tensor(memory).items()}
    assert planned == found == memory.allocated_bytes()
    assert device_bytes(planned) == sum(planned.values()) - planned["host_pool_bytes"]


def test_published_size_of_one_sequence() -> None:
    """nosa-8b: 32 KiB of K and V a token, on the host for nosa, on the device for full; 64 slots are 4,096 tokens."""
    shape, cfg = ModelShape.preset("nosa-8b"), SparseConfig()
    nosa, full = (
        required_bytes(shape, cfg, get_method(name), n_slots=64, offload=name == "nosa", lanes=1, tokens_a_lane=16384)
        for name in ("nosa", "full")
    )
    assert nosa["host_pool_bytes"] == full["device_pool_bytes"] == 16384 * 32768
    assert (nosa["device_slot_bytes"], full["device_slot_bytes"]) == (4096 * 32768, 0)
    assert prefill_buffer_bytes(shape, 16384) == 16384 * 32768


@pytest.mark.parametrize(("method", "offload"), PLACES)
def test_device_memory_that_is_not_there_is_named_first(
    monkeypatch: pytest.MonkeyPatch, method: str, offload: bool
) -> None:
    memory = make_memory(method, offload=offload)
    sizes = {"n_slots": 7, "offload": offload, "lanes": 4, "tokens_a_lane": 200}
    needed = device_bytes(required_bytes(TINY, SMALL, get_method(method), **sizes))
    monkeypatch.setattr(memory_module, "free_bytes", lambda _: needed - 1)
    with pytest.raises(CapacityError, match=f"{needed} bytes of cpu memory for 4 sequences of 200 .* {needed - 1} are"):
        memory.preallocate(4, 200)
    assert (memory.generation, sum(memory.allocated_bytes().values())) == (0, 0)
    monkeypatch.setattr(memory_module, "free_bytes", lambda _: needed)
    memory.preallocate(4, 200)
    assert device_bytes(memory.allocated_bytes()) == needed


def test_generation_tells_when_an_address_moved() -> None:
    for method, offload in PLACES:
        memory = make_memory(method, offload=offload)
        seen, generation, most_pages = None, memory.generation, 0
        for lanes, tokens in ((1, 20), (1, 21), (2, 20), (2, 400), (1, 30), (3, 500), (3, 500)):
            memory.ensure(lanes, tokens)
            pages = memory.pages_for(tokens)
            most_pages = max(most_pages, pages)
            memory.pool.preallocate(most_pages)
            now = [t.data_ptr() for tensors in every_tensor(memory).values() for t in tensors]
            assert (memory.generation == generation) == (now == seen)
            seen, generation = now, memory.generation


def test_a_preallocated_memory_does_not_move() -> None:
    for method, offload in PLACES:
        memory = make_memory(method, offload=offload)
        memory.preallocate(3, 100)
        generation = memory.generation
        for lane in range(3):
            memory.ensure(lane + 1, 100)
            memory.clear_lane(lane, [])
            memory.add_pages(lane, 0, memory.pool.allocate(memory.pages_for(100)))
        assert memory.generation == generation


def test_a_dense_method_keeps_no_context_unless_scores_are_recorded() -> None:
    shape = dataclasses.replace(TINY, dtype="float64")
    for kept in (None, True):
        memory = make_memory("full", offload=False, keep_context=kept)
        memory.preallocate(3, 170)
        sizes = {"n_slots": 7, "offload": False, "lanes": 3, "tokens_a_lane": 170}
        planned = required_bytes(shape, SMALL, get_method("full"), **sizes, keep_context=kept)
        assert memory.allocated_bytes() == planned
        assert (planned["device_context_bytes"] > 0) == (memory.context.allocated_bytes > 0) == bool(kept)
        assert memory.page_table.shape == (3, 11)


@pytest.mark.parametrize("limit_pages", [None, 90])
def test_room_for_longer_lives_comes_in_steps(limit_pages: int | None) -> None:
    """The first time exactly; then a generation serves 32 blocks of growth. Bytes told are bytes there."""
    page = make_memory().pool.page_bytes
    memory = make_memory(host_memory_bytes=None if limit_pages is None else limit_pages * page)
    memory.make_room(2, 170, 20)
    exact = required_bytes(TINY, SMALL, get_method("nosa"), n_slots=7, offload=True, lanes=2, tokens_a_lane=170)
    assert memory.allocated_bytes() == exact | {"host_pool_bytes": 20 * page}
    seen = []
    for blocks in range(11, 80):
        generation = memory.generation
        memory.make_room(2, blocks * 16 - 3, blocks + 9)
        seen.append(memory.generation != generation)
        assert memory.context.n_blocks >= blocks
        assert memory.pool.n_pages == memory.host_pool_bytes // page >= blocks + 9
        assert memory.pool.n_pages <= (limit_pages or 96)
    assert 1 < sum(seen) <= 6
    found = {name: sum(t.numel() * t.element_size() for t in list_) for name, list_ in every_tensor(memory).items()}
    assert found == memory.allocated_bytes()


def test_room_is_exact_where_a_step_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory()
    memory.make_room(2, 100, 10)
    taken = device_bytes(memory.allocated_bytes())
    needed = required_bytes(TINY, SMALL, get_method("nosa"), n_slots=7, offload=True, lanes=2, tokens_a_lane=120)
    monkeypatch.setattr(memory_module, "free_bytes", lambda _: device_bytes(needed) - taken)
    memory.make_room(2, 120, 10)
    assert device_bytes(memory.allocated_bytes()) == device_bytes(needed)
    monkeypatch.setattr(memory_module, "free_bytes", lambda _: 0)
    with pytest.raises(CapacityError, match="sequences of 140 tokens"):
        memory.make_room(2, 140, 10)


def test_a_dense_method_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"method full attends to every block.*offload=off"):
        make_memory("full", offload=True)


@pytest.mark.parametrize("tokens", [1, 16, 75])
@pytest.mark.parametrize(("method", "offload"), PLACES)
def test_synthetic_contents_look_like_a_prefill(method: str, offload: bool, tokens: int) -> None:
    """Every stored token has finite K and V that vary; means and betas are there; what lies beyond stays poisoned."""
    memory = make_memory(method, offload=offload)
    memory.ensure(2, 100)
    memory.clear_lane(1, [])
    pages = memory.pool.allocate(memory.pages_for(100))
    memory.add_pages(1, 0, pages)
    memory.fill_synthetic(1, pages, tokens, seed=3)
    saved = memory.save(1, pages, tokens)
    n_whole, rest = divmod(tokens, 16)
    for layer in range(2):
        kv = memory.read_context(layer, 1, pages, tokens)
        assert kv.shape == (2, 2, tokens, 8)
        assert kv.isfinite().all()
        assert len(kv.unique()) == kv.numel()
        assert saved.partial[layer].shape == (2, 2, rest, 8)
        if method == "full":
            assert (saved.key_means, saved.beta_means, saved.betas) == ((), (), ())
        else:
            whole, key_means = kv[0].transpose(0, 1), saved.key_means[layer]
            for window in range(SMALL.n_windows(tokens)):
                assert torch.allclose(key_means[:, window], whole[8 * window : 8 * window + 16].mean(0), atol=1e-12)
            assert saved.betas[layer].isfinite().all()
            assert saved.betas[layer].shape == (2, tokens)
            assert memory.context.key_means[layer][1, :, SMALL.n_windows(tokens) :].isnan().all()
        rows, betas = memory.attended(layer)
        if memory.slots is not None:
            assert memory.slots.blocks[layer][1, :, 0].tolist() == [n_whole if rest else -1] * 2
            assert (memory.slots.blocks[layer][1, :, 1:] == -1).all()
            tail = memory.slots.lane_rows(1)[:, 0]
        else:
            tail = memory.pool.rows_of(pages[n_whole : n_whole + 1])
        assert rows[tail, :, rest:].isnan().all()
        if betas is not None and rest:
            assert torch.equal(betas[tail, :rest], saved.betas[layer][:, n_whole * 16 :])
    again = make_memory(method, offload=offload)
    again.ensure(1, 100)
    again.fill_synthetic(0, again.pool.allocate(again.pages_for(100)), tokens, seed=3)
    if method != "full":
        assert torch.equal(again.context.token_betas[1][0].flatten(1)[:, :tokens], saved.betas[1])


def test_a_prompt_that_cannot_be_kept_during_its_prefill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    needed = 2 * 2 * 50 * 2 * 8 * 8
    monkeypatch.setattr("nosa_sys.engine.prefill_context.free_bytes", lambda _: needed - 1)
    with pytest.raises(CapacityError, match=f"{needed} bytes of cpu memory for the K and V of a prompt of 50 tokens"):
        KeptContext(model, 50)
