"""The whole NOSI experiment as a dry run on the CPU, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from nosa_sys.experiments.critical_paths import CRITICAL_PATHS
from nosa_sys.experiments.nosi_bench import STAGES, main
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
    if stage == "schedules":
        assert {r["schedule"] for r in rows} == set(CRITICAL_PATHS)
        assert all(r["critical_ms"] >= max(r["compute_ms"], r["transfer_ms"]) - 1e-9 for r in rows)  # type: ignore[operator]


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
