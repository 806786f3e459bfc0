"""Timelines: Chrome trace events, whole or not at all, equal to the byte for equal events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import counter, read_timeline_file, span, write_timeline_file


def events() -> list[dict]:
    return [
        *span("fetch", "h2d", 0.0, 4.0, identity=1, args={"bytes": 32768}),
        *span("attention", "compute", 1.0, 3.0, identity=2),
        counter("hit rate", 4.0, {"hits": 0.9}),
    ]


def test_round_trip_with_overlapping_spans(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    write_timeline_file(path, events())
    data = json.loads(gzip.decompress(path.read_bytes()))
    assert data["traceEvents"] == events()
    assert read_timeline_file(path) == events()
    assert [e["ph"] for e in events()] == ["b", "e", "b", "e", "C"]
    assert not list(tmp_path.glob("*.partial"))


def test_same_events_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_timeline_file(tmp_path / name, events())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="before its start"):
        span("fetch", "h2d", 5.0, 4.0, identity=1)
    with pytest.raises(TraceError, match="timeline"):
        write_timeline_file(tmp_path / "t", [counter("x", float("nan"), {})])
    assert not list(tmp_path.iterdir())
    write_timeline_file(tmp_path / "t", events())
    whole = (tmp_path / "t").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "t").write_bytes(whole[:size])
        with pytest.raises(TraceError, match="cannot read timeline"):
            read_timeline_file(tmp_path / "t")
