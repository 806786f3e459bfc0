"""The bench of the recorder: its sets change as said, and a run of it writes what it claims to have recorded."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from nosa_sys.engine.recorder import Recorder
from nosa_sys.experiments.recorder_bench import Load, SimulatedEngine, main, selections
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace

SMALL = Load(batch=3, context=8192, n_layers=2, steps=20, period_ms=1.0, host_ms=0.1)


def test_sets_are_ascending_and_change_in_as_many_blocks_as_said() -> None:
    found = selections(SMALL, SparseConfig(), seed=1)
    for ids in found:
        assert (np.diff(ids, axis=-1) > 0).all()
    for before, after in pairwise(found):
        for place in np.ndindex(2, 3, 2):
            assert len(set(after[place].tolist()) - set(before[place].tolist())) == SMALL.changed


def test_a_run_writes_the_selections_it_was_given(tmp_path: Path) -> None:
    sparse = SparseConfig()
    ids = selections(SMALL, sparse, seed=2)
    recorder = Recorder(tmp_path / "t", background=True)
    found = SimulatedEngine(SMALL, recorder, ids, sparse).run()
    recorder.close()
    assert len(found["lateness_s"]) == 20
    assert (np.diff(found["ended_s"]) >= 0.999e-3).all()
    rows = Trace.open(tmp_path / "t").table("selections").to_pylist()
    assert len(rows) == 20 * 2 * 3 * 2
    for row in rows:
        expected = ids[row["step"] % len(ids)][row["layer"], row["sequence"], row["kv_head"]]
        assert row["block_ids"] == expected.tolist()
        shared = 1 - SMALL.changed / sparse.topk
        assert row["gamma"] is None if row["step"] == 0 else row["gamma"] == shared or row["step"] % len(ids) == 0


def test_the_file_names_status_load_and_both_kinds_of_runs(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "b.json"), "--runs", "1", "--steps", "3", "--injected"]) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert (found["status"], found["load"]["steps"], found["load"]["injected"]) == ("measured", 3, True)
    assert [row["recorder"] for row in found["rows"]] == ["off", "on"]
    assert len(found["rows"][1]["lateness_ms"]) == 3
