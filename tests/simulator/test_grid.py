"""Outside what a profile was measured at: refused by axis, or labelled; and fetches by the size of their runs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nosa_sys import ModelShape, SparseConfig, simulate
from nosa_sys.errors import HardwareError
from nosa_sys.profiling.fits import fit_linear
from nosa_sys.simulator import hardware as hardware_module
from nosa_sys.simulator.bundle_tables import read_bundle_tables
from nosa_sys.simulator.engine_terms import EngineTerms, MatrixTimes, term_names
from nosa_sys.simulator.fetch_paths import LAYOUTS, FetchPaths, fragments
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.sources import SyntheticWorkload

H200 = Path(hardware_module.__file__).parent / "profiles" / "h200"
WORK = SyntheticWorkload(ModelShape("s", 2, 8, 2, 128, 256, 512, 1000), SparseConfig(), context=9000, steps=4)


@pytest.mark.parametrize(
    ("given", "axis", "limit"),
    [
        ({"batch": 257}, "batch 257", "256"),
        ({"context": 140_000}, "blocks of a sequence", "2,048"),
        ({"sparse": SparseConfig().with_block_size(16)}, "block_size 16 is below", "32"),
        ({"sparse": SparseConfig().with_block_size(256), "host_kv_dtype": "int4"}, "block_size 256 is above", "128"),
        ({"model_shape": ModelShape("m", 1, 64, 64, 128, 256, 512, 1000), "batch": 17}, "KV heads 1,088", "1,024"),
        ({"model_shape": ModelShape("w", 1, 16, 8, 128, 256, 512, 1000), "batch": 128,
          "sparse": SparseConfig().with_topk(128), "context": 20_000}, "bytes of one attention launch", "2,1"),
        ({"sparse": SparseConfig().with_block_size(32), "host_kv_dtype": "int4:16"}, None, None),
        ({"host_kv_dtype": "int4", "model_shape": ModelShape("n", 2, 8, 2, 64, 256, 512, 1000),
          "sparse": SparseConfig().with_block_size(32)}, "bytes of a block on the host 2,176 is below", "4,096"),
    ],
)  # fmt: skip
def test_each_axis_is_refused_with_its_range_and_labelled_on_request(given, axis, limit):
    priced = simulate(WORK, hardware="h200", extrapolate=True, **given)
    if axis is None:
        assert priced.extrapolated == []
        return
    with pytest.raises(HardwareError) as caught:
        simulate(WORK, hardware="h200", **given)
    for words in (axis, limit, "of h200", "nosa profile", "--extrapolate"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert any(axis in line for line in priced.extrapolated)
    assert priced.status == "projected"


def test_extrapolation_is_never_validated_and_inside_the_grid_changes_nothing(make_table, tiny_shape):
    validated = dataclasses.replace(load_hardware("h200"), status="validated")
    table = make_table(np.ones((2, 3, 2, 2), dtype=np.int64), n_selected=20)
    given = {"hardware": validated, "model_shape": tiny_shape, "schedule": "fused_kv"}
    assert simulate(table, **given).status == "validated"
    assert simulate(table, extrapolate=True, **given) == simulate(table, **given)
    long = make_table(np.ones((2, 3, 2, 2), dtype=np.int64), start=200_000, n_selected=20)
    assert simulate(long, extrapolate=True, **given).status == "projected"


def test_cold_steps_do_not_count(make_table, tiny_shape):
    misses = np.ones((1, 3, 2, 2), dtype=np.int64)
    misses[0, 0] = 10_000  # 655 MB in one fetch; the widest that was timed is 268 MB
    assert simulate(make_table(misses), hardware="h200", model_shape=tiny_shape).extrapolated == []
    with pytest.raises(HardwareError, match="bytes of one fetch"):
        simulate(make_table(misses, cold=False), hardware="h200", model_shape=tiny_shape)


def test_a_bundle_of_engine_runs_has_their_ranges(tmp_path):
    shutil.copytree(H200, tmp_path / "b")
    rows = {"batch": [1, 8], "context": [4000, 16000], "block_size": [64, 64], "topk": [32, 64]}
    pq.write_table(pa.table(rows), tmp_path / "b" / "engine_steps.parquet")
    profile = load_hardware(tmp_path / "b")
    assert {r.table for r in profile.tables.ranges} == {"engine_steps"}
    for given, axis in (
        ({"batch": 9}, "batch 9 is above 8"),
        ({"context": 16_500}, "context tokens of a sequence"),
        ({"sparse": SparseConfig().with_block_size(32)}, "block_size 32 is below 64"),
        ({"sparse": SparseConfig().with_topk(65)}, "tokens attended a head"),
    ):
        with pytest.raises(HardwareError, match=axis):
            simulate(WORK, hardware=profile, **given)
    assert simulate(WORK, hardware=profile, batch=8).extrapolated == []


def test_matrices_of_engine_terms_go_on_in_proportion_when_asked():
    numbers = dict.fromkeys(term_names(), 0.0) | {
        "duplex_factor": 1.0, "beside_compute_factor": 1.0, "compute_beside_copy_factor": 1.0,
        "attention_places": 264.0,
    }  # fmt: skip
    terms = EngineTerms(**numbers, matrices=(MatrixTimes(3, 2, (1, 8), (5.0, 12.0)),))
    profile = dataclasses.replace(load_hardware("h200"), engine=terms)
    rows = np.array([0, 1, 8, 16, 32])
    with pytest.raises(HardwareError, match="32 rows exceed the 8"):
        terms.matrices[0].at(rows)
    assert profile.extrapolating().engine.matrices[0].at(rows) == pytest.approx([0.0, 5.0, 12.0, 24.0, 48.0])
    assert load_hardware("h200-provisional").extrapolating() == load_hardware("h200-provisional")


def test_runs_of_the_base_size_are_priced_by_the_profiles_numbers_and_others_as_they_were_timed():
    """The fit of each run size is that of profiling.fits on the same rows."""
    profile = load_hardware("h200")
    runs = profile.tables.runs
    assert runs.relative(32768) == (0.0, 1.0)
    table = pq.read_table(H200 / "link_runs.parquet").to_pylist()
    for size in (4096, 16384, 262144):
        rows = [
            r for r in table if (r["direction"], r["path"], r["n_ctas"], r["run_bytes"]) == ("h2d", "uva", 16, size)
        ]
        fit = fit_linear(["bytes"], np.array([[r["bytes"]] for r in rows]), np.array([r["median_us"] for r in rows]))
        more_us, factor = runs.relative(size)
        assert profile.h2d_fixed_us + more_us == pytest.approx(fit.fixed_us, rel=1e-6)
        assert factor / profile.link_gbps == pytest.approx(1 / fit.gbps(), rel=1e-6)


def test_errors_of_the_models_come_with_a_prediction():
    found = {one["name"]: one for one in simulate(WORK, hardware="h200").model_errors}
    assert found["h2d_uva_32768"]["median"] == pytest.approx(0.0115, abs=1e-4)
    assert found["h2d_uva_32768"]["n_points"] == 5
    assert simulate(WORK, hardware="ideal", h2d_gbps=1.0).model_errors == []


def test_broken_tables_are_named(tmp_path):
    for name, text in (("fits.json", "[]"), ("fits.json", '{"a": {"n_points": 1}}'), ("gemm.parquet", "x")):
        directory = tmp_path / f"b{len(list(tmp_path.iterdir()))}"
        shutil.copytree(H200, directory)
        (directory / name).write_text(text)
        with pytest.raises(HardwareError, match=name):
            read_bundle_tables(directory)


def test_paths_at_measured_points_are_the_measured_times():
    table = pq.read_table(H200 / "link_runs.parquet").to_pylist()
    paths = FetchPaths("h200")
    for path in ("uva", "bulk", "dma"):
        keys = ("h2d", path, 16384, 512)
        rows = [r for r in table if tuple(r[k] for k in ("direction", "path", "run_bytes", "n_runs")) == keys]
        assert paths.time(path, 16384, 512).time_us == pytest.approx(min(r["median_us"] for r in rows))
    between = paths.time("dma", 24000, 1000).time_us
    assert paths.time("dma", 16384, 512).time_us < between < paths.time("dma", 32768, 4096).time_us
    for run_bytes, n_runs in ((256, 512), (16384, 10_000), (2**20, 1), (262144, 4096)):
        assert paths.time("uva", run_bytes, n_runs).time_us is None


def test_the_copy_engine_wins_where_it_was_faster_and_never_on_the_h200(tmp_path):
    paths = FetchPaths("h200")
    assert all(paths.crossover(size) is None for size in (4096, 32768, 262144))
    shutil.copytree(H200, tmp_path / "b")
    table = pq.read_table(H200 / "link_runs.parquet").to_pandas()
    fast = (table["path"] == "dma") & (table["run_bytes"] >= 65536) & (table["n_runs"] >= 64)
    table.loc[fast, "median_us"] = 1.0
    table.to_parquet(tmp_path / "b" / "link_runs.parquet")
    changed = FetchPaths(tmp_path / "b")
    assert (changed.crossover(65536), changed.crossover(32768)) == (64, None)
    assert changed.compare(65536, 64)[0].path == "dma"


def test_the_copy_engine_wins_from_where_it_keeps_winning(tmp_path):
    """A count at which it is faster by chance, with a slower one above it, is no crossover."""
    shutil.copytree(H200, tmp_path / "b")
    measured = pq.read_table(H200 / "link_runs.parquet").to_pandas()
    dma = (measured["path"] == "dma") & (measured["direction"] == "h2d") & (measured["run_bytes"] == 65536)
    counts = sorted(measured.loc[dma, "n_runs"].unique())
    for fast, expected in (
        (counts[:1], None),
        (counts[1:3], None),
        (counts[-2:], counts[-2]),
        ([counts[0], *counts[-1:]], counts[-1]),
        (counts, counts[0]),
    ):
        table = measured.copy()
        table.loc[dma & table["n_runs"].isin(fast), "median_us"] = 1e-3
        table.to_parquet(tmp_path / "b" / "link_runs.parquet")
        assert FetchPaths(tmp_path / "b").crossover(65536) == expected, fast


def test_the_cliff_of_small_fragments_is_visible():
    """The copy engine falls more than fivefold from 64 KiB runs to 8 KiB; the reference's 256-byte rows: not timed."""
    rows = {
        (r["block_size"], r["layout"]): r
        for r in fragments(FetchPaths("h200"), head_dim=128, kv_format="bf16", n_blocks=256)
    }
    assert len(rows) == 4 * len(LAYOUTS)
    assert rows[64, "K and V together"]["run_bytes"] == 32768
    assert (rows[64, "K and V apart"]["run_bytes"], rows[64, "K and V apart"]["n_runs"]) == (16384, 512)
    assert (rows[64, "a row a token"]["run_bytes"], rows[64, "a row a token"]["wins"]) == (256, None)
    assert rows[128, "K and V together"]["dma"] > 5 * rows[16, "K and V together"]["dma"]
    assert rows[16, "K and V together"]["uva"] > 0.85 * rows[128, "K and V together"]["uva"]


def test_bundles_without_link_tables_say_so():
    with pytest.raises(HardwareError, match="link_runs"):
        FetchPaths("ideal")
