"""check_trace: verifies any trace, ours or foreign, against the schema, the counting rules and the locality bounds."""

from __future__ import annotations

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.methods import get_method
from nosa_sys.traces.check_counts import check_counts
from nosa_sys.traces.check_rows import check_rows
from nosa_sys.traces.check_tables import check_betas, check_prefill, check_scores, check_steps
from nosa_sys.traces.findings import CheckReport, Findings, Problem
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.rows import SelectionRows
from nosa_sys.traces.schema import SCHEMAS, TraceMeta

__all__ = ["CheckReport", "Problem", "check_trace"]


def check_trace(trace: Trace) -> CheckReport:
    """Apply every rule that the trace's tables allow; never raises for what the trace holds.

    Rules about residency and locality skip streams that already broke a structural rule. Cold rows are exempt from
    the bounds, and may claim any number of misses up to |G|. docs/trace-format.md lists the rules.
    """
    findings = Findings()
    readable = {name: _readable(trace, name, findings) for name in SCHEMAS}
    if not readable["selections"]:
        return CheckReport(findings.problems, 0, dict(findings.counts), findings.facts)
    rows, sound = check_rows(trace, findings)
    _check_meta(trace.meta, rows, findings)
    if readable["steps"]:
        check_steps(trace, rows, findings)
    if readable["prefill"]:
        check_prefill(trace, findings)
    if readable["scores"]:
        check_scores(trace, rows, findings)
    if readable["betas"]:
        check_betas(trace, rows, findings)
    check_counts(trace, rows, sound, findings, scores=readable["scores"], betas=readable["betas"])
    findings.facts.update(
        n_rows=len(rows),
        n_cold_rows=int(rows.cold.sum()),
        n_sequences=len(np.unique(rows.sequence)),
        n_steps=len(np.unique(rows.step)),
        status=trace.meta.status,
        complete=trace.meta.complete,
        notes=list(trace.notes),
    )
    return CheckReport(findings.problems, len(rows), dict(findings.counts), findings.facts)


def _readable(trace: Trace, name: str, findings: Findings) -> bool:
    """Whether the table is there and of the schema; a missing required table is a problem, an optional one is not."""
    required = name in ("selections", "steps")
    try:
        if not required and not trace.has(name):
            return False
        trace.table(name)
        return True
    except TraceError as error:
        findings.add(name, None, "schema", str(error))
        return False


def _check_meta(meta: TraceMeta, rows: SelectionRows, findings: Findings) -> None:
    method = get_method(meta.method)
    if not method.dense and meta.slots < meta.sparse.topk:
        findings.add("meta", None, "slots", f"slots={meta.slots} is fewer than topk={meta.sparse.topk}")
    known = {info.id: info for info in meta.sequences}
    if not known or not len(rows):
        return
    ids, first, of_row = np.unique(rows.sequence, return_index=True, return_inverse=True)
    begins = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(begins, of_row, rows.position)
    n_tokens = np.bincount(np.unique(np.stack([of_row, rows.step], axis=1), axis=0)[:, 0], minlength=len(ids))
    for index, (number, row) in enumerate(zip(ids.tolist(), first.tolist(), strict=True)):
        if number not in known:
            findings.add("selections", row, "known-sequence", f"sequence {number} is not listed in meta.json")
            continue
        info = known[number]
        if info.prompt_tokens and begins[index] != info.prompt_tokens - 1:
            findings.add(
                "selections",
                row,
                "first-position",
                f"sequence {number} begins at position {begins[index]}; its prompt of {info.prompt_tokens} tokens "
                f"ends at {info.prompt_tokens - 1}",
            )
        if info.new_tokens and n_tokens[index] != info.new_tokens:
            findings.add(
                "meta", None, "new-tokens", f"sequence {number}: {n_tokens[index]} steps, new_tokens={info.new_tokens}"
            )
