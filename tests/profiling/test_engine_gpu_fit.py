"""Calibration on runs whose terms are known: they come back, and steps of settings that it never saw come out right."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nosa_sys.errors import HardwareError
from nosa_sys.experiments.gpu_validation_recipe import draw_settings, load_gpu_recipe
from nosa_sys.experiments.gpu_validation_rows import orderings, setting_rows, without_fetches
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling import engine_gpu_fit
from nosa_sys.profiling.engine_gpu import (
    CALIBRATION,
    MATRIX_ROWS,
    calibrated_keys,
    calibration_settings,
    matrix_times,
    write_engine_bundle,
)
from nosa_sys.profiling.engine_gpu_fit import calibrate, workload_of
from nosa_sys.profiling.engine_gpu_run import GpuRun, supports
from nosa_sys.profiling.engine_gpu_setting import GpuSetting
from nosa_sys.profiling.engine_gpu_store import load_runs, save_runs
from nosa_sys.simulator.engine_cost import EngineCostModel, head_matrix, layer_matrices
from nosa_sys.simulator.engine_terms import EngineTerms
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.traces.miss_table import LayerStepMisses

ROOT = Path(__file__).parents[2]
RECIPE = load_gpu_recipe(ROOT / "experiments" / "validate-h200.yaml")
SHAPES = {name: ModelShape.preset(name) for name in RECIPE.settings}
H200 = load_hardware("h200")
POINTS = [
    {"n": n, "k": k, "m": m, "median_us": 4.0 + n * k * 2 / 4.2e6 + m * n * k * 2 / 7e8 * (m > 48)}
    for shape in SHAPES.values()
    for n, k in (*layer_matrices(shape), head_matrix(shape))
    for m in MATRIX_ROWS
]
# About an H200.
TRUE = EngineTerms(
    append_us=3.0, select_fixed_us=14.0, select_score_us=7.0, select_us_per_head=0.01, select_us_per_block=0.008,
    select_us_per_compare=0.35, select_us_per_mb=0.31, attention_fixed_us=6.0, dense_attention_fixed_us=8.0,
    attention_us_per_cta=0.012, fork_us=5.0, attention_us_per_mb=0.22,
    attention_us_per_small_mb=0.2, merge_fixed_us=4.0, rest_fixed_us=9.0, rest_matrix_scale=1.03, rest_us_per_mb=0.1,
    step_fixed_us=60.0, step_head_scale=1.02, step_us_per_mb=0.5, fetch_alone_fixed_us=4.0, fetch_alone_layer_us=3.0,
    fetch_alone_us_per_mb=19.6, fetch_beside_fixed_us=5.0, fetch_beside_us_per_mb=19.8, duplex_factor=0.66,
    beside_compute_factor=0.97, compute_beside_copy_factor=0.91, attention_places=264.0,
    matrices=tuple(matrix_times(POINTS)),
)  # fmt: skip


def loads_of(
    setting: GpuSetting, shape: ModelShape, batch: int, steps: int, rng: np.random.Generator
) -> LayerStepMisses:
    heads, cells = shape.n_kv_heads * batch, (steps, shape.n_layers)
    return LayerStepMisses(
        steps=np.arange(steps, dtype=np.int32),
        n_sequences=np.full(steps, batch, dtype=np.int32),
        misses=rng.poisson(setting.misses * heads, cells),
        filled_blocks=np.zeros(cells, dtype=np.int64),
        attended_blocks=np.full(
            cells, heads * (setting.context // setting.block_size if setting.dense else setting.topk)
        ),
        context_tokens=batch * (setting.context + np.arange(steps)),
        cold=np.zeros(steps, dtype=np.bool_),
    )


def run_of(setting: GpuSetting, profile: HardwareProfile, seed: int, noise: float = 0.0) -> GpuRun:
    """What the engine would have shown if the simulator with these terms were the truth."""
    rng, shape, steps = np.random.default_rng(seed), SHAPES[setting.model_shape], 8
    half = loads_of(setting, shape, max(1, setting.batch // 2), steps, rng)
    rest = loads_of(setting, shape, setting.batch - setting.batch // 2, steps, rng)
    whole = half
    if setting.batch > 1:
        added = ("n_sequences", "misses", "filled_blocks", "attended_blocks", "context_tokens")
        whole = dataclasses.replace(half, **{n: getattr(half, n) + getattr(rest, n) for n in added})
    run = GpuRun(setting, loads=whole, first_half=half)

    def about(us: float) -> float:
        return float(us * (1 + noise * rng.standard_normal()))

    for name in supports(setting.method):
        run.steps[name] = list(range(steps))
        work = workload_of(run, shape, whole, half)
        full, alone = (price([(work, p)], get_schedule(name))[0] for p in (profile, without_fetches(profile)))
        run.window_us[name] = [about(full.step_time_p50_us) for _ in range(3)]
        run.compute_us[name] = about(alone.step_time_p50_us)
        run.n_misses[name] = int(whole.misses.sum())
        if name == "fused_kv":
            parts = {"select": alone.select_us, "attention": alone.attention_us}
            block_bytes = shape.kv_block_bytes(setting.block_size)
            model = EngineCostModel(
                profile, shape, setting.sparse, setting.method, block_bytes, block_bytes, slots=setting.slots
            )
            parts["other"] = float(model.step_costs(whole).gemm_us[0].sum())
            run.phase_us = {part: about(us / shape.n_layers) for part, us in parts.items()}
    if not setting.dense:
        mb = float(whole.misses.mean()) * shape.kv_block_bytes(setting.block_size) / 1e6
        assert profile.engine is not None
        fixed_us, _, us_per_mb = profile.engine.fetch(beside=True)
        run.fetch_us_mb = (about(fixed_us + mb * us_per_mb), mb)
    return run


@cache
def calibration_runs(noise: float) -> list[GpuRun]:
    profile = dataclasses.replace(H200, engine=TRUE)
    settings = [s for shape in SHAPES.values() for s in calibration_settings(shape, 0)]
    return [run_of(setting, profile, seed, noise) for seed, setting in enumerate(settings)]


def test_the_calibration_settings_give_known_terms_back() -> None:
    found, fits, rows = calibrate(calibration_runs(0.0), SHAPES, TRUE.matrices, H200)
    for name in ("attention_us_per_mb", "fetch_alone_us_per_mb", "rest_matrix_scale", "select_us_per_mb"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    for name in ("attention_fixed_us", "merge_fixed_us", "fetch_beside_fixed_us", "append_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert found.compute_beside_copy_factor == pytest.approx(TRUE.compute_beside_copy_factor, abs=0.02)
    assert len(rows) == sum(len(CALIBRATION[name]) for name in SHAPES)
    assert all(fit.leave_one_out for fit in fits.values())


def test_settings_that_calibration_never_saw_come_out_within_the_noise() -> None:
    """Calibrated on runs that are 1 % off at random, steps of the recipe's settings stay within 2 % in the median."""
    truth = dataclasses.replace(H200, engine=TRUE)
    found, _, _ = calibrate(calibration_runs(0.01), SHAPES, TRUE.matrices, H200)
    profile = dataclasses.replace(H200, engine=found)
    rows = []
    for name, shape in SHAPES.items():
        taken = [s.key() for s in calibration_settings(shape, 0)]
        drawn = draw_settings(RECIPE, shape, taken)
        assert len(drawn) == RECIPE.settings[name]
        assert not [s for s in drawn if s.key() in taken]
        for seed, setting in enumerate(drawn):
            rows += setting_rows(run_of(setting, truth, 100 + seed), shape, profile, taken)
    assert not [row["failed"] for row in rows if row["failed"]]
    errors = np.abs([row["error"] for row in rows])
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.05
    assert orderings(rows)["wrong"] == []


def test_the_recipe_draws_what_it_promises() -> None:
    settings = [s for shape in SHAPES.values() for s in draw_settings(RECIPE, shape, [])]
    assert settings == [s for shape in SHAPES.values() for s in draw_settings(RECIPE, shape, [])]
    cells = sum(len(supports(s.method)) for s in settings)
    assert 36 <= cells <= 48
    assert {s.method for s in settings} == {"nosa", "infllmv2", "dma", "full"}
    assert {s.block_size for s in settings} == {32, 64, 128}
    assert {s.topk * s.block_size for s in settings} == {1024, 2048, 4096, 8192}
    assert min(s.batch for s in settings) <= 4
    assert max(s.batch for s in settings) >= 64
    for setting in settings:
        shape = SHAPES[setting.model_shape]
        assert setting.required(shape, 400)["host_pool_bytes"] <= 40 * 2**30
        first, last = (-(-n // setting.block_size) for n in (setting.context, setting.context + 500))
        assert (first - 1) // 32 == (last - 1) // 32  # no second capture on the way


def test_a_bundle_remembers_its_settings_and_a_cell_it_used_validates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_gpu_fit, "_FIT_CALLS", 3)  # how well the terms fit is no subject here
    runs = calibration_runs(0.0)
    base = ROOT / "simulator" / "profiles" / "h200"
    profile = write_engine_bundle(tmp_path / "b", base, runs, SHAPES, POINTS, device="a test")
    taken = calibrated_keys(tmp_path / "b")
    assert taken == [run.setting.key() for run in runs]
    row = setting_rows(runs[0], SHAPES["nosa-8b"], profile, taken)[0]
    assert "calibration used this setting" in row["failed"]
    assert "engine_compute" in json.loads((tmp_path / "b" / "fits.json").read_text())
    assert len(pd.read_parquet(tmp_path / "b" / "engine_gemm.parquet")) == len(POINTS)


def test_bytes_that_differ_fail_the_cell() -> None:
    setting = dataclasses.replace(calibration_settings(SHAPES["nosa-8b"], 0)[1], batch=2)
    run = run_of(setting, dataclasses.replace(H200, engine=TRUE), 1)
    run.n_misses["serial"] += 1
    rows = setting_rows(run, SHAPES["nosa-8b"], dataclasses.replace(H200, engine=TRUE), [])
    assert [row["schedule"] for row in rows if row["failed"]] == ["serial"]
    assert all(row["error"] == pytest.approx(0, abs=1e-9) for row in rows)


def test_runs_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    runs = calibration_runs(0.0)[:2]
    save_runs(tmp_path, runs[:1], runs[1:], POINTS)
    calibration, validation, points = load_runs(tmp_path)
    for saved, run in zip([*calibration, *validation], runs, strict=True):
        assert (saved.setting, saved.window_us, saved.fetch_us_mb) == (run.setting, run.window_us, run.fetch_us_mb)
        for name, values in vars(run.loads).items():
            assert np.array_equal(getattr(saved.loads, name), values)
    assert points == POINTS
    with pytest.raises(HardwareError, match=r"runs\.json\.gz is missing"):
        load_runs(tmp_path / "nothing")


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(HardwareError, match="needs at least 6 settings"):
        calibrate(calibration_runs(0.0)[:3], SHAPES, TRUE.matrices, H200)
