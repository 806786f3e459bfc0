"""A trace check as a JSON-ready document; shared by the CLI and the demo. Loads no torch."""

from __future__ import annotations

from typing import Any

from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace

_SHOWN_PROBLEMS = 20


def check_document(trace: Trace) -> dict[str, Any]:
    """The check's outcome, JSON-ready; at most the first problems are listed, all are counted."""
    report = check_trace(trace)
    return {
        "kind": "trace_check",
        "ok": report.ok,
        "n_rows": report.n_rows,
        "n_problems": sum(report.counts.values()),
        "counts": dict(report.counts),
        "problems": [
            {"table": p.table, "row": p.row, "rule": p.rule, "detail": p.detail}
            for p in report.problems[:_SHOWN_PROBLEMS]
        ],
        "facts": dict(report.facts),
        "notes": list(trace.notes),
    }
