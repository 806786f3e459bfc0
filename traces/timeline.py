"""Timelines of decode steps, real or simulated: which work ran when on which track, bytes moved and hit rate."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import counter, read_timeline_file, span, write_timeline_file
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import TIMELINE_FILE

GPU, H2D, D2H, HOST = TRACKS = ("gpu", "h2d", "d2h", "host")

# Phases of a layer in the steps table: track, name, column.
_PHASES = (
    (GPU, "select", "select_us"),
    (H2D, "copy", "h2d_us"),
    (GPU, "attention", "attention_us"),
    (GPU, "rest", "other_us"),
)

# track, name, layer, start_us, end_us, n_bytes (0 for anything but transfers)
Mark = tuple[str, str, int, float, float, int]


@dataclass(frozen=True)
class StepMarks:
    """What ran at one step: times in microseconds from ``begin_us``, which counts from one zero of the whole run.

    ``hit_rate`` is the share of the selected blocks that were resident, None where it is not known.
    """

    step: int
    begin_us: float
    marks: Sequence[Mark]
    hit_rate: float | None = None


def write_timeline(path: str | Path, steps: Iterable[StepMarks]) -> None:
    """Write Chrome trace events (gzip, opens in Perfetto): an async track for each of TRACKS, so that copies show
    beside the kernels they overlap, and counters of the bytes and the hit rate of every step.

    Marks of no length are left out, though their bytes count. Raises TraceError for an unknown track, for a mark that
    ends before it starts, and where the file cannot be written.
    """
    write_timeline_file(Path(path), timeline_events(steps))


def timeline_events(steps: Iterable[StepMarks]) -> list[dict[str, Any]]:
    """The events of `write_timeline`; TraceError as there."""
    events: list[dict[str, Any]] = []
    identity = 0
    for one in steps:
        moved = {H2D: 0, D2H: 0}
        for track, name, layer, start_us, end_us, n_bytes in one.marks:
            if track not in TRACKS:
                raise TraceError(f"timeline track {track!r} must be one of {', '.join(TRACKS)}")
            args = {"step": one.step, "layer": layer}
            if track in moved:
                moved[track] += n_bytes
                args["bytes"] = n_bytes
            if end_us == start_us:
                continue
            identity += 1
            begin, end = one.begin_us + start_us, one.begin_us + end_us
            events += span(name, track, begin, end, identity=identity, args=args)
        events.append(counter("bytes per step", one.begin_us, moved))
        if one.hit_rate is not None:
            events.append(counter("hit rate", one.begin_us, {"hits": one.hit_rate}))
    return events


def measured_events(trace: Trace) -> tuple[str, list[dict[str, Any]]]:
    """What a trace knows of its own run's times: (how it knows, events).

    Its clock marks where it holds a timeline; else the phases of its steps table laid end to end, which is the order
    in which the eager runner works. TraceError where it has neither.
    """
    file = trace.directory / TIMELINE_FILE
    if file.is_file():
        return "measured (clock marks)", read_timeline_file(file)
    steps = [one for one in _laid_out(trace) if one.marks]
    if not steps:
        raise TraceError(
            f"trace {trace.directory} holds no times of its run; capture it with --timeline (runner graph or kernels), "
            "or with the eager runner"
        )
    return "measured (phases laid end to end)", timeline_events(steps)


def _laid_out(trace: Trace) -> Iterator[StepMarks]:
    """Phases of every step and layer one after another; what of a step is in no layer stays a gap at its end."""
    begin = 0.0
    rows = trace.table("steps").sort_by([("step", "ascending"), ("layer", "ascending")]).to_pylist()
    for step, group in itertools.groupby(rows, key=operator.itemgetter("step")):
        whole, *layers = list(group)  # the whole step has layer -1
        marks: list[Mark] = []
        at = 0.0
        for row in layers:
            if any(row[column] is None for _, _, column in _PHASES):
                continue
            for track, name, column in _PHASES:
                n_bytes = row["h2d_bytes"] if track == H2D else 0
                marks.append((track, name, row["layer"], at, at + row[column], n_bytes))
                at += row[column]
            marks.append((D2H, "write-back", row["layer"], at, at, row["d2h_bytes"]))
        yield StepMarks(step, begin, marks)
        begin += max(at, whole["time_us"] or 0.0)
