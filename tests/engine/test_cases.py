"""Faults that engines of this kind really had, each with a small input and the right answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.errors import CapacityError, ConfigError, NumericsError
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from tests.engine.checks import assert_misses_match, assert_rows_match
from tests.engine.helpers import METHODS, NAN, SMALL, TINY, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle

ROOMY = SparseConfig()  # 64 blocks of 64


@pytest.mark.parametrize("prompt", [1, 150])
def test_case_01_context_shorter_than_budget(prompt: int) -> None:
    """k = 64 blocks, at most 3 exist: all are selected, nothing is loaded after the cold step, no NaN appears."""
    model, text = tiny_model(), random_tokens(prompt + 5, 0)
    engine = Engine(model, ROOMY, poison=NAN)
    sequence = engine.add(text[:prompt], 5, force_tokens=text[prompt:])
    rows = Watch(engine).run()[sequence]
    assert_rows_match(rows, run_oracle(model, ROOMY, "nosa", text))
    n_blocks = -(-prompt // 64)
    assert rows[0].selected == [[list(range(n_blocks))] * 2] * 2
    assert engine.last_plan is not None
    assert engine.last_plan.counts.tolist() == [n_blocks]
    assert [sum(map(sum, row.misses)) for row in rows] == [(n_blocks - 1) * 4, 0, 0, 0, 0]


@pytest.mark.parametrize("fill", [NAN, 1e4])
def test_case_02_last_block_partly_filled(fill: float) -> None:
    """Unused rows hold NaN, then 1e4: the result is the oracle's either way, at lengths around every block edge."""
    model = tiny_model(1)
    lengths = (63, 64, 65, 127, 128, 129)
    engine = Engine(model, SMALL, poison=fill, prefill_chunk=40)
    texts = [random_tokens(n + 2, n) for n in lengths]
    ids = [engine.add(t[:-2], 2, force_tokens=t[-2:]) for t in texts]
    rows = Watch(engine).run()
    for sequence, text in zip(ids, texts, strict=True):
        assert_rows_match(rows[sequence], run_oracle(model, SMALL, "nosa", text))


@pytest.mark.parametrize("method", METHODS)
def test_case_05_batch_of_unequal_lengths(method: str) -> None:
    """Greedy rows of a mixed batch, one joining and one leaving in the middle, equal their solo runs."""
    model = tiny_model(2)
    prompts = [random_tokens(n, n) for n in (33, 100, 700, 32, 65)]
    new = (40, 12, 30, 40, 20)

    def solo(prompt: list[int], n: int) -> tuple[list[int], list]:
        engine = Engine(model, SMALL, method=method, poison=NAN)
        sequence = engine.add(prompt, n)
        rows = Watch(engine).run()[sequence]
        return engine.outputs[sequence], rows

    engine = Engine(model, SMALL, method=method, poison=NAN, max_batch=4)
    watch = Watch(engine)
    ids = [engine.add(p, n) for p, n in zip(prompts[:3], new, strict=False)]
    for _ in range(5):
        watch.step()
    ids += [engine.add(p, n) for p, n in zip(prompts[3:], new[3:], strict=True)]  # the last one waits for a lane
    rows = watch.run()
    for sequence, prompt, n in zip(ids, prompts, new, strict=True):
        tokens, alone = solo(prompt, n)
        assert engine.outputs[sequence] == tokens
        for mine, other in zip(rows[sequence], alone, strict=True):
            np.testing.assert_allclose(mine.logits, other.logits, rtol=0, atol=1e-9)
            assert (mine.selected, mine.misses) == (other.selected, other.misses)


def test_case_07_generation_has_no_head_room_limit() -> None:
    """1,025 new tokens from a one-token prompt: storage grows, new blocks are ranked and picked, as in the oracle."""
    shape = dataclasses.replace(TINY, n_layers=1)
    model, text = tiny_model(7, shape=shape), random_tokens(1026, 7)
    engine = Engine(model, SMALL, poison=NAN)
    sequence = engine.add(text[:1], 1025, force_tokens=text[1:])
    rows = Watch(engine).run()[sequence]
    oracle = run_oracle(model, SMALL, "nosa", text)
    assert_rows_match(rows, oracle)
    picked = {j for row in rows[500:] for head in row.selected[0] for j in head[1:-2]}
    assert max(picked) > 30  # blocks made by generation itself come back by rank


def test_case_07_limit_is_named_before_any_work() -> None:
    """With a memory limit: prompt + new exactly at the limit runs, one block more is refused when it is added."""
    model = tiny_model()
    page = 2 * 2 * (2 * 16 * 8 * 8)  # layers x heads x bytes of one K+V block
    engine = Engine(model, SMALL, host_memory_bytes=10 * page)
    with pytest.raises(CapacityError, match=rf"host_memory_bytes={10 * page}"):
        engine.add(random_tokens(100, 0), 77)  # 176 stored tokens fill 11 blocks
    sequence = engine.add(random_tokens(100, 0), 76)
    assert len(engine.run()[sequence]) == 76


def test_case_08_layers_do_not_share_rows() -> None:
    """V is constant 1, 2, 3 in layers 0, 1, 2: attention gives exactly that, in prefill chunks that read the host
    pool back and in decode after eviction and reload."""
    model = tiny_model(8, shape=dataclasses.replace(TINY, n_layers=3))
    values = slice(TINY.n_q_heads * 8 + TINY.n_kv_heads * 8, None)
    seen: dict[int, set[float]] = {0: set(), 1: set(), 2: set()}
    for layer in model.layers:
        layer.qkv[values] = 0.0
    inputs, output = model.attention_inputs, model.attention_output

    def constant_v(layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, beta = inputs(layer, x)
        return q, k, torch.full_like(v, layer + 1.0), beta

    def watched(layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        seen[layer].update(attention.flatten().round(decimals=9).tolist())
        return output(layer, x, attention)

    model.attention_inputs, model.attention_output = constant_v, watched  # type: ignore[method-assign]
    engine = Engine(model, SMALL, method="infllmv2", poison=NAN, prefill_chunk=32)
    engine.add(random_tokens(130, 8), 40)
    engine.run()
    assert engine.summary()["blocks_loaded_warm"] > 0
    assert seen == {0: {1.0}, 1: {2.0}, 2: {3.0}}


def test_case_10_summary_tells_whether_sparsity_engaged() -> None:
    model = tiny_model()
    engine = Engine(model, SMALL, method="infllmv2")
    engine.add(random_tokens(160, 1), 10)
    engine.run()
    summary = engine.summary()
    assert (summary["sparse_step_share"], summary["notes"]) == (1.0, [])
    assert summary["blocks_loaded_warm"] > 0
    short = Engine(model, SMALL)
    short.add(random_tokens(40, 1), 10)
    short.run()
    summary = short.summary()
    assert (summary["sparse_step_share"], summary["blocks_loaded_warm"]) == (0.0, 0)
    assert summary["blocks_loaded"] == summary["blocks_loaded_cold"] == 2 * 4  # the prompt's two finished blocks
    assert "no step was sparse" in summary["notes"][0]


def test_case_11_slot_count_and_order_do_not_change_results() -> None:
    """Slots k and 4k, full-size pools filled in another order: the same selections, logits and tokens."""
    model, text = tiny_model(11), random_tokens(400, 11)
    runs = []
    for slots, policy, shuffle in ((5, None, False), (20, "lru", False), (20, "beta", False), (20, "lru", True)):
        engine = Engine(model, SMALL, slots=slots, policy=policy, poison=NAN)
        sequence = engine.add(text[:300], 100, force_tokens=text[300:])
        watch = Watch(engine)
        watch.step()
        if shuffle:
            shuffle_slots(engine)
        runs.append(watch.run()[sequence])
    oracle = run_oracle(model, SMALL, "nosa", text)
    for rows in runs:
        assert_rows_match(rows, oracle)


def shuffle_slots(engine: Engine) -> None:
    """Permute the slots of every layer and head of lane 0, map, data and betas alike."""
    cache, generator = engine.memory.slots, torch.Generator().manual_seed(0)
    for layer in range(engine.model.n_layers):
        for head in range(cache.n_kv_heads):
            order = torch.randperm(cache.n_slots, generator=generator)
            rows = cache.lane_rows(0)[head]
            cache.kv[layer][rows] = cache.kv[layer][rows[order]]
            cache.betas[layer][rows] = cache.betas[layer][rows[order]]
            cache.blocks[layer][0, head] = cache.blocks[layer][0, head][order]
            cache.last_use[layer][0, head, :-1] = cache.last_use[layer][0, head, :-1][order]


def test_case_16_reused_lanes_inherit_nothing() -> None:
    """Sequences end and others take their lanes, again and again: each equals its oracle, poison is never read."""
    model = tiny_model(16)
    engine = Engine(model, SMALL, max_batch=3, poison=NAN, prefill_chunk=33)
    rng = np.random.default_rng(16)
    texts = [random_tokens(int(n), 100 + i) for i, n in enumerate(rng.integers(2, 130, 24))]
    new = [int(rng.integers(1, min(30, len(t)))) for t in texts]
    ids = [engine.add(t[:-n], n, force_tokens=t[-n:]) for t, n in zip(texts, new, strict=True)]
    rows = Watch(engine).run()
    assert len(set(ids)) == 24
    for sequence, text in zip(ids, texts, strict=True):
        oracle = run_oracle(model, SMALL, "nosa", text)
        assert_rows_match(rows[sequence], oracle)
        assert_misses_match(rows[sequence], oracle, engine)


@pytest.mark.parametrize("n", [64, 65])
@pytest.mark.parametrize("method", ["nosa", "full"])
def test_case_17_save_at_a_block_edge_and_resume(method: str, n: int) -> None:
    """Prompt 64, n new tokens: the last token's row is not written yet; a resumed run equals an unbroken one."""
    cfg = SparseConfig(topk=8, window_size=64, select_blocks=2)
    model = tiny_model(17)
    whole = Engine(model, cfg, method=method)
    unbroken = whole.add(random_tokens(64, 17), 100)
    first = Engine(model, cfg, method=method, poison=NAN)
    sequence = first.add(random_tokens(64, 17), 100)
    for _ in range(n):
        first.step()
    state = first.save(sequence)
    assert state.kv is not None
    assert (state.kv.n_tokens, state.kv.n_partial_rows) == ((127, 63) if n == 64 else (128, 0))
    assert not any(t.isnan().any() for t in (*state.kv.blocks, *state.kv.partial, *state.kv.betas))
    second = Engine(model, cfg, method=method, poison=NAN)
    second.add(random_tokens(10, 3), 200)  # resumed beside another sequence, under another id
    resumed = second.resume(state)
    assert resumed != sequence
    assert second.run()[resumed] == whole.run()[unbroken] == first.run()[sequence]


def test_case_19_no_geometry_is_shared_between_engines() -> None:
    """Block 32 after block 16 in one process: each selects by its own size."""
    model, text = tiny_model(19), random_tokens(200, 19)
    for block in (16, 32, 16):
        cfg = dataclasses.replace(SMALL, block_size=block, window_size=block, topk=4)
        engine = Engine(model, cfg, poison=NAN)
        sequence = engine.add(text[:150], 50, force_tokens=text[150:])
        assert_rows_match(Watch(engine).run()[sequence], run_oracle(model, cfg, "nosa", text))


def test_case_20_accounts_end_at_zero() -> None:
    """Blocks in - blocks dropped = resident at every step; all host pages come back when sequences close."""
    engine = Engine(tiny_model(20), SMALL, slots=8, policy="lru", poison=NAN)
    sequence = engine.add(random_tokens(150, 20), 80)
    before: set[tuple[int, int, int]] = set()
    watch = Watch(engine)
    while not engine.idle:
        watch.step()
        if engine.idle:
            break
        maps = [engine.memory.slots.blocks[layer][0].tolist() for layer in range(2)]
        resident = {(layer, h, j) for layer in range(2) for h in range(2) for j in maps[layer][h] if j >= 0}
        assert len(resident) <= 8 * 4
        row = watch.rows[sequence][-1]
        born = {(la, h, row.position // 16) for la in range(2) for h in range(2)} - before
        if not row.cold:
            assert sum(map(sum, row.misses)) + len(born) == len(resident - before)
        before = resident
    assert engine.memory.pool.pages_in_use == 0
    assert all((engine.memory.slots.blocks[layer] == -1).all() for layer in range(2))


def test_case_23_host_limit_covers_everything_and_is_not_rounded() -> None:
    """The pool's true bytes stay within the limit, K and V of all layers together, and the summary states them."""
    page = 2 * 2 * (2 * 16 * 8 * 8)
    limit = 11 * page + 100
    engine = Engine(tiny_model(), SMALL, host_memory_bytes=limit)
    for seed in range(5):
        engine.add(random_tokens(60, seed), 30)  # five blocks each: two fit at a time, the others wait
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.memory.pool.pages_in_use)
    pool = sum(t.numel() * t.element_size() for t in engine.memory.pool.layers)
    assert engine.summary()["host_pool_bytes"] == pool <= limit
    assert most == 10
    assert all(len(tokens) == 30 for tokens in engine.outputs.values())


def test_case_30_slots_below_one_steps_need_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(CapacityError, match=r"slots=4 .* at least topk=5"):
        Engine(model, SMALL, slots=4)
    engine = Engine(model, SMALL, slots=5, policy="lru", poison=NAN)
    engine.add(random_tokens(200, 0), 20)
    engine.run()
    with pytest.raises(ConfigError, match="every block stays on the device"):
        Engine(model, SMALL, method="full", slots=64)


def test_case_25_nan_is_an_error_that_names_the_place() -> None:
    model = tiny_model()
    model.layers[0].qkv[:] = float("nan")
    engine = Engine(model, SMALL)
    engine.add(random_tokens(130, 0), 5)
    with pytest.raises(NumericsError, match=r"layer 0, prefill.*position.*KV head 0, block 1"):
        engine.step()
    engine = Engine(model, SMALL)
    engine.add([1], 5)
    with pytest.raises(NumericsError, match="sequence 0 at position 0"):
        engine.step()


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 2), (6, 2), (4, 4), (8, 1)])
def test_case_15_query_heads_map_to_their_kv_head(n_q: int, n_kv: int) -> None:
    shape = ModelShape("heads", 1, n_q, n_kv, 8, 24, 40, TINY.vocab_size, dtype="float64")
    model, text = tiny_model(15, shape=shape), random_tokens(130, 15)
    engine = Engine(model, SMALL, poison=NAN)
    sequence = engine.add(text[:100], 30, force_tokens=text[100:])
    assert_rows_match(Watch(engine).run()[sequence], run_oracle(model, SMALL, "nosa", text))
