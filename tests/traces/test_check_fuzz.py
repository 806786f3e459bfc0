"""Any field set to any value: the check reports or accepts, replay refuses or answers, neither ever crashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.errors import NosaError
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import SCHEMAS
from nosa_sys.traces.statistics import trace_statistics
from tests.traces.synthetic import make_trace

EXTREMES = {
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}


def value_for(kind: str, draw: Any) -> Any:
    if kind in EXTREMES:
        low, high = EXTREMES[kind]
        return draw(st.sampled_from([low, high, -1, 0, 1, 2, 7, 100 if kind != "int8" else 5]))
    if kind == "bool":
        return draw(st.booleans())
    return draw(st.sampled_from([0.0, -1.0, 0.5, float("nan"), float("inf"), 1e300 if kind == "double" else 1e30]))


@settings(max_examples=120)
@given(data=st.data())
def test_nothing_crashes_on_hostile_fields(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    source = make_trace(sequences=((38, 4, 0), (3, 3, 1)), policy=data.draw(st.sampled_from(["exact", "lru", "beta"])))
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from(sorted(source.tables)))
        rows = source.tables[table]
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        name = data.draw(st.sampled_from(sorted(row)))
        kind = str(SCHEMAS[table].field(name).type)
        if kind.startswith("list"):
            element = str(SCHEMAS[table].field(name).type.value_type)
            length = data.draw(st.integers(0, 12))
            row[name] = [value_for(element, data.draw) for _ in range(length)]
        else:
            row[name] = value_for(kind, data.draw)
    for key in ("slots", "n_steps"):
        if data.draw(st.integers(0, 9)) == 0:
            source.meta[key] = data.draw(st.sampled_from([0, 1, 10**9]))
    trace = Trace.open(source.write(tmp_path_factory.mktemp("fuzz")))
    report = check_trace(trace)
    assert len(report.problems) <= sum(report.counts.values())
    for use in (
        lambda: replay(trace),
        lambda: replay(trace, slots=12, policy="belady"),
        lambda: replay(trace, method="infllmv2"),
        lambda: MissTable.from_trace(trace).per_layer_step(),
        lambda: trace_statistics(trace).to_dict(),
    ):
        try:
            use()
        except NosaError:
            assert not report.ok or trace.meta.slots < 8


def test_empty_lists_and_no_rows_are_reported(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = make_trace()
    source.tables["selections"][3].update(block_ids=[], origins=[])
    report = check_trace(Trace.open(source.write(tmp_path_factory.mktemp("a"))))
    assert ("budget", 3) in {(p.rule, p.row) for p in report.problems}
    source = make_trace()
    for rows in source.tables.values():
        rows.clear()
    report = check_trace(Trace.open(source.write(tmp_path_factory.mktemp("b"))))
    assert set(report.counts) == {"n-steps"}
    assert np.isfinite(report.n_rows)
