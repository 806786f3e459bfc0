"""The results page from what is committed: every figure with its labels and sources, headlines that follow the rows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from nosa_sys.cli.app import run
from nosa_sys.errors import TraceError
from nosa_sys.report.results_page.breakdown import breakdown
from nosa_sys.report.results_page.files import ResultRows, read_rows
from nosa_sys.report.results_page.head_numerics import head_numerics
from nosa_sys.report.results_page.hot_buffer import hot_buffer_table
from nosa_sys.report.results_page.link_limit import link_limit
from nosa_sys.report.results_page.page import ResultsPage, build_results_page, build_sections
from nosa_sys.report.results_page.section import Section
from nosa_sys.report.results_page.throughput import throughput
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.traces.schema import STATUSES

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
ALWAYS = {
    *("breakdown", "phases", "link-limit", "k-e", "fragments", "hot-buffer", "head-numerics"),
    *("quality-transfers", "quality-blocks", "quality-retrieval", "quality-generation", "training-losses"),
    *("validation-h200", "validation-cpu"),
}


@pytest.fixture(scope="module")
def page() -> ResultsPage:
    return build_results_page(RESULTS)


def by_key(sections: list[Section]) -> dict[str, Section]:
    return {section.key: section for section in sections}


def test_every_figure_is_there_or_names_the_command_that_makes_it(page: ResultsPage) -> None:
    sections = by_key(page.sections)
    assert set(sections) >= ALWAYS
    assert {"throughput-16384", "throughput-98304"} <= set(sections)
    for section in page.sections:
        assert f'id="{section.key}-section"' in page.html
        if section.empty:
            assert re.search(r"python -m nosa_sys|nosa \w+|make \w+", " ".join(section.missing)), section.key
        else:
            assert section.headline, section.key
    empty = [section.empty for section in page.sections]
    assert empty == sorted(empty), "sections without data stand last"


def test_every_figure_states_how_far_to_trust_it_and_where_it_comes_from(page: ResultsPage) -> None:
    for section in (s for s in page.sections if not s.empty):
        html = section.html()
        kinds = {origin.kind for origin in section.origins}
        assert kinds
        assert kinds <= set(STATUSES)
        assert kinds & {"measured", "injected"}, f"{section.key} has no measured source"
        for origin in section.origins:
            assert f'class="status {origin.kind}"' in html
            assert origin.device in html
            assert origin.file in html
            assert origin.kind == "projected" or "versions" in origin.facts, (section.key, origin.file)
            assert {"command", "versions"} & set(origin.facts), (section.key, origin.file)


def test_the_page_is_self_contained(page: ResultsPage) -> None:
    head, body = page.html.split("</head>")
    assert head.count("plotly.js v") == 1, "plotly.js is inside once"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=\"?(https?:)?//", page.html)
    assert not re.search(r"https?://", body)


def altered(stage: str, change: dict[str, float], **where: object) -> ResultRows:
    """Committed rows of which some columns are multiplied."""
    found = read_rows(RESULTS, f"h200/nosi/{stage}.json")
    rows = [
        row | {name: row[name] * factor for name, factor in change.items() if row.get(name) is not None}
        if all(row.get(name) == value for name, value in where.items())
        else row
        for row in found.rows
    ]
    assert rows != found.rows
    return dataclasses.replace(found, rows=rows)


def number(pattern: str, headline: str) -> float:
    found = re.search(pattern, headline)
    assert found, headline
    return float(found[1].replace(",", ""))


def test_the_headline_of_throughput_follows_the_rows(page: ResultsPage) -> None:
    """NOSA twice as fast: its tokens/s, and its ratio to FullAttn, double; another context stays as it is."""
    nosa = max(
        (
            r
            for r in read_rows(RESULTS, "h200/nosi/methods.json").having(
                "tokens_per_s", method="nosa", context=16384, offload=True
            )
        ),
        key=lambda r: float(r["tokens_per_s"]),
    )
    faster = altered("methods", {"tokens_per_s": 2.0}, method="nosa", context=16384)
    nothing = ResultRows("none", [], {})
    before, after = by_key(page.sections), by_key(throughput(faster, nothing, load_hardware("h200")))
    rate, ratio = r"gives ([\d,]+) tokens/s", r"([\d.]+) x FullAttn"
    assert number(rate, before["throughput-16384"].headline) == round(nosa["tokens_per_s"])
    assert number(rate, after["throughput-16384"].headline) == round(2 * nosa["tokens_per_s"])
    double = 2 * number(ratio, before["throughput-16384"].headline)
    assert number(ratio, after["throughput-16384"].headline) == pytest.approx(double, abs=0.02)


def test_the_caption_of_throughput_says_where_dots_had_more_host_memory(page: ResultsPage) -> None:
    """Committed dots kept 191 GB on the host at 64K, 34 GB at 16K; profile h200 has 135 GB."""
    sections = by_key(page.sections)
    assert "host memory, 135 GB, while the dots had 188 GiB (202 GB)" in sections["throughput-65536"].how_to_read
    assert "host memory" not in sections["throughput-16384"].how_to_read
    large = dataclasses.replace(load_hardware("h200"), host_memory_bytes=2e11)
    nothing = ResultRows("none", [], {})
    after = by_key(throughput(read_rows(RESULTS, "h200/nosi/methods.json"), nothing, large))
    assert "host memory" not in after["throughput-65536"].how_to_read


def test_the_headline_of_the_hot_buffer_follows_the_rows(page: ResultsPage) -> None:
    most = altered("hot_buffer", {"tokens_per_s": 9.0}, method="nosa", slots_over_k=2.0)
    headline = hot_buffer_table(most, load_hardware("h200")).headline
    assert "NOSA is fastest with 2 k slots" in headline
    assert "NOSA is fastest with 2 k slots" not in by_key(page.sections)["hot-buffer"].headline


def test_the_headline_of_schedules_follows_the_rows() -> None:
    """Serial at a hundredth of its time is the fastest at every miss rate."""
    fast = altered("schedules", {"step_ms_median": 0.01}, schedule="serial")
    headline = breakdown(fast, ResultRows("none", [], {}), load_hardware("h200"))[0].headline
    assert headline.count("serial (") == len({r["segment"] for r in fast.having("step_ms_median", schedule="serial")})
    assert "two_batch (" not in headline


def test_the_headline_of_head_numerics_follows_the_rows() -> None:
    """Fewer of DMA's cores changed, and nothing else: ED-DMA's part stays."""
    found = read_rows(RESULTS, "cpu/head_numerics/numerics.json")
    before = head_numerics(found)
    for row in found.rows:
        if (row["part"], row.get("head"), row.get("kept")) == ("precision", "dma", "bfloat16"):
            row["n_cores_changed"] = 1
    after = head_numerics(found)
    assert after.headline.endswith("the core changes in 1 of 90 heads.")
    assert not before.headline.endswith("the core changes in 1 of 90 heads.")
    assert before.headline.split(";")[0] == after.headline.split(";")[0]
    assert head_numerics(dataclasses.replace(found, rows=[r for r in found.rows if r["part"] == "grid"])).empty


def test_rows_that_are_not_there_leave_a_command_and_no_figure(tmp_path: Path) -> None:
    sections = by_key(build_sections(tmp_path, "h200"))
    for key, section in sections.items():
        if key == "fragments":  # the profile's own table serves its left half
            assert len(section.missing) == 2
            continue
        assert section.empty
        assert section.missing
        assert not section.headline


def test_skipped_rows_and_missing_columns_are_left_out() -> None:
    profile, nothing = load_hardware("h200"), ResultRows("none", [], {})
    schedules = read_rows(RESULTS, "h200/nosi/schedules.json")
    for row in schedules.rows:
        row.pop("compute_ms", None)
    assert all(section.empty for section in breakdown(schedules, nothing, profile))
    assert link_limit(schedules, nothing, nothing, profile).empty
    hot_buffer = read_rows(RESULTS, "h200/nosi/hot_buffer.json")
    for row in hot_buffer.rows:
        row["skipped"] = "host memory ends before it" if row["method"] == "nosa" else None
    section = hot_buffer_table(hot_buffer, profile)
    assert {row[0] for row in section.table[1:]} == {"InfLLMv2"}
    assert "NOSA" not in section.headline


def cell(error: float, schedule: str) -> dict[str, object]:
    """A cell of the GPU validation as far as the page reads it."""
    settings = {"method": "nosa", "batch": 8, "topk": 64, "context": 16384, "slots": 64, "failed": None}
    measured = {"measured_step_us": 10000.0, "predicted_step_us": 10000.0 * (1 + error), "error": error}
    return {**settings, "schedule": schedule, **measured}


def test_a_gpu_validation_is_drawn_with_its_errors(tmp_path: Path) -> None:
    """Errors of 1, 2 and 6 %: median 2, worst -6; one failed cell is counted, not drawn."""
    cells = [cell(0.01, "serial"), cell(0.02, "serial"), cell(-0.06, "two_batch")]
    failed = {**cell(0.0, "serial"), "error": None, "failed": "out of time"}
    document = {
        **{"kind": "validation", "name": "h200", "device": "NVIDIA <H200>", "status": "projected"},
        **{"selections": "injected", "weights": "random", "versions": {"torch": "2.11"}, "noise_median": 0.004},
        **{"errors": {"median": 0.02, "p90": 0.052, "worst": 0.06}, "orderings": {"pairs": 3, "agree": 2}},
        "cells": [*cells, failed],
    }
    (tmp_path / "h200/validate").mkdir(parents=True)
    (tmp_path / "h200/validate/validation.json").write_text(json.dumps(document))
    section = by_key(build_sections(tmp_path, "h200"))["validation-h200"]
    assert "3 of 4 cells" in section.headline
    assert "median error of the step time 2.0%" in section.headline
    assert "-6.0% at worst" in section.headline
    assert "2 of 3 pairs" in section.headline
    assert [origin.kind for origin in section.origins] == ["injected", "projected"]
    (serial, serial_cells, *of_serial), (other, other_cells, *of_other) = section.table[1:]
    assert (serial, serial_cells, other, other_cells) == ("serial", 2, "two_batch", 1)
    assert of_serial == pytest.approx([1.5, 1.9, 2.0])
    assert of_other == pytest.approx([6.0, 6.0, 6.0])
    histogram = section.plots[1]
    assert sorted(x for trace in histogram.data for x in trace.x) == pytest.approx([-6, 1, 2])
    assert "&lt;H200&gt;" in section.html()


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "h200/nosi").mkdir(parents=True)
    (tmp_path / "h200/nosi/paper.json").write_text('{"rows": 3}')
    with pytest.raises(TraceError, match=r"paper\.json needs a list of rows"):
        build_sections(tmp_path, "h200")


def test_the_command_writes_one_file_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.html"
    (tmp_path / "empty").mkdir()
    assert run(["results", "--out", str(out), "--results", str(tmp_path / "empty"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["figures"] == ["fragments"]
    assert "hot-buffer" in document["missing"]
    assert len(out.read_text(encoding="utf-8")) == document["bytes"]
    assert run(["results", "--out", str(tmp_path / "b.html"), "--results", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert not (tmp_path / "b.html").exists()
