"""The report page: every figure from made-up directories, gaps for missing values, nothing loaded from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nosa_sys.errors import TraceError
from nosa_sys.report.headline import headline_numbers
from nosa_sys.report.html import html_id
from nosa_sys.report.inputs import load_inputs
from nosa_sys.report.page import build_page
from nosa_sys.report.replay_figures import replay_figures
from nosa_sys.report.sweep_figures import pareto_front, sweep_figures
from nosa_sys.report.trace_figures import gamma_grid, trace_figures
from nosa_sys.report.what_if import what_if_rows
from tests.report.report_inputs import SPARSE, write_everything, write_replay, write_sweep, write_trace

FIGURES = {"gamma", "misses", "origins", "measured", "slots", "budgets", "predictions"}
FIGURES |= {"batch", "link", "bandwidth", "breakdown", "pareto"}


def test_every_kind_of_figure_is_drawn_and_labelled(tmp_path: Path) -> None:
    page = build_page(load_inputs([write_everything(tmp_path)]))
    assert {key.split("-")[0] for key in page.figures} == FIGURES
    for key in page.figures:
        assert f'id="{key}"' in page.html
    assert page.html.count('class="status ') >= len(page.figures)


def test_an_injected_trace_keeps_its_label_and_promises_nothing(tmp_path: Path) -> None:
    directory = write_trace(tmp_path / "t")
    meta = json.loads((directory / "meta.json").read_text())
    pages = {}
    for status in ("measured", "injected: 2 misses <a head>"):
        (directory / "meta.json").write_text(json.dumps(meta | {"status": status}))
        pages[status] = build_page(load_inputs([directory])).html
        body = pages[status].split("</head>")[1]
        assert ("guaranteed" in body) == (status == "measured")
    assert '<span class="status injected">injected: 2 misses &lt;a head&gt;</span>' in pages[status]


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    html = build_page(load_inputs([write_everything(tmp_path)])).html
    head, body = html.split("</head>")
    assert head.count("plotly.js v") == 1, "plotly.js is inside once"
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"?(https?:)?//", html)
    assert "cdn." not in body


def test_missing_values_are_gaps(tmp_path: Path) -> None:
    inputs = load_inputs([write_everything(tmp_path, hole=True)])
    assert build_page(inputs).figures
    (batch,) = [f for f in sweep_figures(inputs.sweeps, []) if f.key == "batch-0-tiny"]
    assert any(None in trace.y for trace in batch.plot.data)
    (slots,) = [f for f in replay_figures(inputs.replays) if f.key.startswith("slots")]
    lru = next(trace for trace in slots.plot.data if trace.name == "LRU")
    assert list(lru.y) == [0.3 / 8, None]


def test_a_trace_without_times_and_gamma_still_reports(tmp_path: Path) -> None:
    inputs = load_inputs([write_trace(tmp_path / "t", times=False)])
    keys = {figure.key.split("-")[0] for figure in trace_figures(inputs.traces[0], 0)}
    assert keys == {"gamma", "misses", "origins"}
    steps, mean, lowest = gamma_grid(inputs.traces[0])
    assert len(steps) == 29, "the cold step has no gamma"
    assert np.isnan(mean[3]).all(), "layer 3 has none either: a gap"
    assert np.isfinite(mean[:3]).all()
    assert lowest.min() == 0.75


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    write_trace(tmp_path / "t", name=evil, device=evil)
    html = build_page(load_inputs([tmp_path / "t"]), title=evil).html
    assert "<script>alert(1)" not in html


def test_refused_and_oversized_rows_are_left_out(tmp_path: Path) -> None:
    import pandas as pd

    directory = write_sweep(tmp_path / "s")
    rows = pd.read_parquet(directory / "results.parquet")
    rows["refused"] = ["too small" if batch == 64 else "" for batch in rows["batch"]]
    rows["limits"] = ["over GPU memory" if model == "nosa-8b" else "" for model in rows["model_shape"]]
    rows.to_parquet(directory / "results.parquet")
    inputs = load_inputs([directory])
    keys = [figure.key for figure in sweep_figures(inputs.sweeps, [])]
    assert "batch-0-tiny" in keys
    assert not [key for key in keys if "nosa-8b" in key]
    assert max(max(t.x) for t in sweep_figures(inputs.sweeps, [])[0].plot.data) == 8


def test_headline_compares_slots_at_the_traces_own_budgets(tmp_path: Path) -> None:
    """A replay under other budgets must not slip into the ratio."""
    write_trace(tmp_path / "trace")
    write_replay(tmp_path / "r1", slots=8, policy="exact", misses=1.0)
    write_replay(tmp_path / "r2", slots=12, policy="lru", misses=0.25)
    other = write_replay(tmp_path / "r3", slots=8, policy="exact", misses=9.0)
    document = json.loads((other / "replay.json").read_text())
    document["sparse"] = {**SPARSE.to_dict(), "select_blocks": 1}
    (other / "replay.json").write_text(json.dumps(document))
    numbers = headline_numbers(load_inputs([tmp_path]))
    assert ("4.0x", "fewer loads with 1.5 k slots and LRU, replayed") in numbers


def test_fastest_configuration_is_shown_with_its_link(tmp_path: Path) -> None:
    numbers = headline_numbers(load_inputs([write_sweep(tmp_path / "s")]))
    assert "link 100 GB/s" in numbers[-1][1]


def test_what_if_changes_one_setting_at_a_time(tmp_path: Path) -> None:
    inputs = load_inputs([write_sweep(tmp_path / "s")])
    tables = what_if_rows(inputs.sweeps)
    assert len(tables) == 2
    _, status, rows = tables[0]
    assert status == "projected"
    changes = [row[0] for row in rows[1:]]
    assert changes == [
        "as is: slots 1 k, policy exact, link GB/s 50, batch 8",
        "slots 1.5 k, policy lru",
        "link GB/s 100",
        "batch 1",
        "batch 64",
    ]
    assert rows[1][-1] == "1.00x"


def test_pareto_front_against_a_pair_by_pair_search() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        x, y = rng.integers(0, 6, 12).astype(float), rng.integers(0, 6, 12).astype(float)
        beaten = [
            any((x[j] >= x[i] and y[j] >= y[i]) and (x[j] > x[i] or y[j] > y[i]) for j in range(12)) for i in range(12)
        ]
        expected = {(x[i], y[i]) for i in range(12) if not beaten[i]}
        assert {(x[i], y[i]) for i in pareto_front(x, y)} == expected


@pytest.mark.parametrize("name", ["replay.json", "prediction.json", "results.parquet"])
def test_broken_inputs_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{broken")
    with pytest.raises(TraceError, match=re.escape(name)):
        load_inputs([tmp_path])


def test_a_directory_without_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no trace"):
        load_inputs([tmp_path])
    with pytest.raises(TraceError, match="no such directory"):
        load_inputs([tmp_path / "nowhere"])


def test_a_model_name_cannot_leave_the_page_s_markup(tmp_path: Path) -> None:
    hostile = '<script>alert(1)</script>" onload="x'
    write_sweep(tmp_path / "sweep")
    path = tmp_path / "sweep" / "results.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("model_shape")
    pq.write_table(table.set_column(at, "model_shape", pa.array([hostile] * len(table))), path)
    page = build_page(load_inputs([tmp_path / "sweep"]))
    body = page.html.split("</head>")[1]
    assert page.figures
    assert "<script>alert" not in body
    assert 'onload="x' not in body
    assert all(f'id="{key}"' in body for key in page.figures)
    assert html_id("a b") != html_id("a_b") != html_id("a-b")


@pytest.mark.parametrize(
    ("key", "value", "ok"),
    [
        ("sparse", "x", False),
        ("slots_over_k", [], False),
        ("assumptions", 5, False),
        ("assumptions", None, True),
        ("miss_ratio", None, True),
        ("gamma_macro", float("nan"), True),
    ],
)
def test_a_replay_of_wrong_types_is_named(tmp_path: Path, key: str, value: object, ok: bool) -> None:
    write_replay(tmp_path / "r", slots=12, policy="lru", misses=0.3)
    path = tmp_path / "r" / "replay.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    if ok:
        build_page(load_inputs([tmp_path]))
        return
    with pytest.raises(TraceError, match=key):
        load_inputs([tmp_path])
