"""The whole NOSI experiment as a dry run on the CPU, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from nosa_sys.experiments.critical_paths import CRITICAL_PATHS
from nosa_sys.experiments.nosi_bench import STAGES, main
from nosa_sys.experiments.nosi_lab import Lab
from nosa_sys.experiments.nosi_scale import TINY
from nosa_sys.experiments.nosi_schedules import parts_of
from tests.traces.synthetic import make_trace

DRY = ["--shape", "tiny", "--device", "cpu"]


def rows_of(out: Path, stage: str) -> list[dict[str, object]]:
    document = json.loads((out / f"{stage}.json").read_text())
    assert document["error"] == ""
    table = pd.read_parquet(out / f"{stage}.parquet")
    assert len(table) == len(document["rows"])
    return document["rows"]


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in ("peers", "hot_buffer")])
def test_a_stage_runs_dry(stage: str, tmp_path: Path) -> None:
    assert main([*DRY, "--out", str(tmp_path), "--stages", stage]) == 0
    rows = rows_of(tmp_path, stage)
    assert rows
    for row in rows:
        assert not row["skipped"], row["skipped"]
    assert not (tmp_path / f"{stage}.jsonl").exists()
    if stage.startswith("schedules"):
        steps = [r for r in rows if r["what"] == "nosa-sys"]
        check_schedules(steps, [r for r in rows if r["what"] == "fastest schedule"], model=stage != "schedules")
        assert all(r["critical_ms"] >= max(r["compute_ms"], r["transfer_ms"]) - 1e-9 for r in steps)  # type: ignore[operator]
    if stage == "methods":
        check_methods(rows)


def check_schedules(steps: list[dict], fastest: list[dict], *, model: bool) -> None:
    names = {"serial", "split_merge", "two_batch"} if model else set(CRITICAL_PATHS)
    rates = TINY.means_misses if model else TINY.misses
    assert {(r["schedule"], r["segment"]) for r in steps} == {(n, f"{m:g} misses") for n in names for m in rates}
    assert {r["key_means_dtype"] for r in steps + fastest} == {"model" if model else "float32"}
    assert [r["segment"] for r in fastest] == [f"{m:g} misses" for m in rates]
    for row in fastest:
        own = {r["schedule"]: r for r in steps if r["segment"] == row["segment"]}
        tried = [own[n]["step_ms_median"] for n in own if n not in ("serial", "prefetch")]
        assert row["step_ms_median"] == min(tried)
        assert row["serial_over_fastest"] == pytest.approx(own["serial"]["step_ms_median"] / min(tried))
        longer = max(own["serial"]["compute_ms"], own[row["schedule"]]["transfer_ms"])
        assert row["over_longer_once"] == pytest.approx(min(tried) / longer)


def check_methods(rows: list[dict]) -> None:
    """The bytes of key means in the model's type hold at least as many sequences; ratios are to rows of this stage."""
    for context in TINY.contexts:
        own = {(r["method"], r["variant"]): r for r in rows if r["context"] == context}
        for method in ("nosa", "infllmv2"):
            wide, narrow = own[method, "1.25 k"], own[method, "1.25 k, key means of the model's type"]
            assert (wide["key_means_dtype"], narrow["key_means_dtype"]) == ("float32", "model")
            assert narrow["batch"] >= wide["batch"]
        full = own["full", "paged"]["tokens_per_s"]
        for variant in ("1.0 k", "1.25 k", "1.25 k, key means of the model's type"):
            row, rival = own["nosa", variant], own["infllmv2", variant]
            assert row["ratio_to_full"] == pytest.approx(row["tokens_per_s"] / full)
            assert row["ratio_to_infllmv2"] == pytest.approx(row["tokens_per_s"] / rival["tokens_per_s"])


def test_rows_are_in_the_journal_before_the_stage_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in its second cell leaves the first one's row."""
    seen, keep = [], Lab.keep

    def killed(lab: Lab, row: dict) -> dict:
        keep(lab, row)
        assert lab.journal is not None
        seen.append([json.loads(line) for line in lab.journal.read_text().splitlines()])
        return row

    monkeypatch.setattr(Lab, "keep", killed)
    assert main([*DRY, "--out", str(tmp_path), "--stages", "crossover"]) == 0
    rows = rows_of(tmp_path, "crossover")
    assert [len(lines) for lines in seen] == list(range(1, len(rows) + 1))
    assert seen[-1] == rows


def test_no_cell_begins_once_the_time_is_up(tmp_path: Path) -> None:
    assert main([*DRY, "--out", str(tmp_path), "--stages", "schedules,crossover", "--stage-seconds", "0"]) == 0
    for stage in ("schedules", "crossover"):
        rows = rows_of(tmp_path, stage)
        assert rows
        assert all("time is up" in str(row["skipped"]) for row in rows)


def test_the_hot_buffer_plays_a_trace(tmp_path: Path) -> None:
    made = make_trace(sequences=((60, 14, 0), (45, 12, 2)), n_layers=2, n_kv_heads=2)
    trace = made.write(tmp_path / "trace")
    out = tmp_path / "out"
    assert main([*DRY, "--out", str(out), "--stages", "hot_buffer", "--trace", f"nosa={trace}"]) == 0
    rows = rows_of(out, "hot_buffer")
    assert [row["slot_factor"] for row in rows] == list(TINY.slot_factors)
    assert all("sets of trace" in row["status"] for row in rows)  # type: ignore[operator]
    first, last = rows[0], rows[-1]
    assert last["misses_per_head"] <= first["misses_per_head"]  # type: ignore[operator]
    assert last["batch"] <= first["batch"]  # type: ignore[operator]


def test_peers_run_on_the_same_shape(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main([*DRY, "--out", str(tmp_path), "--stages", "peers"]) == 0
    rows = rows_of(tmp_path, "peers")
    assert {row["what"] for row in rows if not row["skipped"]} == {"transformers-dynamic", "nosa-sys"}
    peer = next(row for row in rows if row["what"] == "transformers-dynamic")
    own = next(row for row in rows if row["what"] == "nosa-sys" and row["batch"] == peer["batch"])
    assert own["ratio_to_transformers"] == pytest.approx(own["tokens_per_s"] / peer["tokens_per_s"])  # type: ignore[operator]
    assert [row["skipped"] for row in rows if row["what"] == "transformers-offloaded"] != [None]


def test_wrong_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--out", str(tmp_path), "--stages", "speed"]) == 2
    assert "unknown stage 'speed'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--out", str(tmp_path), "--device", "cuda"]) == 2


def test_parts_add_up_to_the_compute_measured() -> None:
    row = {"misses_per_head": 2.0, "prefetch_bytes_per_step": 10.0, "h2d_bytes_per_step": 40.0}
    phases = {"select": 1.0, "attention": 2.0, "other": 4.0, "h2d": 0.0, "step": 8.0}
    for name in CRITICAL_PATHS:
        parts = parts_of(TINY.shape, 8, name, row, compute_ms=16.0, copy_ms=6.0, phases=phases)
        assert parts.compute == pytest.approx(16)
        assert parts.outside == pytest.approx(2)
        assert (parts.demand, parts.speculative) == (pytest.approx(4.5), pytest.approx(1.5))
        hits = {"split_merge": 4 * 6 / 8, "prefetch": 4.0}.get(name, 0.0)
        assert parts.beside == pytest.approx(hits)
