"""Faults of batches, chunks and settings: what sequences could inherit from, or mix with, one another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.kernels.block_selection.reference import QUERY_AWARE
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from tests.engine.checks import assert_rows_match
from tests.engine.helpers import NAN, SMALL, TINY, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle

ONE_LAYER = dataclasses.replace(TINY, n_layers=1)


@pytest.mark.parametrize("prompts", [(1, 150), (150, 1, 4200)])
def test_case_01_short_contexts_beside_longer_ones(prompts: tuple[int, ...]) -> None:
    """k = 64 blocks: rows of 1, 3 and 66 blocks in one batch each select what exists and nothing else."""
    cfg, model = SparseConfig(), tiny_model(1, shape=ONE_LAYER)
    engine = Engine(model, cfg, poison=NAN)
    texts = [random_tokens(n + 5, n) for n in prompts]
    ids = [engine.add(t[:-5], 5, force_tokens=t[-5:]) for t in texts]
    rows = Watch(engine).run()
    for sequence, text in zip(ids, texts, strict=True):
        positions = range(len(text) - 6, len(text) - 1)
        assert_rows_match(rows[sequence], run_oracle(model, cfg, "nosa", text, positions))
        n_blocks = -(-len(text) // 64)
        assert [len(head) for head in rows[sequence][-1].selected[0]] == [min(64, n_blocks)] * 2
        assert n_blocks > 64 or all(sum(map(sum, row.misses)) == 0 for row in rows[sequence][1:])


def test_case_16_a_hundred_sequences_follow_one_another_in_a_full_batch() -> None:
    """Three long sequences run on while a fourth lane changes hands a hundred times, freed blocks being poisoned."""
    model = tiny_model(16, shape=ONE_LAYER)
    engine = Engine(model, SMALL, max_batch=4, poison=NAN, prefill_chunk=50)
    watch, rng = Watch(engine), np.random.default_rng(16)
    prompts = {engine.add(p, 110): p for p in (random_tokens(60 + i, i) for i in range(3))}
    for turn in range(100):
        prompt = random_tokens(int(rng.integers(1, 110)), 100 + turn)
        prompts[engine.add(prompt, 1 + turn % 2)] = prompt
        for _ in range(1 + turn % 2):
            watch.step()
        assert len(engine._running) <= 4
    rows = watch.run()
    for sequence, prompt in prompts.items():
        text = prompt + engine.outputs[sequence]
        oracle = run_oracle(model, SMALL, "nosa", text, range(len(prompt) - 1, len(text) - 1))
        assert_rows_match(rows[sequence], oracle)
    assert engine.memory.pool.pages_in_use == 0
    assert (engine.memory.page_table == -1).all()


def test_case_21_chunks_and_windows_stay_within_their_sequence() -> None:
    """Prefills of 100 and 156 tokens in chunks of 32 are 4 + 5 chunks, though 256 tokens would make 8."""
    cfg = SparseConfig(block_size=32, topk=4, window_size=32, select_blocks=2)
    model = tiny_model(21, shape=ONE_LAYER)
    engine = Engine(model, cfg, prefill_chunk=32, poison=NAN)
    chunks: list[tuple[int, int]] = []
    inputs = model.attention_inputs

    def watched(layer: int, x):  # type: ignore[no-untyped-def]
        chunks.append((len(x), layer))
        return inputs(layer, x)

    model.attention_inputs = watched  # type: ignore[method-assign]
    texts = [random_tokens(n + 3, n) for n in (100, 156)]
    ids = [engine.add(t[:-2], 2, force_tokens=t[-2:]) for t in texts]
    rows = Watch(engine).run()
    assert [n for n, _ in chunks] == [32, 32, 32, 4, 32, 32, 32, 32, 28, 2, 2]
    for sequence, text in zip(ids, texts, strict=True):
        assert_rows_match(rows[sequence], run_oracle(model, cfg, "nosa", text, range(len(text) - 3, len(text))))


def test_case_21_contexts_with_no_one_or_two_windows() -> None:
    """Windows of 32 tokens every 16: 31 tokens have none and attend to everything; 32 to 48 have one or two."""
    cfg = SparseConfig(block_size=16, topk=2, init_blocks=0, window_size=16, select_blocks=1)
    model = tiny_model(22)
    engine = Engine(model, cfg, poison=NAN)
    texts = [random_tokens(n + 2, n) for n in (31, 32, 40, 47, 48)]
    ids = [engine.add(t[:-2], 2, force_tokens=t[-2:]) for t in texts]
    rows = Watch(engine).run()
    for sequence, text in zip(ids, texts, strict=True):
        assert_rows_match(rows[sequence], run_oracle(model, cfg, "nosa", text))
    assert rows[ids[0]][0].selected[0] == [[0, 1]] * 2


@pytest.mark.parametrize("dim", [6, 80, 96])
def test_case_24_head_dims_that_are_no_power_of_two(dim: int) -> None:
    model = tiny_model(24, shape=ModelShape("dims", 1, 4, 2, dim, 24, 40, TINY.vocab_size, dtype="float64"))
    text = random_tokens(150, dim)
    engine = Engine(model, SMALL, poison=NAN)
    sequence = engine.add(text[:120], 30, force_tokens=text[120:])
    oracle = run_oracle(model, SMALL, "nosa", text, range(119, 149))
    assert_rows_match(Watch(engine).run()[sequence], oracle)


@pytest.mark.parametrize("select", [1, 2, 4])
def test_case_28_prefill_and_decode_follow_the_same_query_aware_budget(select: int) -> None:
    """Another share of query-aware picks reaches both paths: select - 1 of them, and the same ids at each position."""
    cfg = dataclasses.replace(SMALL, topk=8, select_blocks=select)
    model, text = tiny_model(28), random_tokens(200, 28)
    engine = Engine(model, cfg, poison=NAN)
    sequence = engine.add(text[:160], 40, force_tokens=text[160:])
    rows = Watch(engine).run()[sequence]
    assert engine.last_plan is not None
    origins = engine.last_plan.origins[1]
    assert (origins == QUERY_AWARE).sum(-1).tolist() == [[select - 1] * 2]
    prefill = prefill_logits(model, text, cfg, first=159, poison=NAN)
    for at, row in enumerate(rows):
        for layer, ids in enumerate(prefill.block_ids):
            assert [[j for j in head if j >= 0] for head in ids[at].tolist()] == row.selected[layer]
    assert_rows_match(rows, run_oracle(model, cfg, "nosa", text))
