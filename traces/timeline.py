"""Timelines of decode steps, real or simulated: which work ran when on which track, bytes moved and hit rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import counter, span, write_timeline_file

GPU, H2D, D2H, HOST = TRACKS = ("gpu", "h2d", "d2h", "host")

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
    events: list[Mapping[str, object]] = []
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
    write_timeline_file(Path(path), events)
