"""Replays of one trace over budgets: a valid plan, and the counts of an independent trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nosa_sys.experiments.budget_replays import BUDGETS_FILE, main, plan
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from tests.traces.synthetic import make_trace


def test_the_plan_keeps_k_and_token_budgets_and_holds_the_own_budgets() -> None:
    own = SparseConfig(topk=16, window_size=128, select_blocks=4)
    entries = list(plan(own))
    assert ("k_e", own, "nosa") in entries
    assert ("block_size", own, "nosa") in entries
    assert {s.topk for axis, s, _ in entries if axis == "k_e"} == {16, 32}
    sizes = {s.block_size: s for axis, s, _ in entries if axis == "block_size"}
    assert set(sizes) == {16, 32, 64, 128}, "256 divides neither window nor select"
    assert {s.topk_tokens for s in sizes.values()} == {1024}
    shares = [s.k_e for axis, s, method in entries if axis == "k_e" and s.topk == 16 and method == "nosa"]
    assert shares == list(range(15, 2, -1))


def test_rows_count_what_a_replay_of_the_same_budgets_counts(tmp_path: Path) -> None:
    trace = make_trace(seed=3).write(tmp_path / "t")
    assert main(["--trace", str(trace), "--out", str(tmp_path / "out")]) == 0
    document = json.loads((tmp_path / "out" / BUDGETS_FILE).read_text())
    meta = Trace.open(trace).meta
    own_budgets = {"axis": "k_e", "method": "nosa", "topk": meta.sparse.topk, "k_e": meta.sparse.k_e}
    (own,) = [row for row in document["rows"] if own_budgets.items() <= row.items()]
    found = replay(Trace.open(trace), slots=meta.sparse.topk, policy="exact").misses
    assert own["misses_per_head_step"] == pytest.approx(found.n_misses[~found.cold].mean())
    assert document["facts"]["device"] == meta.device
    other = [row for row in document["rows"] if row["k_e"] != meta.sparse.k_e and not row["skipped"]]
    assert other
    assert {row["status"] for row in other} == {"projected"}


def test_a_missing_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
