"""Rates by their stated definition, from given clock readings."""

from __future__ import annotations

import time

import pytest

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.metrics import RunMetrics, StepCount
from tests.engine.helpers import SMALL, random_tokens, tiny_model


def test_case_26_rates_of_ten_tokens_in_ninety_ms() -> None:
    """Tokens at 0, 10, ..., 90 ms in a batch of 4: 100 tok/s each, not 111.1; 400 together; the cold step apart."""
    metrics = RunMetrics(block_bytes=32768)
    for sequence in range(4):
        metrics.add(sequence, 100, -0.5)
    for at in range(10):
        cold = 4 if at == 0 else 0
        metrics.step(StepCount(4, cold, 4, 64, 3, 48 if cold else 0, 3 if cold else 0, 0), 0.25 if cold else 0.010)
        for sequence in range(4):
            metrics.token(sequence, at * 0.010)
    summary = metrics.summary()
    assert summary["tokens_per_s_per_sequence"] == pytest.approx(100)
    assert summary["tokens_per_s"] == pytest.approx(400)
    assert (summary["cold_step_ms"], summary["warm_step_ms"]) == (pytest.approx(250), pytest.approx(10))
    assert summary["sequences"][0]["ttft_ms"] == pytest.approx(500)
    assert summary["sequences"][3]["tpot_ms"] == pytest.approx(10)
    assert (summary["blocks_loaded"], summary["h2d_bytes"], summary["h2d_bytes_cold"]) == (30, 983040, 98304)


def test_a_run_of_one_token_has_no_rate() -> None:
    engine = Engine(tiny_model(), SMALL)
    engine.add(random_tokens(5, 0), 1)
    engine.run()
    summary = engine.summary()
    assert summary["tokens_per_s"] is summary["tokens_per_s_per_sequence"] is None
    assert summary["sequences"][0]["ttft_ms"] > 0


def test_case_26_both_rates_count_what_happens_between_steps() -> None:
    """A caller that takes its time between steps slows the aggregate as much as the per-sequence rate."""
    engine = Engine(tiny_model(), SMALL)
    for n_tokens in (3, 40):
        engine.add(random_tokens(n_tokens, n_tokens), max_new_tokens=6)
    while not engine.idle:
        engine.step()
        time.sleep(0.02)
    summary = engine.summary()
    assert summary["tokens_per_s_per_sequence"] < 50
    assert summary["tokens_per_s"] == pytest.approx(2 * summary["tokens_per_s_per_sequence"], rel=0.01)
