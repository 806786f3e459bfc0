"""A bench row's figures from given clock readings and counts, and from a real tiny engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nosa_sys.engine.injection import synthetic_injection
from nosa_sys.errors import ConfigError
from nosa_sys.experiments.decode_bench import measure, places, segment_figures, split_transfer
from nosa_sys.experiments.decode_bench_rates import Rates, step_bytes
from nosa_sys.experiments.decode_bench_request import bench_slots
from nosa_sys.experiments.decode_bench_run import (
    DecodeCell,
    Segment,
    StepLog,
    Workbench,
    distinct_prompts,
    n_table_steps,
)
from nosa_sys.experiments.nosi_scale import TINY
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.random import random_model
from nosa_sys.sparse_config import SparseConfig


def bench(rates: Rates | None = None) -> Workbench:
    return Workbench(random_model(TINY.shape, 1), rates or Rates())


def injected(method: str, segment: Segment, misses: float, batch: int = 3) -> DecodeCell:
    shape = TINY.shape
    injection = synthetic_injection(
        TINY.sparse,
        method,
        shape.n_layers,
        shape.n_kv_heads,
        [200 + row for row in range(batch)],
        n_table_steps([segment]),
        misses,
    )
    return DecodeCell(TINY.sparse, method, slots=TINY.sparse.topk, runner="kernels", injection=injection)


# ---- settings
def test_slots_are_those_that_the_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with graphs 1.25 k, elsewhere k; none where all KV stays on the device."""
    for runner, method, offload, expected in (
        (None, "nosa", None, TINY.sparse.topk),
        ("eager", "nosa", True, TINY.sparse.topk),
        (None, "full", None, None),
        (None, "nosa", False, None),
    ):
        assert bench_slots(None, TINY.sparse, method, offload=offload, runner=runner, device="cpu") == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    k = SparseConfig().topk
    for runner, expected in ((None, 80), ("graph", 80), ("kernels", k), ("eager", k)):
        assert bench_slots(None, SparseConfig(), "nosa", offload=None, runner=runner, device="cuda") == expected
    with pytest.raises(ConfigError, match="sees 1 GPUs"):
        bench_slots(None, SparseConfig(), "nosa", offload=None, runner=None, device="cuda:1")


# ---- arithmetic
def test_case_26_rates_of_ten_steps_of_ten_ms() -> None:
    """Steps end every 10 ms after a cold step of 250 ms, batch 4: 100 tok/s each, 400 together."""
    cell = DecodeCell(TINY.sparse, contexts=(200,) * 4, slots=TINY.sparse.topk)
    log = StepLog(
        end_s=[5.0, *(5.25 + 0.01 * i for i in range(1, 14))],
        n_misses=[99, *[6] * 13],
        prefetch_loads=[0] * 14,
        wasted_loads=[0] * 14,
        n_filled=[0] * 14,
        phase_us=[{}] * 14,
        cold_ms=250.0,
        summary={"sequences": [], "prefill_s": 0.0, "schedule_in_use": "fused_kv"},
    )
    row = segment_figures(bench(Rates(1000.0, 50.0)), cell, log, first=4, n=10)
    assert row["tokens_per_s_per_sequence"] == pytest.approx(100)
    assert row["tokens_per_s"] == pytest.approx(400)
    assert (row["step_ms_median"], row["cold_step_ms"]) == (pytest.approx(10), 250.0)
    block_bytes = 2 * 16 * 16 * 4
    assert row["h2d_bytes_per_step"] == 6 * block_bytes
    assert row["misses_per_head"] == pytest.approx(6 / (2 * 2 * 4))
    assert row["link_utilisation"] == pytest.approx(6 * block_bytes / 0.01 / 50e9)
    assert row["floor_ms"] == pytest.approx(row["needed_bytes_per_step"] / 1e12 * 1e3)
    assert row["hbm_utilisation"] == pytest.approx(row["floor_ms"] / 10)


def test_a_full_attention_step_reads_weights_and_all_kv() -> None:
    shape = ModelShape.preset("nosa-8b")
    found = step_bytes(shape, SparseConfig(), "full", [16384] * 16)
    assert found == shape.weight_bytes - 73448 * 4096 * 2 + 16 * 16384 * 32768
    sparse = step_bytes(shape, SparseConfig(), "infllmv2", [16384])
    assert sparse == shape.weight_bytes - 73448 * 4096 * 2 + 64 * (64 * 32768 + 1023 * 128 * 4)


def test_segments_follow_the_cold_step() -> None:
    first, second = Segment("a", 3, 10), Segment("b", 2, 5)
    assert places([first, second]) == [(first, 4), (second, 16)]


@pytest.mark.parametrize(("step", "exposed", "hidden"), [(10.0, 2.0, 4.0), (14.0, 6.0, 0.0), (7.9, 0.0, 6.0)])
def test_transfer_is_exposed_or_hidden(step: float, exposed: float, hidden: float) -> None:
    row = {"step_ms_median": step, "compute_ms": 8.0, "transfer_ms": 6.0, "offload": True}
    split_transfer(row)
    assert (row["h2d_exposed_ms"], row["h2d_hidden_ms"]) == (pytest.approx(exposed), pytest.approx(hidden))


def test_prompts_are_distinct_windows() -> None:
    prompts = distinct_prompts(range(100), 5, 60)
    assert [p[0] for p in prompts] == [0, 10, 20, 30, 40]
    assert {len(p) for p in prompts} == {60}
    with pytest.raises(ConfigError, match="at least 64 tokens"):
        distinct_prompts(range(63), 5, 60)


# ---- a real engine
@pytest.mark.parametrize(("method", "misses"), [("nosa", 2.0), ("infllmv2", 3.0)])
def test_an_injected_run_misses_what_was_injected(method: str, misses: float) -> None:
    segment = Segment("", 2, 6)
    cell = injected(method, segment, misses)
    (row,) = measure(bench(), cell, [segment])
    assert row["skipped"] is None
    assert row["status"].startswith("injected: synthetic sets")
    assert row["misses_per_head"] == pytest.approx(misses)
    assert row["gamma"] == pytest.approx(1 - misses / TINY.sparse.topk, abs=0.03)
    assert row["h2d_bytes_per_step"] == pytest.approx(misses * 3 * 4 * 2 * 16 * 16 * 4)
    assert row["compute_ms"] > 0
    assert row["h2d_exposed_ms"] >= 0


def test_full_attention_needs_no_sets_and_moves_nothing() -> None:
    cell = DecodeCell(TINY.sparse, "full", runner="kernels", contexts=(100, 90))
    (row,) = measure(bench(), cell, [Segment("", 1, 3)])
    assert row["skipped"] is None
    assert (row["h2d_bytes_per_step"], row["h2d_exposed_ms"], row["equivalent_batch"]) == (0, 0, 2)


def test_prompts_are_prefilled_and_timed_apart() -> None:
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(p) for p in rng.integers(0, 100, (2, 150)).tolist())
    cell = DecodeCell(TINY.sparse, slots=TINY.sparse.topk, runner="kernels", prompts=prompts)
    (row,) = measure(bench(), cell, [Segment("", 1, 3)], parts=False)
    assert row["status"] == "measured"
    assert row["prefill_s"] > 0
    assert row["ttft_ms_mean"] > row["cold_step_ms"]


def test_what_does_not_fit_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Workbench, "run", out_of_memory)
    segment = Segment("", 1, 3)
    (row,) = measure(bench(), injected("nosa", segment, 1.0), [segment])
    assert "out of memory" in row["skipped"]
    assert row["batch"] == 3
