"""Faults that show at full size only: default budgets and thousands of tokens, on a model of one tiny layer.

With one layer the oracle needs the decoded positions alone, so that each test stays short.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from nosa_sys.engine.engine import Engine
from nosa_sys.sparse_config import SparseConfig
from tests.engine.helpers import METHODS, NAN, TINY, Row, Watch, random_tokens, tiny_model
from tests.engine.oracle import OracleRun, run_oracle
from tests.engine.test_cases import shuffle_slots

ONE_LAYER = dataclasses.replace(TINY, n_layers=1)
DEFAULT = SparseConfig()  # 64 blocks of 64 tokens
NARROW = SparseConfig(topk=8, window_size=64, select_blocks=3)


def assert_positions_match(rows: list[Row], oracle: OracleRun, positions: list[int]) -> None:
    by_position = {row.position: row for row in rows}
    for position in positions:
        row = by_position[position]
        np.testing.assert_allclose(row.logits, oracle.logits[position], rtol=0, atol=1e-9)
        assert row.selected == oracle.selected[position], f"position {position}"


@pytest.mark.parametrize("fill", [NAN, 1e4])
def test_case_02_contexts_around_the_budget(fill: float) -> None:
    """Contexts of 63 to 4,098 tokens at k = 64 blocks of 64; the write-back is a whole block, at the step that
    fills it."""
    model = tiny_model(2, shape=ONE_LAYER)
    lengths = (63, 64, 65, 127, 128, 129, 4095, 4096, 4097)
    engine = Engine(model, DEFAULT, poison=fill, max_batch=len(lengths))
    texts = [random_tokens(n + 2, n) for n in lengths]
    ids = [engine.add(t[:-2], 2, force_tokens=t[-2:]) for t in texts]
    rows = Watch(engine).run()
    for sequence, text, n in zip(ids, texts, lengths, strict=True):
        assert [row.position + 1 for row in rows[sequence]] == [n, n + 1]
        positions = [n - 1, n]
        assert_positions_match(rows[sequence], run_oracle(model, DEFAULT, "nosa", text, positions), positions)
    assert engine.summary()["sparse_step_share"] == 3 / 18  # 4,097 twice and 4,098: 65 blocks
    n_filled = sum((n + i) % 64 == 0 for n in lengths for i in (0, 1))
    assert engine.summary()["d2h_bytes"] == n_filled * 2 * (2 * 64 * 8 * 8)


@pytest.mark.parametrize("method", METHODS)
def test_case_05_a_long_row_beside_short_ones(method: str) -> None:
    """Prompts of 32 to 3,000 tokens in one greedy batch: every token is the one that the oracle's row gives."""
    model = tiny_model(5, shape=ONE_LAYER)
    prompts = [random_tokens(n, n) for n in (33, 100, 3000, 32, 64, 65)]
    engine = Engine(model, NARROW, method=method, poison=NAN)
    ids = [engine.add(prompt, 32) for prompt in prompts]
    rows = Watch(engine).run()
    for sequence, prompt in zip(ids, prompts, strict=True):
        text = prompt + engine.outputs[sequence]
        positions = list(range(len(prompt) - 1, len(text) - 1, 3))
        oracle = run_oracle(model, NARROW, method, text, positions)
        assert_positions_match(rows[sequence], oracle, positions)
        assert all(text[p + 1] == oracle.logits[p].argmax() for p in positions)


def test_case_07_growth_past_8192_tokens() -> None:
    """Storage of every kind grows on the way past 8,192 tokens, in the middle of a generation."""
    model = tiny_model(7, shape=ONE_LAYER)
    text = random_tokens(8270, 7)
    engine = Engine(model, NARROW, poison=NAN)
    sequence = engine.add(text[:8170], 100, force_tokens=text[8170:])
    rows = Watch(engine).run()[sequence]
    positions = [8169, 8191, 8192, 8255, 8256, 8268]
    assert_positions_match(rows, run_oracle(model, NARROW, "nosa", text, positions), positions)
    assert engine.summary()["d2h_bytes"] == 2 * 2 * (2 * 64 * 8 * 8)  # blocks 127 and 128 are filled


@pytest.mark.parametrize(("prompt", "share"), [(8192, 1.0), (1000, 0.0)])
def test_case_10_the_default_budget_engages_beyond_4096_tokens(prompt: int, share: float) -> None:
    """8,192 tokens with a budget of 4,096: every step is sparse and blocks are loaded; 1,000 tokens: none, and said."""
    model, text = tiny_model(10, shape=ONE_LAYER), random_tokens(prompt + 8, 10)
    engine = Engine(model, DEFAULT, poison=NAN)
    sequence = engine.add(text[:prompt], 8, force_tokens=text[prompt:])
    rows = Watch(engine).run()[sequence]
    summary: dict[str, Any] = engine.summary()
    assert summary["sparse_step_share"] == share
    assert (summary["blocks_loaded_warm"] > 0) == bool(share)
    assert any("no step was sparse" in note for note in summary["notes"]) == (not share)
    positions = [prompt - 1, prompt + 6]
    assert_positions_match(rows, run_oracle(model, DEFAULT, "nosa", text, positions), positions)


def test_case_11_offload_on_and_off_give_the_same_logits() -> None:
    """A 3,000-token prompt with every block selected and no head: KV all on the device, or through the host pool."""
    model, text = tiny_model(11, shape=ONE_LAYER, head="none"), random_tokens(3020, 11)
    logits, loaded = [], []
    for method in ("full", "nosa"):
        engine = Engine(model, DEFAULT, method=method, poison=NAN)
        sequence = engine.add(text[:3000], 20, force_tokens=text[3000:])
        rows = Watch(engine).run()[sequence]
        positions = [2999, 3018]
        assert_positions_match(rows, run_oracle(model, DEFAULT, method, text, positions), positions)
        logits.append(np.stack([row.logits for row in rows]))
        loaded.append(engine.summary()["blocks_loaded"])
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-12)
    assert loaded == [0, 46 * 2]


@pytest.mark.parametrize(("slots", "shuffled"), [(8, False), (32, False), (32, True), (64, True)])
def test_case_11_slots_do_not_change_a_long_run(slots: int, shuffled: bool) -> None:
    """Pools of k and 4k slots and one that never evicts, in the order they fill or shuffled."""
    model, text = tiny_model(11, shape=ONE_LAYER), random_tokens(3030, 12)
    engine = Engine(model, NARROW, slots=slots, poison=NAN)
    sequence = engine.add(text[:3000], 30, force_tokens=text[3000:])
    watch = Watch(engine)
    watch.step()
    if shuffled:
        shuffle_slots(engine)
    rows = watch.run()[sequence]
    positions = list(range(2999, 3029, 4))
    assert_positions_match(rows, run_oracle(model, NARROW, "nosa", text, positions), positions)


@pytest.mark.parametrize("k", [3, 48, 64])
@pytest.mark.parametrize("n_blocks", [8, 100])
def test_case_24_any_budget_over_few_and_many_blocks(k: int, n_blocks: int) -> None:
    cfg = SparseConfig(topk=k, init_blocks=0, window_size=64, select_blocks=2)
    model, text = tiny_model(24, shape=ONE_LAYER), random_tokens(64 * n_blocks + 1, k)
    engine = Engine(model, cfg, poison=NAN)
    sequence = engine.add(text[:-1], 1, force_tokens=text[-1:])
    rows = Watch(engine).run()[sequence]
    position = 64 * n_blocks - 1
    assert_positions_match(rows, run_oracle(model, cfg, "nosa", text, [position]), [position])
    assert [len(head) for head in rows[0].selected[0]] == [min(k, n_blocks)] * 2
