"""What the results page computes beside the simulator: even workloads, limits, rates of fragments, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from nosa_sys.model_shape import ModelShape
from nosa_sys.report.results_page.files import ResultRows
from nosa_sys.report.results_page.fragments import TOKEN_BYTES, fastest_runs, token_gbps
from nosa_sys.report.results_page.link_limit import enough_until, measured_limit, natural_misses
from nosa_sys.report.results_page.pricing import AUTO, Situation, best_of, outside_note, price_all
from nosa_sys.simulator.bundle_tables import ROWS, AxisRange
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.sparse_config import SparseConfig

SHAPE = ModelShape.preset("nosa-8b")  # 32 layers, 2 KV heads
H200 = load_hardware("h200")
BASE = Situation(SHAPE, SparseConfig(), "nosa", batch=48, context=16384, misses=3.9)


def test_misses_are_spread_evenly_and_none_is_lost() -> None:
    """3.9 x 96 heads = 374.4 a layer: every layer within one block of it, the step within half a block of the sum."""
    loads = BASE.workload().loads
    assert loads.misses.shape == (1, 32)
    assert set(loads.misses[0]) == {374, 375}
    assert abs(int(loads.misses.sum()) - 374.4 * 32) <= 0.5
    assert set(loads.attended_blocks[0]) == {96 * 64}
    assert list(loads.context_tokens) == [48 * 16384]
    assert set(BASE.workload().first_half.misses[0]) == {187, 188}


def test_dense_attention_and_resident_kv_move_nothing() -> None:
    full = dataclasses.replace(BASE, method="full", misses=0.0, offload=False).workload()
    assert set(full.loads.attended_blocks[0]) == {96 * 256}
    assert full.loads.misses.sum() == full.loads.filled_blocks.sum() == 0
    resident = dataclasses.replace(BASE, method="infllmv2", offload=False).workload()
    assert resident.loads.misses.sum() == 0
    assert set(resident.loads.attended_blocks[0]) == {96 * 64}


def test_resident_kv_is_limited_by_the_device_and_offloaded_kv_by_the_host() -> None:
    """16K tokens are 512 MiB: 300 sequences exceed 140 GiB of device memory, and the host's 126 GiB."""
    small = dataclasses.replace(H200, host_memory_bytes=2.0**30)
    resident = dataclasses.replace(BASE, method="infllmv2", offload=False, batch=16)
    assert resident.fits(small)
    assert not dataclasses.replace(resident, batch=300).fits(H200)
    assert BASE.fits(H200)
    assert not BASE.fits(small)
    fits, too_large = best_of([BASE, BASE], [H200, small])
    assert fits.tokens_per_s is not None
    assert too_large.tokens_per_s is None


def test_the_best_schedule_is_the_fastest_priced_alone() -> None:
    situations = [BASE, dataclasses.replace(BASE, misses=0.2, batch=8)]
    for situation, found in zip(situations, best_of(situations, [H200, H200]), strict=True):
        alone = [price([(situation.workload(), H200)], get_schedule(name))[0].step_time_us for name in AUTO]
        assert found.prediction.step_time_us == pytest.approx(min(alone))
        assert found.tokens_per_s == pytest.approx(situation.batch / min(alone) * 1e6)


def test_points_beyond_what_was_measured_are_counted_and_named() -> None:
    """A profile measured up to batch 8: 48 is beyond it. A point that does not fit counts for nothing."""
    tables = dataclasses.replace(H200.tables, ranges=(AxisRange(ROWS, 1.0, 8.0, "gemm"),))
    profile = dataclasses.replace(H200, tables=tables)
    few, none_fits = dataclasses.replace(BASE, batch=8), dataclasses.replace(BASE, batch=4000)
    note = outside_note(best_of([BASE, few, none_fits], [profile] * 3))
    assert note.startswith("1 of 2 simulated points")
    assert "48 is above 8" in note
    assert outside_note(best_of([few], [profile])) == ""


def test_the_limit_of_the_link_halves_with_it() -> None:
    """Where copies take as long as compute: half the bandwidth, half the misses (the fixed part of launches aside)."""
    free = dataclasses.replace(H200, h2d_fixed_us=0.0, d2h_fixed_us=0.0, d2h_gbps=float("inf"))
    whole, half = enough_until(BASE, free), enough_until(BASE, free.with_h2d_gbps(free.link_gbps / 2))
    assert whole is not None
    assert half == pytest.approx(whole / 2, rel=1e-6)
    step = price_all([dataclasses.replace(BASE, misses=0.0)], [free], "fused_kv")[0]
    bytes_a_miss = 48 * 2 * 32 * 32768
    assert whole == pytest.approx(step.step_time_us / (bytes_a_miss / free.link_gbps / 1e3), rel=1e-3)


def test_the_measured_limit_is_interpolated_between_two_rows() -> None:
    def row(misses: float, transfer_ms: float, schedule: str = "fused_kv") -> dict[str, object]:
        return {"schedule": schedule, "misses_per_head": misses, "compute_ms": 10.0, "transfer_ms": transfer_ms}

    rows = [row(8.0, 16.0), row(2.0, 4.0), row(3.0, 999.0, "two_batch")]
    assert measured_limit(rows) == pytest.approx(5.0)
    assert measured_limit(rows[:1]) is None
    assert measured_limit([row(2.0, 4.0), row(3.0, 5.0)]) is None


def test_natural_misses_are_those_at_slots_of_k_scaled_to_another_k() -> None:
    rows = [
        {"method": "nosa", "misses_per_head": 2.0, "topk": 32, "slots_over_k": 1.0},
        {"method": "nosa", "misses_per_head": 0.3, "topk": 32, "slots_over_k": 1.25},
        {"method": "infllmv2", "misses_per_head": None, "topk": 32, "slots_over_k": 1.0},
    ]
    assert natural_misses(ResultRows("x", rows, {})) == {"nosa": pytest.approx(4.0)}


def test_rates_of_runs_are_the_fastest_points_and_a_token_costs_what_the_smallest_run_does() -> None:
    """4096 runs of 4 KiB in 8,192 us are 2 us a run and 2.048 GB/s; 256 B in 2 us are 0.128."""
    link = [
        {"direction": "h2d", "path": "dma", "run_bytes": 4096, "n_runs": 4096, "median_us": 8192.0},
        {"direction": "h2d", "path": "dma", "run_bytes": 4096, "n_runs": 1, "median_us": 80.0},
        {"direction": "h2d", "path": "dma", "run_bytes": 8192, "n_runs": 1000, "median_us": 2500.0},
        {"direction": "d2h", "path": "uva", "run_bytes": 4096, "n_runs": 4096, "median_us": 1.0},
    ]
    bench = [{"case": "64x32KiB", "naive_us": 640.0}, {"case": "0x32KiB", "naive_us": 1.0}, {"case": "b64"}]
    runs = fastest_runs(ResultRows("l", link, {}), ResultRows("b", bench, {}))
    assert [(r.path, r.run_bytes) for r in runs] == [("calls", 32768), ("dma", 4096), ("dma", 8192)]
    assert [r.gbps for r in runs] == pytest.approx([3.2768, 2.048, 3.2768])
    assert TOKEN_BYTES == 256
    assert token_gbps(runs, "dma") == pytest.approx(0.128)
    assert token_gbps(runs, "uva") is None
