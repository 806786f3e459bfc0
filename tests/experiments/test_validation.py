"""nosa validate on a tiny shape: rows, exact bytes, thresholds, exit status. How close it comes is for make bench."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from nosa_sys.cli.app import run
from nosa_sys.errors import ConfigError
from nosa_sys.experiments.validation import CELLS_FILE, PARTS, VALIDATION_FILE, summarise
from nosa_sys.experiments.validation_recipe import load_validation_recipe
from nosa_sys.profiling.cpu_engine import CALIBRATION_CELLS
from nosa_sys.report.inputs import load_inputs
from nosa_sys.report.validation_figures import validation_figures

RECIPES = Path(__file__).parents[2] / "experiments"
CELL = {"batch": 2, "topk": 6, "context": 200, "block_size": 16, "window_size": 32, "select_blocks": 2}
CELLS = [CELL, {**CELL, "slots": 1.5}, {**CELL, "method": "infllmv2"}, {**CELL, "method": "full"}]


@pytest.fixture
def tiny(tmp_path: Path):
    """Write a recipe of a tiny model on the provisional profile; returns its path."""
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config.write_text(json.dumps({**sizes, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}))

    def write(**changes: object) -> Path:
        recipe = {
            "name": "tiny", "model_shape": str(config), "hardware": "h200-provisional", "runs": 2, "steps": 18,
            "thresholds": {"median": 1e9}, "cells": CELLS, **changes,
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    return write


def _validate(recipe: Path, out: Path, *flags: str) -> tuple[int, dict]:
    status = run(["validate", str(recipe), "--out", str(out), *flags])
    return status, json.loads((out / VALIDATION_FILE).read_text())


def test_a_row_a_cell_with_parts_that_add_up_and_equal_bytes(tiny, tmp_path: Path) -> None:
    status, document = _validate(tiny(), tmp_path / "out")
    assert status == 0
    assert document["ok"]
    assert document["status"] == "validated"
    assert document["measured_status"] == "measured"
    assert len(document["cells"]) == len(CELLS) == len(pd.read_parquet(tmp_path / "out" / CELLS_FILE))
    for row in document["cells"]:
        assert row["failed"] is None
        for kind in ("measured", "predicted"):
            parts = sum(row[f"{kind}_{part}_us"] for part in PARTS)
            assert parts == pytest.approx(row[f"{kind}_step_us"], rel=1e-9)
        assert row["error"] == pytest.approx(row["predicted_step_us"] / row["measured_step_us"] - 1)
        assert row["measured_h2d_bytes"] == row["predicted_h2d_bytes"]
        assert row["measured_d2h_bytes"] == row["predicted_d2h_bytes"]
        assert row["predicted_gpu_bytes"] > 0
        assert row["slowest_over_fastest_run"] >= 1
    sparse, dense = document["cells"][0], document["cells"][3]
    assert sparse["measured_h2d_bytes"] > 0
    # 19 steps from position 200 fill one block, that of positions 192 to 207: 2 layers x 1 head x 2 sequences,
    # each 2 x 16 x 16 values of 4 bytes
    assert sparse["measured_d2h_bytes"] == 2 * 2 * (2 * 16 * 16 * 4)
    assert dense["measured_h2d_bytes"] == dense["measured_d2h_bytes"] == 0


def test_status_1_past_a_threshold_and_the_row_stays(tiny, tmp_path: Path, capsys) -> None:
    recipe = tiny(thresholds={"median": 1e-9}, cells=CELLS[:1])
    status, document = _validate(recipe, tmp_path / "out", "--json")
    assert status == 1
    assert not document["ok"]
    assert document["status"] == "projected"
    assert document["exceeded"][0].startswith("median error")
    printed = capsys.readouterr()
    assert json.loads(printed.out.strip().splitlines()[-1])["ok"] is False
    assert "exceeded: median error" in printed.err


def test_failed_cells_stay_with_their_reason(tiny, tmp_path: Path) -> None:
    """More sequences than any memory holds are refused before they run, and cells of the calibration are."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    source = RECIPES.parent / "simulator" / "profiles" / "h200-provisional"
    for name in ("meta.json", "models.json"):
        (bundle / name).write_text((source / name).read_text())
    seen = {"batch": 2, "topk": 6, "block_size": 16, "context": 200, "slots": 6, "method": "nosa"}
    pd.DataFrame([seen]).to_parquet(bundle / "engine_steps.parquet")
    recipe = tiny(cells=[CELL, {**CELL, "batch": 2_000_000_000}, {**CELL, "context": 210}])
    status, document = _validate(recipe, tmp_path / "out", "--hardware", str(bundle))
    assert status == 1
    used, too_large, good = document["cells"]
    assert "calibration used this cell" in used["failed"]
    assert "exceeds device memory" in too_large["failed"]
    assert good["failed"] is None
    assert document["n_failed"] == 2
    assert document["errors"]["median"] == pytest.approx(abs(good["error"]))


def test_summary_by_hand() -> None:
    """Errors of 10, 20 and 30 %: median 20 %, p90 28 %, worst 30 %."""
    rows = []
    for error in (0.1, -0.2, 0.3):
        row = {"error": error, "failed": None}
        for part in PARTS:
            row |= {f"measured_{part}_us": 10.0, f"predicted_{part}_us": 10.0 * (1 + error)}
        rows.append(row)
    summary = summarise(rows, {"median": 0.25, "p90": 0.25, "worst": None})
    assert summary["errors"] == {
        "median": pytest.approx(0.2), "p90": pytest.approx(0.28), "worst": pytest.approx(0.3)
    }  # fmt: skip
    assert summary["median_part_errors"]["select"] == pytest.approx(0.2)
    assert summary["exceeded"] == ["p90 error 28.0% exceeds 25.0%"]
    nothing = summarise([{"error": None, "failed": "why"}], {"median": 0.15})
    assert not nothing["ok"]
    assert nothing["errors"]["median"] is None
    assert summarise([], {"median": 0.15})["exceeded"] == ["no cell was compared"]
    undefined = summarise([*rows, rows[0] | {"error": float("nan")}], {"median": 0.25, "p90": None, "worst": None})
    assert undefined["exceeded"] == ["median error nan% exceeds 25.0%"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": []}, "did you mean 'cells'"),
        ({"cells": []}, "at least one cell"),
        ({"cells": [{**CELL, "batchs": 1}]}, "did you mean 'batch'"),
        ({"cells": [{**CELL, "topk": 2}]}, "exceed"),
        ({"cells": [{**CELL, "slots": 0.5}]}, "multiple of topk"),
        ({"cells": [{**CELL, "method": "best"}]}, "unknown method"),
        ({"thresholds": {"median": 0}}, "greater than 0"),
    ],
)
def test_bad_recipes_name_the_key(tiny, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_validation_recipe(tiny(**changes))


def test_the_shipped_recipe_holds_no_calibration_cell() -> None:
    recipe = load_validation_recipe(RECIPES / "validate-cpu.yaml")
    used = {(batch, topk, context, slots, method) for batch, topk, context, slots, method in CALIBRATION_CELLS}
    assert used.isdisjoint((c.batch, c.topk, c.context, c.n_slots(), c.method) for c in recipe.cells)
    assert recipe.thresholds.median == 0.15


def test_figure_has_a_dot_a_cell_and_the_lines_of_5_and_10_percent(tiny, tmp_path: Path) -> None:
    _, document = _validate(tiny(), tmp_path / "out")
    inputs = load_inputs([tmp_path])
    (figure,) = validation_figures(inputs.validations)
    assert figure.status == document["status"]
    dots = [trace for trace in figure.plot.data if trace.mode == "markers"]
    assert sorted(y for trace in dots for y in trace.y) == pytest.approx(
        sorted(row["predicted_step_us"] / 1000 for row in document["cells"])
    )
    slopes = sorted(round(t.y[0] / t.x[0], 9) for t in figure.plot.data if t.mode == "lines")
    assert slopes == [0.9, 0.95, 1.0, 1.05, 1.1]
