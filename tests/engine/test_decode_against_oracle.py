"""Decode and prefill of a small fp64 model against the plain-loop oracle, at every position."""

from __future__ import annotations

import pytest

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.prefill import prefill_logits
from tests.engine.checks import assert_loads_bounded, assert_misses_match, assert_rows_match
from tests.engine.helpers import METHODS, NAN, SMALL, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle

LENGTHS = (1, 31, 32, 63, 64, 65, 127)
NEW = 56  # three block borders at least


@pytest.mark.parametrize("method", METHODS)
def test_decode_equals_oracle_from_every_prompt_length(method: str) -> None:
    """Seven prompts of different lengths in one batch, each row against its own full-context oracle."""
    model = tiny_model(3)
    engine = Engine(model, SMALL, method=method, prefill_chunk=24, poison=NAN)
    texts = [random_tokens(length + NEW, seed=length) for length in LENGTHS]
    ids = [
        engine.add(text[:length], NEW, force_tokens=text[length:]) for text, length in zip(texts, LENGTHS, strict=True)
    ]
    rows = Watch(engine).run()
    total = 0
    for sequence, text in zip(ids, texts, strict=True):
        oracle = run_oracle(model, SMALL, method, text)
        assert len(rows[sequence]) == NEW
        assert_rows_match(rows[sequence], oracle)
        total += assert_misses_match(rows[sequence], oracle, engine)
        assert_loads_bounded(rows[sequence], engine)
    assert engine.summary()["blocks_loaded"] == total
    assert engine.summary()["h2d_bytes"] == total * 2 * 16 * 8 * 8


@pytest.mark.parametrize(("slots", "policy"), [(5, "lru"), (7, "lru"), (7, "beta"), (9, "beta"), (20, "lru")])
@pytest.mark.parametrize("method", ["nosa", "infllmv2"])
def test_hot_slots_against_dictionary_model(method: str, slots: int, policy: str) -> None:
    model = tiny_model(4)
    engine = Engine(model, SMALL, method=method, slots=slots, policy=policy, prefill_chunk=50, poison=NAN)
    texts = [random_tokens(n + 150, seed=n) for n in (20, 81)]
    ids = [engine.add(t[:-150], 150, force_tokens=t[-150:]) for t in texts]
    rows = Watch(engine).run()
    for sequence, text in zip(ids, texts, strict=True):
        oracle = run_oracle(model, SMALL, method, text)
        assert_rows_match(rows[sequence], oracle)
        assert_misses_match(rows[sequence], oracle, engine)


@pytest.mark.parametrize("head", ["dma", "none"])
def test_other_heads(head: str) -> None:
    model = tiny_model(5, head=head)
    text = random_tokens(200, 1)
    engine = Engine(model, SMALL, poison=NAN)
    sequence = engine.add(text[:100], 100, force_tokens=text[100:])
    assert_rows_match(Watch(engine).run()[sequence], run_oracle(model, SMALL, "nosa", text))


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("method", METHODS)
def test_prefill_equals_oracle(method: str, chunk: int) -> None:
    model = tiny_model(6)
    tokens = random_tokens(180, 2)
    first = 0 if chunk == 64 else 95
    output = prefill_logits(model, tokens, SMALL, method=method, first=first, chunk=chunk, poison=NAN)
    oracle = run_oracle(model, SMALL, method, tokens)
    assert output.logits.numpy() == pytest.approx(oracle.logits[first:], rel=0, abs=1e-9)
    for layer, ids in enumerate(output.block_ids):
        for at, heads in enumerate(ids.tolist()):
            assert [[j for j in head if j >= 0] for head in heads] == oracle.selected[first + at][layer]
