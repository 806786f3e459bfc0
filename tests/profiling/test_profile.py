"""The profile verb on a CPU: a bundle that the simulator loads, every table there, nothing half-written."""

import json
from pathlib import Path

import pandas as pd
import pytest

from nosa_sys.cli.app import run
from nosa_sys.errors import HardwareError
from nosa_sys.profiling.bundle import write_bundle
from nosa_sys.profiling.choices import fetch_choices
from nosa_sys.profiling.kernel_grid import grids
from nosa_sys.simulator.hardware import load_hardware

TINY_CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def test_cpu_profile_makes_a_bundle(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    out = tmp_path / "bundle"
    assert run(["profile", "--device", "cpu", "--out", str(out), "--model-shape", str(config)]) == 0
    profile = load_hardware(out)
    assert profile.status == "measured"
    assert profile.name == "bundle"
    assert profile.link_gbps > 0
    for table in ("link_runs", "sparse_decode_attention", "selection", "gemm", "elementwise"):
        rows = pd.read_parquet(out / f"{table}.parquet")
        assert len(rows)
        assert (rows["p10_us"] <= rows["median_us"]).all()
        assert (rows["median_us"] <= rows["p90_us"]).all()
    runs = pd.read_parquet(out / "link_runs.parquet")
    assert (runs["bytes"] == runs["run_bytes"] * runs["n_runs"]).all()
    assert runs["run_bytes"].unique().tolist() == [2 * 64 * 64 * 4]
    alone = {"h2d", "d2h", "sparse_decode_attention", "selection"}
    inside = {"engine_select", "engine_attention", "engine_matrices"}
    assert set(json.loads((out / "fits.json").read_text())) == alone | inside
    steps = pd.read_parquet(out / "engine_steps.parquet")
    assert (steps["n_layers"] == TINY_CONFIG["num_hidden_layers"]).all()
    assert (steps["step_us"] <= steps["slowest_run_us"]).all()
    overhead = pd.read_parquet(out / "engine_overhead.parquet").iloc[0]
    assert profile.host_per_layer_us == pytest.approx(overhead["other_us"] + overhead["no_miss_us"])
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "arguments",
    [["--device", "tpu"], ["--model-shape", "no-such-model"], ["--device", "cpu", "--model-shape", "nosa-1b"] * 2],
)
def test_user_errors_write_nothing(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = arguments if "--device" in arguments else [*arguments, "--device", "cpu"]
    assert run(["profile", "--out", str(tmp_path / "bundle"), *arguments]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_the_shipped_profile_comes_from_the_tables_beside_it() -> None:
    pytest.importorskip("triton", reason="the kernels' defaults stand in a module that needs triton")
    from nosa_sys.kernels.block_fetch.triton import DEFAULT_CTAS
    from nosa_sys.profiling.cuda_profile import fit_tables, simulator_numbers
    from nosa_sys.simulator import hardware

    bundle = Path(hardware.__file__).parent / "profiles" / "h200"
    tables = {path.stem: pd.read_parquet(path).to_dict("records") for path in bundle.glob("*.parquet")}
    fits = fit_tables(tables)
    profile = load_hardware("h200")
    memory = {key: getattr(profile, key) for key in ("gpu_memory_bytes", "host_memory_bytes")}
    for key, (value, source) in simulator_numbers(tables, fits, **memory).items():
        assert getattr(profile, key) == pytest.approx(value, rel=1e-6), key
        assert profile.sources[key] == source
    choices = fetch_choices(tables["link_runs"], tables["link_contention"])
    assert json.loads((bundle / "choices.json").read_text()) == choices
    assert choices["alone"] == {"path": "uva", "n_ctas": DEFAULT_CTAS}
    saved = json.loads((bundle / "fits.json").read_text())
    assert set(saved) == set(fits)
    shapes = {row["model_shape"] for row in tables["gemm"]} - {""}
    assert shapes == {"smollm2-135m", "nosa-1b", "nosa-3b", "nosa-8b", "llama-3-8b"}


def test_choices_follow_the_measured_points() -> None:
    """4 CTAs are too slow for many runs, 8 and 16 are not, 16 is the faster for few; DMA wins from 512 large runs."""

    def point(path: str, n_ctas: int, run_bytes: int, n_runs: int, median_us: float) -> dict[str, object]:
        names = ("direction", "path", "n_ctas", "run_bytes", "n_runs", "median_us")
        return dict(zip(names, ("h2d", path, n_ctas, run_bytes, n_runs, median_us), strict=True))

    runs = [point("uva", n, 32768, 4096, t) for n, t in ((4, 3000.0), (8, 2610.0), (16, 2620.0))]
    runs += [point("uva", n, 32768, 64, t) for n, t in ((4, 40.0), (8, 45.0), (16, 44.0))]
    runs += [point("dma", 0, 32768, n, t) for n, t in ((64, 100.0), (4096, 9000.0))]
    runs += [point("uva", 8, 2**20, n, t) for n, t in ((64, 1400.0), (512, 11000.0))]
    runs += [point("dma", 0, 2**20, n, t) for n, t in ((64, 1500.0), (512, 10000.0))]
    contention = [
        {"compute": "gemm", "path": path, "n_ctas": n, "both_us": t}
        for path, n, t in (("uva", 8, 1350.0), ("bulk", 3, 1340.0), ("uva", 132, 2600.0))
    ]
    assert fetch_choices(runs, contention) == {
        "alone": {"path": "uva", "n_ctas": 16},
        "beside_gemm": {"path": "bulk", "n_ctas": 3},
        "dma_crossover": {"32768": None, "1048576": 512},
    }


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="fetch has no measured points"):
        write_bundle(
            tmp_path, name="x", device="x", status="measured", notes="", tables={"fetch": []}, fits={}, models={},
            environment={},
        )  # fmt: skip


def test_every_grid_names_a_benchmark_case_that_exists() -> None:
    from nosa_sys.kernels.registry import load_operation

    for grid in grids():
        operation = next(o for o in load_operation(grid.module) if o.name == grid.operation)
        template = [c for c in operation.cases() if c.name == grid.template and "bench" in c.uses]
        assert len(template) == 1
        assert grid.points
        for point in grid.points:
            assert set(point) <= set(template[0].params)
