"""Timelines as Chrome trace events (Perfetto, chrome://tracing): copies and kernels overlap as async tracks."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nosa_sys.errors import TraceError


def span(
    name: str, track: str, start_us: float, end_us: float, *, identity: int, args: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One interval as an async begin/end pair: async tracks may overlap, so a copy shows beside the kernel it hides.

    ``identity`` must be unique within the track.
    """
    if end_us < start_us:
        raise TraceError(f"timeline span {name!r} ends at {end_us} us, before its start at {start_us} us")
    common = {"name": name, "cat": track, "id": identity, "pid": 1, "tid": track}
    return [
        {**common, "ph": "b", "ts": start_us, "args": dict(args or {})},
        {**common, "ph": "e", "ts": end_us},
    ]


def counter(name: str, time_us: float, values: Mapping[str, float]) -> dict[str, Any]:
    """One sample of a counter track, for example bytes moved or the hit rate of a step."""
    return {"name": name, "ph": "C", "ts": time_us, "pid": 1, "args": dict(values)}


def side_by_side(groups: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Events of several timelines in one, each under a process of its own that bears its name.

    Identities are numbered anew: a viewer joins async spans of equal category and identity across processes.
    """
    found: list[dict[str, Any]] = []
    numbers: dict[tuple[int, Any, Any], int] = {}
    for process, (name, events) in enumerate(groups.items(), start=1):
        found.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for event in events:
            moved = {**event, "pid": process}
            if "id" in event:
                key = (process, event.get("cat"), event["id"])
                moved["id"] = numbers.setdefault(key, len(numbers) + 1)
            found.append(moved)
    return found


def write_timeline_file(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Write the events as ``{"traceEvents": [...]}``, gzipped, whole or not at all, the same bytes for the same events.

    NaN and infinity are refused with a TraceError: no viewer reads them.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ns"}, allow_nan=False)
    except ValueError as error:
        raise TraceError(f"timeline {path}: {error}") from None
    try:
        with open(partial, "wb") as handle:
            # mtime 0: the archive of equal events is equal to the byte
            with gzip.GzipFile(filename="", mode="wb", fileobj=handle, mtime=0) as archive:
                archive.write(text.encode("utf-8"))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from None


def read_timeline_file(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline file; TraceError when it is missing, cut short or no timeline."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"cannot read timeline {path}: {error}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise TraceError(f"{path} holds no traceEvents list")
    return events
