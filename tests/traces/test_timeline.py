"""Timelines of steps: what was marked comes back, on the run's clock; counters are sums of the marks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import read_timeline_file, side_by_side
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import TIMELINE_FILE
from nosa_sys.traces.timeline import (
    D2H,
    GPU,
    H2D,
    HOST,
    TRACKS,
    Mark,
    StepMarks,
    measured_events,
    timeline_events,
    write_timeline,
)
from tests.traces.synthetic import make_trace

FIRST: list[Mark] = [
    (GPU, "select", 0, 0.0, 2.0, 0),
    (H2D, "copy", 0, 2.0, 9.0, 4096),
    (GPU, "attention", 0, 3.0, 8.0, 0),
    (H2D, "copy", 1, 9.0, 9.0, 0),
    (D2H, "write back", -1, 8.0, 8.5, 512),
]
SECOND: list[Mark] = [(H2D, "copy", 0, 1.0, 2.0, 100), (H2D, "copy", 1, 2.0, 3.0, 28), (HOST, "plan", -1, 0.0, 4.0, 0)]


def test_marks_come_back_on_the_clock_of_the_run(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t", [StepMarks(5, 100.0, FIRST, 0.75), StepMarks(6, 200.0, SECOND)])
    events = read_timeline_file(tmp_path / "t")
    open_spans, found = {}, []
    for event in events:
        key = (event.get("cat"), event.get("id"))
        if event["ph"] == "b":
            assert key not in open_spans, "identities are unique"
            open_spans[key] = event
        elif event["ph"] == "e":
            begin = open_spans.pop(key)
            args = begin["args"]
            where = (begin["cat"], begin["name"], args["step"], args["layer"])
            found.append((*where, begin["ts"], event["ts"], args.get("bytes")))
    assert not open_spans
    expected = [
        (track, name, step, layer, zero + start, zero + end, n_bytes if track in (H2D, D2H) else None)
        for step, zero, marks in ((5, 100.0, FIRST), (6, 200.0, SECOND))
        for track, name, layer, start, end, n_bytes in marks
        if end > start
    ]
    assert found == expected
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [
        ("bytes per step", 100.0, {"h2d": 4096, "d2h": 512}),
        ("hit rate", 100.0, {"hits": 0.75}),
        ("bytes per step", 200.0, {"h2d": 128, "d2h": 0}),
    ]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"'compute' must be one of {', '.join(TRACKS)}"):
        write_timeline(tmp_path / "t", [StepMarks(0, 0.0, [("compute", "x", 0, 0.0, 1.0, 0)])])
    with pytest.raises(TraceError, match="before its start"):
        write_timeline(tmp_path / "t", [StepMarks(0, 0.0, [(GPU, "x", 0, 2.0, 1.0, 0)])])
    assert not list(tmp_path.iterdir())


def times_of(trace: Path) -> None:
    """Put times into a trace's steps table: 1, 2, 3 and 4 us for the phases of layer 0, ten times that for layer 1."""
    for part in sorted((trace / "steps").glob("*.parquet")):
        rows = pq.read_table(part)
        layer = np.asarray(rows.column("layer").to_pylist())
        scale = np.where(layer == 1, 10.0, 1.0)
        for i, name in enumerate(("select_us", "h2d_us", "attention_us", "other_us"), start=1):
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), pa.array(scale * i))
        whole = pa.array(np.where(layer < 0, 150.0, 0.0))
        rows = rows.set_column(rows.schema.get_field_index("time_us"), rows.schema.field("time_us"), whole)
        pq.write_table(rows, part)


def test_phases_of_a_run_are_laid_end_to_end_where_it_has_no_marks(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(sequences=((37, 4, 0),)).write(tmp_path / "t"))
    with pytest.raises(TraceError, match="holds no times of its run"):
        measured_events(trace)
    times_of(tmp_path / "t")
    name, events = measured_events(Trace.open(tmp_path / "t"))
    assert name == "measured (phases laid end to end)"
    steps = sorted({e["args"]["step"] for e in events if e["ph"] == "b"})
    first, second = ([e for e in events if e["ph"] == "b" and e["args"]["step"] == s] for s in steps[:2])
    assert [(e["cat"], e["name"], e["args"]["layer"], e["ts"]) for e in first] == [
        (GPU, "select", 0, 0.0), (H2D, "copy", 0, 1.0), (GPU, "attention", 0, 3.0), (GPU, "rest", 0, 6.0),
        (GPU, "select", 1, 10.0), (H2D, "copy", 1, 20.0), (GPU, "attention", 1, 40.0), (GPU, "rest", 1, 70.0),
    ]  # fmt: skip
    assert second[0]["ts"] == 150.0, "the next step begins when the whole step has ended"
    moved = sum(e["args"]["h2d"] for e in events if e["ph"] == "C" and "h2d" in e["args"])
    assert moved == int(trace.selections.h2d_bytes.sum())


def test_clock_marks_win_over_phases(tmp_path: Path) -> None:
    make_trace(sequences=((37, 4, 0),)).write(tmp_path / "t")
    times_of(tmp_path / "t")
    write_timeline(tmp_path / "t" / TIMELINE_FILE, [StepMarks(0, 0.0, FIRST)])
    name, events = measured_events(Trace.open(tmp_path / "t"))
    assert (name, events) == ("measured (clock marks)", timeline_events([StepMarks(0, 0.0, FIRST)]))


def test_runs_side_by_side_keep_their_spans_apart() -> None:
    """A viewer joins async spans of one category and identity, so no two processes may share any."""
    both = side_by_side({"simulated": timeline_events([StepMarks(0, 0.0, FIRST)]),
                         "measured": timeline_events([StepMarks(0, 5.0, SECOND)])})  # fmt: skip
    assert [(e["pid"], e["args"]["name"]) for e in both if e["ph"] == "M"] == [(1, "simulated"), (2, "measured")]
    spans = {(e["cat"], e["id"]): e["pid"] for e in both if e["ph"] == "b"}
    assert len(spans) == sum(e["ph"] == "b" for e in both) == 7
    assert all(spans[e["cat"], e["id"]] == e["pid"] for e in both if e["ph"] == "e")
    assert {e["cat"] for e in both if "cat" in e} == set(TRACKS)
