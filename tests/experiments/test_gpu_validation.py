"""GPU validation as a dry run on the CPU: the same code, its files, and loads that equal what the engine counts."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.gpu_validation import DRY_RECIPE, main
from nosa_sys.experiments.gpu_validation_clocks import ClockLog, summary
from nosa_sys.experiments.gpu_validation_recipe import is_gpu_recipe, load_gpu_recipe
from nosa_sys.experiments.nosi_scale import TINY
from nosa_sys.models.random import random_model
from nosa_sys.profiling.engine_gpu_run import SCHEDULES, Length, measure_setting
from nosa_sys.profiling.engine_gpu_setting import GpuSetting
from nosa_sys.profiling.engine_gpu_store import load_runs, save_runs
from nosa_sys.report.validation_figures import validation_figures
from nosa_sys.simulator.hardware import load_hardware
from tests.traces.synthetic import make_trace

LENGTH = Length(windows=2, steps=3, warmup=1, part_steps=2)
DRY = ["--shape", "tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    out = tmp_path_factory.mktemp("dry")
    return out, main([*DRY, "--out", str(out), "--calibrate"])


def test_a_dry_run_measures_fits_predicts_and_reports(dry: tuple[Path, int]) -> None:
    out, status = dry
    document = json.loads((out / "validation.json").read_text())
    assert status == (0 if document["ok"] else 1)
    assert document["n_cells"] == len(document["cells"]) == len(pd.read_parquet(out / "cells.parquet"))
    assert document["n_failed"] == 0, [row["failed"] for row in document["cells"]]
    assert {row["schedule"] for row in document["cells"]} == set(SCHEDULES)
    for row in document["cells"]:
        assert row["predicted_h2d_bytes"] == row["measured_h2d_bytes"]
        assert row["measured_step_us"] > 0
        assert row["predicted_step_us"] > 0
    assert load_hardware(out / "profile").engine is not None
    assert len(validation_figures([document])) == 1


def test_a_refit_predicts_the_same(dry: tuple[Path, int], tmp_path: Path) -> None:
    out, status = dry
    assert main([*DRY, "--out", str(tmp_path), "--refit", str(out)]) == status
    first, again = (json.loads((d / "validation.json").read_text()) for d in (out, tmp_path))
    for name in ("errors", "median_part_errors", "orderings"):
        assert again[name] == first[name]


def test_a_calibrated_bundle_serves_without_calibration(dry: tuple[Path, int], tmp_path: Path) -> None:
    out, _ = dry
    main([*DRY, "--out", str(tmp_path), "--hardware", str(out / "profile")])
    document = json.loads((tmp_path / "validation.json").read_text())
    assert document["n_failed"] == 0
    assert document["n_calibration"] == 0
    assert not (tmp_path / "profile").exists()


def test_what_time_does_not_allow_stays_a_failed_row(tmp_path: Path, dry: tuple[Path, int]) -> None:
    given = ["--hardware", str(dry[0] / "profile"), "--max-minutes", "0.000001"]
    assert main([*DRY, "--out", str(tmp_path), *given]) == 1
    document = json.loads((tmp_path / "validation.json").read_text())
    assert document["n_failed"] == document["n_cells"] >= DRY_RECIPE.settings["tiny"]
    assert "time was up" in document["cells"][0]["failed"]


def test_measurements_that_cannot_be_fitted_are_kept(tmp_path: Path, dry: tuple[Path, int]) -> None:
    calibration, validation, points = load_runs(dry[0])
    (tmp_path / "few").mkdir()
    save_runs(tmp_path / "few", calibration[:2], validation, points)
    assert main([*DRY, "--out", str(tmp_path / "out"), "--refit", str(tmp_path / "few")]) == 1
    document = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert all("at least 6 settings" in row["failed"] for row in document["cells"])
    assert len(load_runs(tmp_path / "out")[1]) == len(validation)


def test_without_terms_or_a_gpu_nothing_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--out", str(tmp_path)]) == 2
    assert "engine.json" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--shape", "nosa-8b", "--out", str(tmp_path), "--calibrate"]) == 2
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "slots", "misses"), [("nosa", 8, 0.7), ("nosa", 10, 0.7), ("infllmv2", 13, 1.5), ("dma", 8, 0.0)]
)
def test_expected_loads_are_those_that_the_engine_counts(method: str, slots: int, misses: float) -> None:
    """Window by window and layer sums: slots = k, and a cache of more slots whose evictions must be told exactly."""
    setting = GpuSetting("tiny", method, 3, 300, 16, 8, slots, misses, reuse=0.8, kernel_stride=8)
    run = measure_setting(random_model(TINY.shape, 1), setting, LENGTH, arena=None, runner="kernels")
    assert run.failed is None
    for name in SCHEDULES:
        assert len(run.steps[name]) == LENGTH.windows * LENGTH.steps
        whole, first = run.warm(name)
        assert int(whole.misses.sum()) == run.n_misses[name]
        assert (first.misses <= whole.misses).all()
    assert (sum(run.n_misses.values()) > 0) == (misses > 0)


def test_recorded_sets_are_measured_like_drawn_ones(tmp_path: Path) -> None:
    n_steps = LENGTH.total(len(SCHEDULES))
    directory = make_trace(sequences=((60, n_steps - 4, 0),)).write(tmp_path / "t")
    setting = GpuSetting.of_trace("tiny", directory, batch=2, seed=0)
    assert LENGTH.within(setting.recorded_steps, len(SCHEDULES)).steps < LENGTH.steps  # too few records for all of it
    run = measure_setting(random_model(TINY.shape, 1), setting, LENGTH, arena=None, runner="kernels")
    assert run.failed is None
    assert int(run.warm("serial")[0].misses.sum()) == run.n_misses["serial"]


def test_a_setting_that_breaks_off_keeps_its_reason() -> None:
    setting = GpuSetting("tiny", "nosa", 2, 300, 16, 8, 4, 0.5, kernel_stride=8)  # fewer slots than k
    run = measure_setting(random_model(TINY.shape, 1), setting, LENGTH, arena=None, runner="kernels")
    assert run.failed is not None
    assert "slots" in run.failed


def test_clocks_are_medians_of_what_nvidia_smi_prints() -> None:
    found = summary(["1980, 3201, 600.5, 50", "1755, 3201, 699.5, 60", "[N/A], 3201, 1, 1", "1980, 3201, 650.0, 55"])
    assert found == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 650.0,
        "temperature_c": 55.0,
        "lowest_sm_mhz": 1755.0,
    }
    assert summary([]) == {}
    quiet = ClockLog(enabled=False)
    assert quiet.since(quiet.place()) == {}
    quiet.close()


def test_the_recipe_names_the_key_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("kind: gpu\nname: x\nsettings: {nosa-8b: 2}\nrange: {batch: [1, 2]}\n")
    assert is_gpu_recipe(path)
    with pytest.raises(ConfigError, match="ranges"):
        load_gpu_recipe(path)
    path.write_text("kind: gpu\nname: x\nsettings: {nosa-8b: 2}\nranges: {batch: [4, 2]}\n")
    with pytest.raises(ConfigError, match="low and a high"):
        load_gpu_recipe(path)
