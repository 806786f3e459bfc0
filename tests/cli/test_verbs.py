"""doctor, trace check, replay, simulate, sweep, report and ls on a captured trace; all with strict JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nosa_sys.simulator.schedules import SCHEDULES
from nosa_sys.traces.perfetto import read_timeline_file
from nosa_sys.traces.reader import Trace
from tests.cli.conftest import Nosa

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = (
    "step_time_us",
    "tokens_per_s",
    "tokens_per_s_per_sequence",
    "h2d_bytes_per_step",
    "h2d_exposed_us",
    "h2d_hidden_us",
    "link_utilisation",
    "limited_by",
    "status",
)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_doctor_names_what_runs_here(nosa: Nosa) -> None:
    result = nosa("doctor", "--json")
    assert result.status == 0, result.err
    parts = {tier["part"]: tier for tier in result.document["tiers"]}
    assert parts["engine on CPU (reference operations)"]["runs"] is True
    assert all(tier["runs"] or tier["why"] for tier in parts.values())


def test_trace_check_passes_and_counts_rows(nosa: Nosa, trace: Path) -> None:
    result = nosa("trace", "check", trace, "--json")
    assert result.status == 0, result.err
    assert result.document["ok"] is True
    assert result.document["n_rows"] == 20 * 2 * 2


def test_replay_at_the_captured_setting_is_what_was_recorded(nosa: Nosa, trace: Path) -> None:
    rows = Trace.open(trace).selections
    result = nosa("replay", trace, "--json")
    assert result.status == 0, result.err
    document = result.document
    assert document["h2d_bytes_total"] == int(rows.h2d_bytes.sum())
    assert document["misses_per_head_step"] == pytest.approx(float(rows.n_misses[~rows.cold].mean()))
    assert document["gamma_macro"] == pytest.approx(float(np.nanmean(rows.gamma)))


def test_replay_with_spare_slots_moves_less_and_belady_least(nosa: Nosa, trace: Path) -> None:
    totals = {
        policy: nosa("replay", trace, "--slots", 9, "--policy", policy, "--json").document["h2d_bytes_total"]
        for policy in ("lru", "beta", "belady")
    }
    exact = nosa("replay", trace, "--json").document["h2d_bytes_total"]
    assert totals["belady"] <= min(totals["lru"], totals["beta"])
    assert totals["lru"] <= exact


def test_replay_under_other_budgets_states_its_assumption(nosa: Nosa, trace: Path) -> None:
    result = nosa("replay", trace, "--topk", 8, "--select-blocks", 5, "--out", "again", "--json")
    assert result.status == 0, result.err
    assert any("queries" in text for text in result.document["assumptions"])
    assert json.loads(Path("again/replay.json").read_text())["sparse"]["topk"] == 8


def test_simulate_has_every_key_of_the_contract_and_charges_the_recorded_bytes(nosa: Nosa, trace: Path) -> None:
    result = nosa("simulate", trace, "--hardware", "ideal", "--h2d-gbps", 8, "--out", "p", "--json")
    assert result.status == 0, result.err
    document = result.document
    assert set(CONTRACT) <= set(document)
    rows = Trace.open(trace).selections
    assert document["h2d_bytes_total"] == int(rows.h2d_bytes.sum())
    warm_bytes = int(rows.h2d_bytes[~rows.cold].sum())
    assert document["step_time_us"] == pytest.approx(warm_bytes / 19 / 8e9 * 1e6, rel=1e-9)
    assert Path("p/prediction.json").is_file()


def test_simulate_on_another_situation_is_projected_and_says_why(nosa: Nosa, trace: Path) -> None:
    result = nosa(
        *("simulate", trace, "--hardware", "h200-provisional", "--model-shape", "nosa-8b", "--batch", 8),
        *("--slots", 9, "--policy", "lru", "--timeline", "steps.json.gz", "--engine", "simpy", "--json"),
    )
    assert result.status == 0, result.err
    assert result.document["status"] == "projected"
    rules = result.document["rules"]
    assert rules
    assert all(f"rule: {rule}" in result.err for rule in rules)
    assert Path("steps.json.gz").is_file()


def test_simulate_guesses_as_told(nosa: Nosa, trace: Path) -> None:
    prefetch = ("simulate", trace, "--hardware", "ideal", "--h2d-gbps", 8, "--slots", 9, "--policy", "lru", "--json")
    wanted = ("--schedule", "prefetch", "--prefetch-blocks", 2, "--prefetch-hit-share", 0.0)
    none_helps = nosa(*prefetch, *wanted)
    assert none_helps.status == 0, none_helps.err
    assert none_helps.document["options"]["prefetch_blocks"] == {"value": 2, "origin": "flag"}
    assert none_helps.document["prefetch_bytes_total"] == none_helps.document["wasted_prefetch_bytes_total"] > 0
    some_help = nosa(*prefetch, *wanted[:-1], 0.5).document
    assert some_help["h2d_bytes_total"] < none_helps.document["h2d_bytes_total"]
    refused = nosa(*prefetch, "--prefetch-blocks", 2)
    assert (refused.status, "need schedule prefetch" in refused.err) == (2, True)


def test_simulate_on_another_link_with_other_host_blocks(nosa: Nosa, trace: Path) -> None:
    """int4 of 16 x 64 numbers: what the banner, the prediction and the rules say; the numbers of the link are used."""
    flags = ("--hardware", "h200", "--model-shape", "nosa-1b", "--link", "pcie4-x16", "--host-kv-dtype", "int4:32:fp16")
    refused = nosa("simulate", trace, *flags)
    assert (refused.status, "--extrapolate" in refused.err) == (2, True)
    costs = ("--dequant-gbps", 1000, "--dequant-fixed-us", 2, "--extrapolate")
    result = nosa("simulate", trace, *flags, *costs, "--json")
    assert result.status == 0, result.err
    document = result.document
    block = Trace.open(trace).meta.sparse.block_size
    n_bytes = 2 * (block * 128 // 2 + block * 4 * 2)
    assert document["settings"]["block_bytes"] == n_bytes
    assert document["options"]["bytes per block, host"]["value"] == f"{n_bytes:,}"
    assert document["settings"]["link"] == "pcie4-x16"
    assert document["settings"]["h2d_gbps"] == 25.6
    assert document["extrapolated"]
    assert all(f"extrapolated: {line}" in result.err for line in document["extrapolated"])
    assert any("1000 GB/s (given)" in rule for rule in document["rules"])
    assert document["status"] == "projected"


def test_simulate_prints_errors_of_the_models_and_compares_fetch_paths(nosa: Nosa, trace: Path) -> None:
    flags = ("--hardware", "h200", "--model-shape", "nosa-1b", "--batch", 16, "--extrapolate", "--fetch-paths")
    shown = nosa("simulate", trace, *flags)
    assert shown.status == 0, shown.err
    for words in ("leave-one-out errors", "h2d_uva_32768", "copy engine", "K and V apart"):
        assert words in shown.out
    document = nosa("simulate", trace, *flags, "--json").document
    assert {one["path"] for one in document["fetch_paths"]["paths"]} == {"uva", "bulk", "dma"}
    assert {one["name"] for one in document["model_errors"]} >= {"gemm", "d2h_uva"}
    refused = nosa("simulate", trace, "--hardware", "ideal", "--h2d-gbps", 8, "--fetch-paths")
    assert (refused.status, "link_runs" in refused.err) == (2, True)


def test_the_demo_prints_its_document_only_when_asked(nosa: Nosa, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the document of a real run, which is kept with the results."""
    kept = json.loads((ROOT / "experiments" / "results" / "cpu" / "demo" / "demo.json").read_text())
    monkeypatch.setattr("nosa_sys.experiments.demo.run_demo", lambda *_, **__: kept)
    shown = nosa("demo")
    assert shown.status == 0, shown.err
    assert "Report:" in shown.out
    assert "{" not in shown.out
    asked = nosa("demo", "--json")
    assert asked.document == kept
    assert len(asked.out.splitlines()) == 1


def test_both_timelines_need_a_file_and_times(nosa: Nosa, trace: Path) -> None:
    asked = ("simulate", trace, "--hardware", "h200-provisional", "--with-measured")
    assert nosa(*asked).status == 2
    result = nosa(*asked, "--timeline", "both.json.gz")
    assert result.status == 0, result.err
    names = [e["args"]["name"] for e in read_timeline_file(Path("both.json.gz")) if e["ph"] == "M"]
    assert names == ["simulated", "measured (phases laid end to end)"]


def test_help_lists_the_schedules_that_exist(nosa: Nosa) -> None:
    for verb in ("simulate", "sweep"):
        shown = nosa(verb, "--help").out
        assert all(name in shown for name in SCHEDULES)


def test_a_sweep_takes_another_schedule_than_its_recipes(nosa: Nosa, trace: Path) -> None:
    recipe = Path("recipe.yaml")
    recipe.write_text(RECIPE.replace("TRACE", str(trace)).replace("axes:", "schedule: serial\naxes:"))
    for out_dir, flags in (("out/a", ()), ("out/b", ("--schedule", "fused_kv"))):
        result = nosa("sweep", recipe, "--out", out_dir, "--workers", 1, *flags)
        assert result.status == 0, result.err
    by_recipe, by_flag = (pq.read_table(f"out/{name}/results.parquet").to_pandas() for name in "ab")
    assert (set(by_recipe["schedule"]), set(by_flag["schedule"])) == ({"serial"}, {"fused_kv"})
    assert (by_flag["step_time_us"] <= by_recipe["step_time_us"]).all()
    refused = nosa("sweep", recipe, "--out", "out/c", "--schedule", "seriall")
    assert (refused.status, "schedule 'seriall' has no model" in refused.err) == (2, True)


RECIPE = """
name: small
base: {trace: TRACE}
hardware: h200-provisional
axes:
  slots: [1.0, 1.5]
  batch: [1, 4]
  h2d_gbps: [25.0, 50.0]
"""


def test_sweep_then_report_then_ls(nosa: Nosa, trace: Path) -> None:
    recipe = Path("recipe.yaml")
    recipe.write_text(RECIPE.replace("TRACE", str(trace)))
    result = nosa("sweep", recipe, "--out", "out/sweep", "--workers", 1, "--json")
    assert result.status == 0, result.err
    assert result.document["n_configurations"] == 8
    first = Path("out/sweep/results.parquet").read_bytes()
    assert pq.read_table("out/sweep/results.parquet").num_rows == 8
    assert nosa("sweep", recipe, "--out", "out/sweep", "--workers", 2, "--json").status == 0
    assert Path("out/sweep/results.parquet").read_bytes() == first, "workers do not change the bytes"

    recipe.write_text(RECIPE.replace("TRACE", str(trace)).replace("[1, 4]", "[2]"))
    other = nosa("sweep", recipe, "--out", "out/sweep")
    assert other.status == 2
    assert "another recipe" in other.err
    assert Path("out/sweep/results.parquet").read_bytes() == first

    report = nosa("report", trace, "out/sweep", "--out", "out/report.html", "--json")
    assert report.status == 0, report.err
    assert any(key.startswith("gamma") for key in report.document["figures"])
    assert any(key.startswith("batch") for key in report.document["figures"])

    listed = nosa("ls", "out", trace, "--json").document
    assert {entry["kind"] for entry in listed["outputs"]} == {"sweep", "trace"}
    assert "h200-provisional" in listed["hardware"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("axes: [", "YAML"),
        (RECIPE.replace("hardware", "hardwear"), "hardware"),
        (RECIPE.replace("25.0", ".nan"), "h2d_gbps"),
        (RECIPE.replace("h200-provisional", "abacus"), "abacus"),
    ],
)
def test_bad_recipes_leave_nothing(nosa: Nosa, trace: Path, text: str, words: str) -> None:
    Path("bad.yaml").write_text(text.replace("TRACE", str(trace)))
    result = nosa("sweep", "bad.yaml", "--out", "sweep")
    assert result.status == 2
    assert words in result.err.splitlines()[-1]
    assert not Path("sweep").exists()


def test_help_has_an_example_for_every_verb(nosa: Nosa) -> None:
    verbs = ("doctor", "generate", "capture", "replay", "simulate", "sweep", "report", "ls", "demo")
    for verb in (*((verb,) for verb in verbs), ("trace", "check")):
        result = nosa(*verb, "--help")
        assert result.status == 0
        assert "Example:" in result.out, verb
        assert f"nosa {' '.join(verb)}" in " ".join(result.out.split()), verb


@pytest.mark.parametrize(("given", "slots"), [("9", 9), ("1.5x", 9), ("1.5", 9), ("2x", 12)])
def test_slots_as_a_number_or_a_multiple_of_k(nosa: Nosa, trace: Path, given: str, slots: int) -> None:
    document = nosa("replay", trace, "--slots", given, "--policy", "lru", "--json").document
    assert document["sparse"]["topk"] == 6
    assert document["slots"] == slots


@pytest.mark.parametrize("given", ["half", "0.5x", "nan", "-3", "1e9x"])
def test_slots_that_are_neither_are_refused(nosa: Nosa, trace: Path, given: str) -> None:
    result = nosa("replay", trace, "--slots", given)
    assert result.status == 2
    assert "slots=" in result.err.splitlines()[-1]


def test_trace_stats_agree_with_the_rows(nosa: Nosa, trace: Path) -> None:
    document = nosa("trace", "stats", trace, "--json").document
    rows = Trace.open(trace).table("selections").to_pandas()
    warm = rows[~rows["cold"]]
    assert document["status"] == "measured"
    assert document["misses_total"] == rows["n_misses"].sum()
    assert document["gamma_macro_mean"] == pytest.approx(warm["gamma"].mean())
    assert document["h2d_bytes_warm"] == warm["h2d_bytes"].sum()
    assert sum(origin["n_blocks"] for origin in document["origins"]) == warm["block_ids"].str.len().sum()
    by_layer = warm.groupby("layer")["n_misses"].mean()
    assert [layer["misses_per_row"] for layer in document["by_layer"]] == pytest.approx(by_layer.tolist())
