"""The faults of test_cases.py once more, on the fused steps that CUDA graphs hold; on a CPU by the same launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nosa_sys.engine.cuda import part
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.injection import Injection
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.block_selection.reference import QUERY_AWARE
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from tests.engine import oracle as oracle_module
from tests.engine.checks import assert_misses_match, assert_rows_match
from tests.engine.helpers import NAN, SMALL, TINY, Row, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle
from tests.engine.test_cases import shuffle_slots

ONE_LAYER = dataclasses.replace(TINY, n_layers=1)
PAGE = 2 * 2 * (2 * 16 * 8 * 8)  # TINY: layers x heads x bytes of one K+V block
OVERLAPPING = ("split_merge", "two_batch")


def fused(model: LlamaModel, cfg: SparseConfig = SMALL, **options: Any) -> Engine:
    """An engine of fused steps whose unused memory is poisoned."""
    chosen = {"runner": "kernels", "schedule": "split_merge", "inspect": True, "poison": NAN}
    return Engine(model, cfg, **{**chosen, **options})


def whole_lives(engine: Engine) -> Engine:
    """Memory is taken for whole lives, as with graphs, whose addresses must not move."""
    engine._whole_life = True
    return engine


def forced(engine: Engine, texts: list[list[int]], new: int) -> list[list[Row]]:
    """Decode the last ``new`` tokens of every text; the rows of each."""
    ids = [engine.add(t[:-new], new, force_tokens=t[-new:]) for t in texts]
    rows = Watch(engine).run()
    return [rows[i] for i in ids]


def assert_oracle(model: LlamaModel, cfg: SparseConfig, text: list[int], rows: list[Row]) -> None:
    """Every row against the oracle of the model; of one of one layer only the decoded positions are worked out."""
    positions = [row.position for row in rows] if model.n_layers == 1 else None
    assert_rows_match(rows, run_oracle(model, cfg, "nosa", text, positions))


def test_case_01_context_shorter_than_budget() -> None:
    """k = 64 blocks: rows of 1, 3 and 66 blocks in one batch select what exists; the short ones load nothing warm."""
    cfg, model = SparseConfig(), tiny_model(1, shape=ONE_LAYER)
    texts = [random_tokens(n + 5, n) for n in (1, 150, 4200)]
    for text, rows in zip(texts, forced(fused(model, cfg), texts, 5), strict=True):
        assert_oracle(model, cfg, text, rows)
        n_blocks = -(-len(text) // 64)
        assert [len(head) for head in rows[-1].selected[0]] == [min(64, n_blocks)] * 2
        assert n_blocks > 64 or all(sum(map(sum, row.misses)) == 0 for row in rows[1:])


@pytest.mark.parametrize("fill", [NAN, 1e4])
@pytest.mark.parametrize("offload", [True, False])
def test_case_02_last_block_partly_filled(offload: bool, fill: float) -> None:
    model = tiny_model(1, shape=ONE_LAYER)
    texts = [random_tokens(n + 2, n) for n in (15, 16, 17, 63, 64, 65, 127, 128, 129)]
    engine = fused(model, offload=offload, poison=fill, max_batch=len(texts), prefill_chunk=40)
    for text, rows in zip(texts, forced(engine, texts, 2), strict=True):
        assert_oracle(model, SMALL, text, rows)


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself."""
    return tensor.clone().view(torch.int64) if tensor.dtype == torch.float64 else tensor.clone()


def lane_state(engine: Engine, lane: int) -> list[Tensor]:
    """Everything that belongs to a lane, and the pages that belong to nobody."""
    memory, state = engine.memory, []
    assert memory.slots is not None
    rows = memory.slots.lane_rows(lane).flatten()
    owned = {page for sequence in engine._running for page in sequence.pages}
    free = [page for page in range(memory.pool.layers[0].shape[0] // 2) if page not in owned]
    for layer in range(engine.model.n_layers):
        slots, context = memory.slots, memory.context
        state += [
            slots.kv[layer][rows],
            slots.betas[layer][rows],
            slots.blocks[layer][lane],
            slots.last_use[layer][lane],
        ]
        state += [x[layer][lane] for x in (context.ring, context.token_betas, context.key_means, context.beta_means)]
        state.append(memory.pool.layers[layer][memory.pool.rows_of(free)])
    return [bits(tensor) for tensor in state]


@pytest.mark.parametrize("schedule", ["fused_kv", *OVERLAPPING])
def test_case_04_padded_lanes_write_nothing_and_change_nothing(schedule: str) -> None:
    """Lane 1 of four is empty from step 3 on: tokens and stored KV of the others are those of the eager engine."""
    model = tiny_model(4)
    prompts = [random_tokens(n, n) for n in (60, 90, 128, 40)]
    results = []
    for options in ({"runner": "kernels", "schedule": schedule}, {"runner": "eager", "schedule": "serial"}):
        engine = whole_lives(fused(model, max_batch=4, **options))
        for row, prompt in enumerate(prompts):
            engine.add(prompt, 3 if row == 1 else 100)
        for _ in range(3):
            engine.step()
        before = lane_state(engine, 1)
        for _ in range(90):  # over five block edges a row
            engine.step()
        assert engine.last_plan is not None
        assert engine.last_plan.batch.lanes == [0, 2, 3]
        for old, now in zip(before, lane_state(engine, 1), strict=True):
            assert torch.equal(old, now)
        saved = [engine.save(sequence) for sequence in (0, 2, 3)]
        results.append((dict(engine.outputs), saved))
    (tokens, states), (expected, others) = results
    assert tokens == expected
    for mine, theirs in zip(states, others, strict=True):
        assert mine.kv is not None
        assert theirs.kv is not None
        assert mine.kv.n_tokens == theirs.kv.n_tokens
        for name in ("blocks", "partial", "betas"):
            for a, b in zip(getattr(mine.kv, name), getattr(theirs.kv, name), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_case_05_batch_of_unequal_lengths(schedule: str) -> None:
    """Greedy rows of a mixed batch equal their solo runs, and the oracle."""
    model = tiny_model(2, shape=ONE_LAYER)
    prompts, new = [random_tokens(n, n) for n in (33, 100, 3000, 32, 64, 65)], 32
    engine = fused(model, schedule=schedule, max_batch=6)
    ids = [engine.add(prompt, new) for prompt in prompts]
    rows = Watch(engine).run()
    for sequence, prompt in zip(ids, prompts, strict=True):
        alone = fused(model, schedule=schedule)
        alone.add(prompt, new)
        assert engine.outputs[sequence] == alone.run()[0]
        assert_oracle(model, SMALL, prompt + engine.outputs[sequence], rows[sequence])


@pytest.mark.parametrize("whole", [False, True])
def test_case_07_generation_has_no_head_room_limit(whole: bool) -> None:
    """1,025 new tokens from a one-token prompt: steps are built anew beyond 32 and 64 blocks, memory grows or is there
    from the start, and new blocks are ranked and picked."""
    model, text = tiny_model(7, shape=ONE_LAYER), random_tokens(1026, 7)
    engine = fused(model, schedule="fused_kv")
    (rows,) = forced(whole_lives(engine) if whole else engine, [text], 1025)
    checked = [*range(0, 40), *range(500, 530), *range(1000, 1025)]
    found = run_oracle(model, SMALL, "nosa", text, checked)
    for position in checked:
        np.testing.assert_allclose(rows[position].logits, found.logits[position], rtol=0, atol=1e-9)
        assert rows[position].selected == found.selected[position]
    assert max(j for row in rows[500:] for head in row.selected[0] for j in head[1:-2]) > 30
    assert all(key[2] <= 96 for key in engine._runner._graphs)


@pytest.mark.parametrize("whole", [False, True])
def test_case_07_limit_is_named_before_any_work(whole: bool) -> None:
    model = tiny_model()
    engine = fused(model, host_memory_bytes=10 * PAGE)
    engine = whole_lives(engine) if whole else engine
    with pytest.raises(CapacityError, match=rf"host_memory_bytes={10 * PAGE}"):
        engine.add(random_tokens(100, 0), 77)
    sequence = engine.add(random_tokens(100, 0), 76)
    assert len(engine.run()[sequence]) == 76


@pytest.mark.parametrize("schedule", ["fused_kv", *OVERLAPPING])
def test_case_08_layers_do_not_share_rows(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is constant 1, 2, 3 in layers 0, 1, 2: attention gives exactly that, after eviction and reload too."""
    model = tiny_model(8, shape=dataclasses.replace(TINY, n_layers=3))
    layer_of = {id(layer.A): index for index, layer in enumerate(model.layers)}
    first_value = (TINY.n_q_heads + TINY.n_kv_heads) * TINY.head_dim
    inputs, append, finish = model.attention_inputs, part.append_token, part.LanePart.finish
    seen: dict[int, set[float]] = {0: set(), 1: set(), 2: set()}

    def constant_v(layer: int, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, beta = inputs(layer, x)
        return q, k, torch.full_like(v, layer + 1.0), beta

    def constant_append(qkv: Tensor, A: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, ...]:
        qkv[:, first_value:] = layer_of[id(A)] + 1.0
        return append(qkv, A, *rest, **more)

    def watched(self: part.LanePart, layer: int, attention: Tensor) -> None:
        seen[layer].update(attention[self.rows >= 0].flatten().round(decimals=9).tolist())
        finish(self, layer, attention)

    monkeypatch.setattr(model, "attention_inputs", constant_v)
    monkeypatch.setattr(part, "append_token", constant_append)
    monkeypatch.setattr(part.LanePart, "finish", watched)
    engine = fused(model, method="infllmv2", schedule=schedule, prefill_chunk=32)
    for seed in (8, 9):
        engine.add(random_tokens(130, seed), 40)
    engine.run()
    assert engine.summary()["blocks_loaded_warm"] > 0
    assert seen == {0: {1.0}, 1: {2.0}, 2: {3.0}}


def test_case_10_summary_tells_whether_sparsity_engaged() -> None:
    """Without inspection: steps that keep no selections count what they load all the same."""
    model = tiny_model()
    summaries = []
    for prompt in (160, 40):
        engine = fused(model, method="infllmv2", inspect=False)
        engine.add(random_tokens(prompt, 1), 10)
        engine.run()
        summaries.append(engine.summary())
    sparse, short = summaries
    assert (sparse["sparse_step_share"], sparse["notes"]) == (1.0, [])
    assert sparse["blocks_loaded_warm"] > 0
    assert (short["sparse_step_share"], short["blocks_loaded_warm"]) == (0.0, 0)
    assert "no step was sparse" in short["notes"][0]


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_case_11_slot_count_and_order_do_not_change_results(schedule: str) -> None:
    """Slots k and 4k, full-size pools filled in another order, and no slots at all."""
    model, text = tiny_model(11, shape=ONE_LAYER), random_tokens(400, 11)
    for options, shuffle in (
        ({"slots": 5}, False),
        ({"slots": 20, "policy": "lru"}, True),
        ({"slots": 20, "policy": "beta"}, True),
        ({"offload": False}, False),
    ):
        engine = fused(model, schedule=schedule, **options)
        sequence = engine.add(text[:300], 100, force_tokens=text[300:])
        watch = Watch(engine)
        watch.step()
        if shuffle:
            shuffle_slots(engine)
        assert_oracle(model, SMALL, text, watch.run()[sequence])


def test_case_13_overflowing_heads_stay_finite() -> None:
    """Head inputs of hundreds in the token's append: softplus is linear there, and far below zero it is 0."""
    model = tiny_model(13, shape=ONE_LAYER)
    model.layers[0].delta *= 1e3
    text = random_tokens(150, 13)
    (rows,) = forced(fused(model), [text], 30)
    assert_oracle(model, SMALL, text, rows)
    assert np.isfinite([row.logits for row in rows]).all()


@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 2), (6, 2), (4, 4), (8, 1)])
def test_case_15_query_heads_map_to_their_kv_head(n_q: int, n_kv: int, schedule: str) -> None:
    shape = ModelShape("heads", 1, n_q, n_kv, 8, 24, 40, TINY.vocab_size, dtype="float64")
    model, texts = tiny_model(15, shape=shape), [random_tokens(130, 15), random_tokens(90, 16)]
    for text, rows in zip(texts, forced(fused(model, schedule=schedule), texts, 30), strict=True):
        assert_oracle(model, SMALL, text, rows)


@pytest.mark.parametrize("whole", [False, True])
def test_case_16_reused_lanes_inherit_nothing(whole: bool) -> None:
    """Two long sequences run on while a third lane changes hands fifty times, freed memory being poisoned."""
    model = tiny_model(16, shape=ONE_LAYER)
    engine = fused(model, max_batch=3, prefill_chunk=50, schedule="two_batch")
    engine = whole_lives(engine) if whole else engine
    watch, rng = Watch(engine), np.random.default_rng(16)
    prompts = {engine.add(p, 70): p for p in (random_tokens(60 + i, i) for i in range(2))}
    for turn in range(50):
        prompt = random_tokens(int(rng.integers(1, 110)), 100 + turn)
        prompts[engine.add(prompt, 1 + turn % 2)] = prompt
        for _ in range(1 + turn % 2):
            watch.step()
    rows = watch.run()
    for sequence, prompt in prompts.items():
        assert_oracle(model, SMALL, prompt + engine.outputs[sequence], rows[sequence])
    assert engine.memory.pool.pages_in_use == 0
    assert (engine.memory.page_table == -1).all()


@pytest.mark.parametrize("n", [64, 65])
@pytest.mark.parametrize("method", ["nosa", "full"])
def test_case_17_save_at_a_block_edge_and_resume(method: str, n: int) -> None:
    """Saved while the next step is on its way already: the last token's row is not in it."""
    cfg = SparseConfig(topk=8, window_size=64, select_blocks=2)
    model = tiny_model(17)
    whole = Engine(model, cfg, method=method)
    unbroken = whole.add(random_tokens(64, 17), 100)
    first = whole_lives(fused(model, cfg, method=method))
    first._runner.looks_ahead = True
    sequence = first.add(random_tokens(64, 17), 100)
    for _ in range(n - 1):
        first.step()
    state = first.save(sequence)  # ends the step in flight, which is the n-th
    assert state.kv is not None
    assert (state.kv.n_tokens, state.kv.n_partial_rows) == ((127, 63) if n == 64 else (128, 0))
    stored = [*state.kv.blocks, *state.kv.partial, *(state.kv.betas if method == "nosa" else ())]
    assert not any(t.isnan().any() for t in stored)
    second = fused(model, cfg, method=method)
    second.add(random_tokens(10, 3), 200)
    resumed = second.resume(state)
    assert second.run()[resumed] == whole.run()[unbroken] == first.run()[sequence]


N_STEPS = 50


def random_sets(contexts: list[int], cfg: SparseConfig, n_layers: int, n_heads: int) -> Injection:
    """Another random set every step: block 0, the current one and k - 2 others."""
    rng = np.random.default_rng(18)
    table = np.full((N_STEPS, n_layers, len(contexts), n_heads, cfg.topk), -1, dtype=np.int32)
    for step, layer, row, head in np.ndindex(table.shape[:4]):
        current = (contexts[row] - 1 + step) // cfg.block_size
        others = rng.choice(np.arange(1, current), cfg.topk - 2, replace=False)
        table[step, layer, row, head] = sorted({0, current, *others.tolist()})
    return Injection(torch.from_numpy(table), "random sets", contexts)


@pytest.mark.parametrize(
    ("runner", "schedule"),
    [("eager", "serial"), ("kernels", "fused_kv"), ("kernels", "split_merge"), ("kernels", "two_batch")],
)
def test_case_18_random_sets_over_many_blocks(runner: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 blocks, 64 slots, 50 random sets: attention over exactly their blocks, wherever those are."""
    cfg = SparseConfig(block_size=4, kernel_size=4, kernel_stride=2, topk=64, window_size=4, select_blocks=2)
    model, contexts = tiny_model(18, shape=ONE_LAYER), [1140, 1100]
    injection = random_sets(contexts, cfg, 1, 2)
    texts = [random_tokens(n + N_STEPS, n) for n in contexts]
    engine = fused(
        model, cfg, runner=runner, schedule=schedule, slots=64, max_batch=2, injection=injection, method="infllmv2"
    )
    found = forced(engine, texts, N_STEPS)
    for number, (text, rows) in enumerate(zip(texts, found, strict=True)):
        sets = iter(injection.ids_table[:, 0, number].flatten(0, 1).tolist())
        monkeypatch.setattr(oracle_module, "choose", lambda *_, sets=sets: (next(sets), [], np.zeros(0)))
        positions = range(contexts[number] - 1, len(text) - 1)
        assert_rows_match(rows, run_oracle(model, cfg, "infllmv2", text, positions))
    assert sum(m for row in found[0][1:] for layer in row.misses for m in layer) > 40 * N_STEPS


def test_case_19_no_geometry_is_shared_between_engines() -> None:
    """Blocks of 16, 32 and 16 again, the engines alive side by side: each selects by its own size."""
    model, text = tiny_model(19, shape=ONE_LAYER), random_tokens(200, 19)
    engines = []
    for block in (16, 32, 16):
        cfg = dataclasses.replace(SMALL, block_size=block, window_size=block, topk=4)
        engine = fused(model, cfg)
        engines.append((cfg, Watch(engine), engine.add(text[:150], 50, force_tokens=text[150:])))
    for _ in range(50):
        for _, watch, _ in engines:
            watch.step()
    for cfg, watch, sequence in engines:
        assert_oracle(model, cfg, text, watch.rows[sequence])


def test_case_20_accounts_end_at_zero() -> None:
    """Misses are those of a dictionary model, and all pages, slots and ids come back when sequences close."""
    model, texts = tiny_model(20), [random_tokens(150, 20), random_tokens(120, 21)]
    engine = fused(model, slots=8, policy="lru", schedule="two_batch")
    found = forced(engine, texts, 80)
    total = sum(
        assert_misses_match(rows, run_oracle(model, SMALL, "nosa", text), engine)
        for text, rows in zip(texts, found, strict=True)
    )
    summary = engine.summary()
    assert (summary["blocks_loaded"], summary["h2d_bytes"]) == (total, total * 2 * 16 * 8 * 8)
    assert engine.memory.pool.pages_in_use == 0
    assert engine.memory.slots is not None
    assert all((blocks == -1).all() for blocks in engine.memory.slots.blocks)


def test_case_21_contexts_with_no_one_or_two_windows() -> None:
    cfg = SparseConfig(block_size=16, topk=2, init_blocks=0, window_size=16, select_blocks=1)
    model = tiny_model(22)
    texts = [random_tokens(n + 2, n) for n in (31, 32, 40, 47, 48)]
    found = forced(fused(model, cfg, max_batch=5), texts, 2)
    for text, rows in zip(texts, found, strict=True):
        assert_oracle(model, cfg, text, rows)
    assert found[0][0].selected[0] == [[0, 1]] * 2


def test_case_23_memory_of_whole_lives_stays_within_the_limit() -> None:
    limit = 11 * PAGE + 100
    engine = whole_lives(fused(tiny_model(), host_memory_bytes=limit))
    for seed in range(5):
        engine.add(random_tokens(60, seed), 30)  # five blocks each: two fit at a time, the others wait
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.memory.pool.pages_in_use)
    pool = sum(t.untyped_storage().nbytes() for t in engine.memory.pool.layers)
    assert engine.summary()["host_pool_bytes"] <= pool <= limit + 2 * 4096
    assert most == 10
    assert all(len(tokens) == 30 for tokens in engine.outputs.values())


@pytest.mark.parametrize("method", ["nosa", "full"])
def test_longer_sequences_that_join_seldom_move_memory(method: str) -> None:
    """Each of 40 sequences is a block longer than the one before: graphs would be captured anew at every generation."""
    model = tiny_model(5, shape=ONE_LAYER)
    engine = whole_lives(fused(model, method=method, max_batch=2, schedule="fused_kv"))
    generations, prompts = set(), [random_tokens(16 * n + 3, n) for n in range(1, 41)]
    ids = []
    for prompt in prompts:
        ids.append(engine.add(prompt, 3))
        engine.step()
        generations.add(engine.memory.generation)
    engine.run()
    assert len(generations) <= 6
    for sequence, prompt in list(zip(ids, prompts, strict=True))[::13]:
        alone = Engine(model, SMALL, method=method)
        alone.add(prompt, 3)
        assert alone.run()[0] == engine.outputs[sequence]


@pytest.mark.parametrize("dim", [6, 80, 96])
def test_case_24_head_dims_that_are_no_power_of_two(dim: int) -> None:
    model = tiny_model(24, shape=ModelShape("dims", 1, 4, 2, dim, 24, 40, TINY.vocab_size, dtype="float64"))
    text = random_tokens(150, dim)
    (rows,) = forced(fused(model), [text], 30)
    assert_oracle(model, SMALL, text, rows)


@pytest.mark.parametrize("k", [3, 48, 64])
@pytest.mark.parametrize("n_blocks", [8, 100])
def test_case_24_any_budget_over_few_and_many_blocks(k: int, n_blocks: int) -> None:
    """Steps without a single miss included."""
    cfg = SparseConfig(topk=k, init_blocks=0, window_size=64, select_blocks=2)
    model, text = tiny_model(24, shape=ONE_LAYER), random_tokens(64 * n_blocks + 3, k)
    (rows,) = forced(fused(model, cfg), [text], 3)
    assert_oracle(model, cfg, text, rows)
    assert [len(head) for head in rows[0].selected[0]] == [min(k, n_blocks)] * 2


@pytest.mark.parametrize("select", [1, 2, 4])
def test_case_28_decode_follows_the_query_aware_budget(select: int) -> None:
    cfg = dataclasses.replace(SMALL, topk=8, select_blocks=select)
    model, text = tiny_model(28), random_tokens(200, 28)
    engine = fused(model, cfg)
    (rows,) = forced(engine, [text], 20)
    assert engine.last_plan is not None
    assert (engine.last_plan.origins[1] == QUERY_AWARE).sum(-1).tolist() == [[select - 1] * 2]
    assert_oracle(model, cfg, text, rows)


def test_case_30_slots_below_one_steps_need_are_refused() -> None:
    """Four slots for five blocks; five fit exactly; guesses need slots beyond those."""
    model, text = tiny_model(30), random_tokens(200, 30)
    with pytest.raises(CapacityError, match=r"slots=4 .* at least topk=5"):
        fused(model, slots=4)
    with pytest.raises(ConfigError, match="raise slots"):
        fused(model, slots=6, policy="lru", schedule="prefetch", n_prefetch=2)
    for options in ({"slots": 5}, {"slots": 6, "policy": "lru", "schedule": "prefetch"}):
        (rows,) = forced(fused(model, **options), [text], 40)
        assert_oracle(model, SMALL, text, rows)
