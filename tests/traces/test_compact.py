"""Compact traces hold the same rows, pass the check, and replay to the same figures; rounded scores select the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import TraceError
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.compact import FULL_BITS, compact_trace, round_scores
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from tests.traces.synthetic import SMALL, make_trace

SEQUENCES = ((37, 9, 0), (50, 7, 2), (44, 5, 1))


def written(path: Path, **options: Any) -> Trace:
    return Trace.open(make_trace(sequences=SEQUENCES, **options).write(path))


def rows_of(trace: Trace, table: str) -> list[str]:
    """The rows of a table in an order of their own; of the steps, those over all layers."""
    rows = trace.table(table).to_pylist()
    return sorted(repr(sorted(row.items())) for row in rows if table != "steps" or row["layer"] == -1)


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma", "full"])
def test_the_same_rows_in_less_space(tmp_path: Path, method: str) -> None:
    trace = written(tmp_path / "t", method=method)
    compact_trace(trace, tmp_path / "c", score_bits=FULL_BITS)
    small = Trace.open(tmp_path / "c")
    for table in ("selections", "steps", "scores", "betas", "prefill"):
        assert rows_of(small, table) == rows_of(trace, table)
    assert small.meta == trace.meta
    assert small.table("steps").num_rows == trace.meta.n_steps
    assert check_trace(small).ok
    assert replay(small, slots=10, policy="lru").summary() == replay(trace, slots=10, policy="lru").summary()
    assert replay(small, method="infllmv2").summary() == replay(trace, method="infllmv2").summary()


def test_a_long_trace_takes_less_space(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(sequences=((37, 120, 0),), scores=False).write(tmp_path / "t"))
    compact_trace(trace, tmp_path / "c")
    sizes = [sum(p.stat().st_size for p in (tmp_path / name / "selections").iterdir()) for name in ("t", "c")]
    assert sizes[1] < 0.7 * sizes[0]


def test_without_scores_slots_still_replay(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    compact_trace(trace, tmp_path / "c")
    small = Trace.open(tmp_path / "c")
    assert not small.has("scores")
    assert not small.has("betas")
    assert check_trace(small).ok
    assert replay(small).summary() == replay(trace).summary()
    with pytest.raises(TraceError, match="carries no scores"):
        replay(small, method="infllmv2")


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma", "full"])
@pytest.mark.parametrize("bits", [1, 4])
def test_rounded_scores_select_the_same(tmp_path: Path, method: str, bits: int) -> None:
    trace = written(tmp_path / "t", method=method)
    compact_trace(trace, tmp_path / "c", score_bits=bits)
    small = Trace.open(tmp_path / "c")
    report = check_trace(small)  # selects again from the scores
    assert report.ok, report.problems
    assert method == "full" or report.facts["n_rows_reselected"] > 0
    was, is_now = (_scores_by_row(t) for t in (trace, small))
    assert was.keys() == is_now.keys()
    changed = 0
    for key, values in was.items():
        error = np.abs(is_now[key] - values) / np.maximum(values, 1e-30)
        assert error.max(initial=0) <= 2.0**-bits
        changed += bool((is_now[key] != values).any())
    assert changed  # and not simply all rows kept whole


def _scores_by_row(trace: Trace) -> dict[tuple[int, ...], np.ndarray]:
    keys = ("step", "sequence", "layer", "kv_head")
    return {
        tuple(row[key] for key in keys): np.array(row["window_scores"]) for row in trace.table("scores").to_pylist()
    }


def test_some_sequences_alone(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    compact_trace(trace, tmp_path / "c", sequences=(0, 2), score_bits=FULL_BITS)
    small = Trace.open(tmp_path / "c")
    assert check_trace(small).ok
    assert [info.id for info in small.meta.sequences] == [0, 2]
    for table in ("selections", "scores", "betas", "prefill"):
        kept = [row for row in trace.table(table).to_pylist() if row["sequence"] != 1]
        assert rows_of(small, table) == sorted(repr(sorted(row.items())) for row in kept)
    misses: dict[int, int] = defaultdict(int)
    members: dict[int, set[int]] = defaultdict(set)
    for row in trace.table("selections").to_pylist():
        if row["sequence"] != 1:
            misses[row["step"]] += row["n_misses"]
            members[row["step"]].add(row["sequence"])
    steps = {row["step"]: row for row in small.table("steps").to_pylist()}
    assert {step: row["n_misses"] for step, row in steps.items()} == misses
    assert all(row["n_sequences"] == len(members[step]) for step, row in steps.items())
    assert all(row["time_us"] is None for row in steps.values())
    assert any(row["d2h_bytes"] for row in steps.values())


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    with pytest.raises(TraceError, match="no sequence 7"):
        compact_trace(trace, tmp_path / "c", sequences=(0, 7))
    for bits in (0, 25):
        with pytest.raises(TraceError, match=f"score_bits={bits}"):
            compact_trace(trace, tmp_path / "c", score_bits=bits)
    prefetched = make_trace(sequences=SEQUENCES)
    prefetched.tables["steps"][-1]["prefetch_bytes"] = 512
    with pytest.raises(TraceError, match="prefetched bytes"):
        compact_trace(Trace.open(prefetched.write(tmp_path / "p")), tmp_path / "c", sequences=(0,))


@given(st.lists(st.floats(0, 3, width=32), min_size=1, max_size=40), st.integers(1, FULL_BITS))
def test_rounding_keeps_order_and_bits(values: list[float], bits: int) -> None:
    given_values = np.sort(np.array(values, dtype=np.float32))
    found = round_scores(given_values, bits)
    assert (np.diff(found) >= 0).all()
    normal = given_values > 2.0**-126
    error = np.abs(found.astype(np.float64) - given_values)
    assert (error[normal] <= given_values[normal] * 2.0**-bits).all()
    assert ((found.view(np.uint32) & ((1 << (FULL_BITS - bits)) - 1)) == 0).all()
    assert (round_scores(found, bits) == found).all()
    if bits == FULL_BITS:
        assert (found == given_values).all()


def test_another_budget_works_on_a_small_block(tmp_path: Path) -> None:
    """The sizes of SMALL, named: a budget that the trace was not captured under replays from whole scores."""
    other = SparseConfig(
        block_size=SMALL.block_size,
        kernel_size=4,
        kernel_stride=2,
        topk=7,
        init_blocks=1,
        window_size=8,
        select_blocks=2,
    )
    trace = written(tmp_path / "t")
    compact_trace(trace, tmp_path / "c", score_bits=FULL_BITS)
    assert replay(Trace.open(tmp_path / "c"), sparse=other).summary() == replay(trace, sparse=other).summary()
