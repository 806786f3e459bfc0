"""Timelines of steps: what was marked comes back, on the run's clock; counters are sums of the marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import read_timeline_file
from nosa_sys.traces.timeline import D2H, GPU, H2D, HOST, TRACKS, Mark, StepMarks, write_timeline

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
