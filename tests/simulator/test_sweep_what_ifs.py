"""Sobol recipes, links and host formats as axes, rows outside the measured grid."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.simulator import link as link_module
from nosa_sys.simulator import sweep as sweep_module
from nosa_sys.simulator.recipe import parse_recipe
from nosa_sys.simulator.simulate import simulate
from nosa_sys.simulator.sweep import sweep
from nosa_sys.simulator.sweep_plan import base_workload
from tests.simulator.sweep_recipes import changed, rows_of


def test_sobol_points_use_every_value_alike_and_fill_their_ranges():
    axes = {"topk": [16, 24], "slots": [1.0, 1.25, 1.5, 2.0]}
    ranges = {"batch": {"low": 1, "high": 64, "log": True}, "h2d_gbps": {"low": 10, "high": 60}}
    recipe = parse_recipe(changed(axes=axes, sobol={"points": 64, **ranges}))
    rows = list(recipe.configurations())
    assert len(rows) == recipe.n_configurations == 64
    assert [*rows[0]] == recipe.names() == ["topk", "slots", "batch", "h2d_gbps"]
    assert Counter(r["topk"] for r in rows) == {16: 32, 24: 32}
    assert Counter(r["slots"] for r in rows) == dict.fromkeys(axes["slots"], 16)
    assert all(isinstance(r["batch"], int) and 1 <= r["batch"] <= 64 for r in rows)
    octaves = Counter(min(5, int(math.log2(r["batch"]))) for r in rows)
    assert len(octaves) == 6
    assert np.histogram([r["h2d_gbps"] for r in rows], bins=16, range=(10, 60))[0].tolist() == [4] * 16
    assert rows == list(recipe.configurations())
    assert rows != list(recipe.model_copy(update={"seed": 1}).configurations())
    assert rows[:40] == list(parse_recipe(changed(axes=axes, sobol={"points": 40, **ranges})).configurations())


def test_a_sobol_recipe_needs_no_axis_and_its_rows_equal_simulate(tmp_path):
    recipe = parse_recipe(changed(axes=None, sobol={"points": 5, "batch": {"low": 1, "high": 9}}))
    sweep(recipe, tmp_path, workers=1)
    for row in rows_of(tmp_path):
        expected = simulate(base_workload(recipe), hardware="h200-provisional", batch=row["batch"])
        assert row["step_time_us"] == pytest.approx(expected.step_time_us, rel=1e-12)


def test_links_and_host_formats_are_axes(tmp_path):
    axes = {"link": ["own", "pcie4-x16"], "host_kv_dtype": ["bf16", "int4"], "batch": [3]}
    recipe = parse_recipe(changed(axes=axes, dequant_fixed_us=1.0))
    sweep(recipe, tmp_path, workers=1)
    rows = rows_of(tmp_path)
    assert [(r["link"], r["host_kv_dtype"], r["block_bytes"]) for r in rows] == [
        (link, dtype, size)
        for link in ("own", "pcie4-x16")
        for dtype, size in ((None, 32768), ("int4:64:float16", 8704))
    ]
    for row in rows:
        dtype = row["host_kv_dtype"]
        expected = simulate(
            base_workload(recipe), hardware="h200-provisional", link=row["link"], batch=3, host_kv_dtype=dtype,
            dequant_fixed_us=1.0 if dtype else None,
        )  # fmt: skip
        for key in ("step_time_us", "h2d_bytes_total", "conversion_us"):
            assert row[key] == pytest.approx(getattr(expected, key), rel=1e-12)
        assert row["host_pool_bytes"] == expected.memory["host_pool_bytes"]


def test_rows_outside_the_grid_are_refused_or_labelled(tmp_path):
    data = changed(hardware="h200", axes={"batch": [2, 300]})
    sweep(parse_recipe(data), tmp_path / "strict", workers=1)
    inside, outside = rows_of(tmp_path / "strict")
    assert (inside["refused"], inside["extrapolated"]) == ("", "")
    assert "batch 300 is above 256" in outside["refused"]
    result = sweep(parse_recipe({**data, "extrapolate": True}), tmp_path / "wide", workers=1)
    same, outside = rows_of(tmp_path / "wide")
    assert same == inside
    assert (outside["refused"], outside["status"]) == ("", "projected")
    assert outside["extrapolated"] == "batch 300 is above 256, the highest in gemm of h200"
    assert result.summary["n_extrapolated"] == 1


@pytest.mark.parametrize("limits", [{"low": 1, "high": 1e300}, {"low": 0.2, "high": 4}])
@pytest.mark.parametrize("name", ["topk", "context", "batch"])
def test_ranges_of_counts_hold_counts(name, limits):
    with pytest.raises(ConfigError, match=rf"sobol\.{name}: .*must be in \[1, 2147483647\]"):
        parse_recipe(changed(axes=None, sobol={"points": 8, name: limits | {"log": True}}))


def test_a_link_that_was_edited_does_not_resume_from_its_old_rows(tmp_path, monkeypatch):
    link = tmp_path / "link.json"
    document = json.loads((Path(link_module.__file__).parent / "links" / "pcie4-x16.json").read_text())
    recipe = parse_recipe(changed(link=str(link), axes={"batch": [1, 2]}))

    def dies(*_):
        raise KeyboardInterrupt

    link.write_text(json.dumps(document))
    monkeypatch.setattr(sweep_module, "write_results", dies)
    with pytest.raises(KeyboardInterrupt):
        sweep(recipe, tmp_path / "out", workers=1)
    monkeypatch.undo()
    document["h2d_gbps"]["value"] /= 4
    link.write_text(json.dumps(document))
    sweep(recipe, tmp_path / "out", workers=1)
    row = rows_of(tmp_path / "out")[0]
    alone = simulate(base_workload(recipe), hardware="h200-provisional", link=str(link), batch=1)
    assert row["step_time_us"] == alone.step_time_us
