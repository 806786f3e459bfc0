"""The training probe on a tiny random model: a row a cell, faults kept as rows, wrong requests in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nosa_sys.experiments.train_probe import main

RECIPE = """
name: probe
trained: all
length: 112
steps: 90
sparse: {block_size: 16, kernel_size: 16, kernel_stride: 8, topk: 5, init_blocks: 1, window_size: 16, select_blocks: 2}
seeds: [0, 1]
runs:
  - {name: dense, method: full, head: none}
  - {name: nosa}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def probe(recipe: Path, *arguments: str) -> int:
    common = ["--out", str(recipe.parent / "out"), "--device", "cpu", "--random", "tiny", "--steps", "5"]
    return main([str(recipe), *common, *arguments])


def test_every_run_and_attention_is_timed_once(recipe: Path) -> None:
    assert probe(recipe, "--attention", "sdpa") == 0
    document = json.loads((recipe.parent / "out" / "probe.json").read_text())
    assert [(row["run"], row["attention"]) for row in document["rows"]] == [("dense", "sdpa"), ("nosa", "sdpa")]
    for row in document["rows"]:
        assert row["steps"] == 2
        assert 0 < row["fastest_step_s"] <= row["step_s"]
        assert row["tokens_per_s"] == pytest.approx(112 / row["step_s"])
        assert len(set(row["losses"])) == 5


def test_a_form_that_fails_is_a_row_and_the_others_run(recipe: Path) -> None:
    """FlexAttention has no gradient on a CPU."""
    assert probe(recipe, "--attention", "flex,sdpa", "--only", "nosa", "--length", "96") == 1
    rows = json.loads((recipe.parent / "out" / "probe.json").read_text())["rows"]
    assert [bool(row["error"]) for row in rows] == [True, False]
    assert {row["length"] for row in rows} == {96}


def test_wrong_requests_are_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(recipe, "--attention", "flash") == 2
    assert "attention='flash' must be one of" in capsys.readouterr().err
    assert probe(recipe, "--texts", str(recipe)) == 2
    assert "no readable tar archive" in capsys.readouterr().err
