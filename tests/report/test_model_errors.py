"""Leave-one-out errors of a profile's models reach the page, once for each profile, and foreign values do not."""

from __future__ import annotations

import json
from pathlib import Path

from nosa_sys.report.inputs import ReportInputs, load_inputs
from nosa_sys.report.model_errors import model_error_rows
from nosa_sys.report.page import build_page

GEMM = {"name": "gemm<b>", "n_points": 100, "median": 0.0527, "p90": 0.129, "worst": 0.207}


def prediction(*errors: object, hardware: str = "h200") -> dict[str, object]:
    return {"kind": "prediction", "status": "projected", "settings": {"hardware": hardware}, "model_errors": [*errors]}


def test_each_fit_of_each_profile_is_one_row() -> None:
    rows = model_error_rows([prediction(GEMM), prediction(GEMM), prediction(GEMM, hardware="other"), {"status": "x"}])
    assert rows[1:] == [
        ["h200", "gemm<b>", 100, "5.3%", "12.9%", "20.7%"],
        ["other", "gemm<b>", 100, "5.3%", "12.9%", "20.7%"],
    ]


def test_values_of_another_kind_are_left_out() -> None:
    rows = model_error_rows([prediction("gemm", {"name": "x"}, {**GEMM, "median": None}), {"model_errors": 5}])
    assert len(rows) == 1


def test_the_page_shows_them_escaped(tmp_path: Path) -> None:
    (tmp_path / "prediction.json").write_text(json.dumps(prediction(GEMM)))
    page = build_page(load_inputs([tmp_path])).html
    assert "How well the profile" in page
    assert "gemm&lt;b&gt;" in page
    assert "gemm<b>" not in page
    assert "How well the profile" not in build_page(ReportInputs()).html
