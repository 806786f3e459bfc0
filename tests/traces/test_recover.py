"""Recovery of killed runs: whole steps are kept, torn ones left out, whatever the moment of death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nosa_sys.errors import TraceError
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import TraceMeta
from nosa_sys.traces.writer import TraceWriter
from tests.traces.synthetic import SyntheticTrace, make_trace

SEQUENCES = ((37, 12, 0), (5, 6, 2))


def write_until(directory: Path, source: SyntheticTrace, stop_after: int, rows_per_part: int) -> None:
    """Write row by row in the order of a run (betas, scores, selections, steps of each step), then stop dead."""
    meta = dict(source.meta, sequences=[], n_steps=0, complete=False)
    writer = TraceWriter(directory, TraceMeta.from_dict(meta), rows_per_part=rows_per_part)
    written = 0
    for name in ("prefill", "betas"):
        for row in source.tables[name]:
            writer.add(name, {k: [v] for k, v in row.items()})
    for step in range(source.meta["n_steps"]):
        for name in ("scores", "selections", "steps"):
            for row in source.tables[name]:
                if row["step"] == step:
                    if written == stop_after:
                        return
                    writer.add(name, {k: [v] for k, v in row.items()})
                    written += 1


@pytest.mark.parametrize("rows_per_part", [1, 4, 7, 13])
@pytest.mark.parametrize("stop_after", [3, 20, 43, 44, 45, 60, 77])
def test_whole_steps_survive_and_pass_the_check(tmp_path: Path, rows_per_part: int, stop_after: int) -> None:
    source = make_trace(sequences=SEQUENCES, seed=3)
    write_until(tmp_path, source, stop_after, rows_per_part)
    with pytest.raises(TraceError, match="incomplete"):
        Trace.open(tmp_path)
    if stop_after < 11 or (stop_after == 20 and rows_per_part > 7):  # not even one part of both tables is on disk
        with pytest.raises(TraceError, match="nothing can be recovered"):
            Trace.recover(tmp_path)
        return
    trace = Trace.recover(tmp_path)
    found = trace.table("selections").to_pylist()
    kept = max((r["step"] for r in found), default=-1)
    assert found == [r for r in source.tables["selections"] if r["step"] <= kept]
    assert trace.meta.n_steps == kept + 1
    assert any("recovered" in note for note in trace.notes)
    report = check_trace(trace)
    assert report.ok, [str(p) for p in report.problems]
    assert replay(trace).misses.n_misses.sum() == sum(r["n_misses"] for r in found)


def test_finest_parts_lose_at_most_the_torn_step(tmp_path: Path) -> None:
    source = make_trace(sequences=((37, 12, 0),), seed=3)
    per_step = 2 * 2 * 2 + 3
    write_until(tmp_path, source, 5 * per_step + 4, rows_per_part=1)
    assert Trace.recover(tmp_path).meta.n_steps == 5


def test_unreadable_last_part_is_dropped_with_a_note(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    write_until(tmp_path, source, 10**9, rows_per_part=10)
    last = sorted((tmp_path / "selections").glob("*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:100])
    trace = Trace.recover(tmp_path)
    assert any(last.name in note for note in trace.notes)
    assert 0 < trace.meta.n_steps < source.meta["n_steps"]
    assert check_trace(trace).ok


def test_a_finished_trace_is_simply_opened(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    trace = Trace.recover(source.write(tmp_path))
    assert trace.notes == ()
    assert trace.table("selections").num_rows == len(source.tables["selections"])


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.traces.synthetic import make_trace
from nosa_sys.traces.schema import TraceMeta
from nosa_sys.traces.writer import TraceWriter
source = make_trace(sequences=((37, 90, 0),), seed=3, scores=False)
writer = TraceWriter({out!r}, TraceMeta.from_dict(source.meta), rows_per_part=9)
print("ready", flush=True)
for step in range(90):
    for name in ("selections", "steps"):
        for row in source.tables[name]:
            if row["step"] == step:
                writer.add(name, {{k: [v] for k, v in row.items()}})
    time.sleep(0.02)
"""


def test_process_killed_in_mid_run_leaves_a_recoverable_trace(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    out = tmp_path / "t"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(root=root, out=str(out))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    deadline = time.monotonic() + 30
    while len(list(out.glob("steps/*.parquet"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    trace = Trace.recover(out)
    assert trace.meta.n_steps >= 3
    report = check_trace(trace)
    assert report.ok, [str(p) for p in report.problems]
    expected = make_trace(sequences=((37, 90, 0),), seed=3, scores=False).tables["selections"]
    n_rows = trace.meta.n_steps * 4
    assert trace.table("selections").to_pylist() == expected[:n_rows]
