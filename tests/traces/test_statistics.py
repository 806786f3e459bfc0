"""Statistics against plain loops over the synthetic rows."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.statistics import trace_statistics
from tests.traces.synthetic import SyntheticTrace, make_trace

SEQUENCES = ((40, 14, 0), (3, 40, 2))


def streams_of(source: SyntheticTrace) -> dict[tuple, list[dict]]:
    out: dict[tuple, list[dict]] = {}
    for row in sorted(source.tables["selections"], key=lambda r: r["step"]):
        out.setdefault((row["sequence"], row["layer"], row["kv_head"]), []).append(row)
    return out


@pytest.mark.parametrize(("policy", "slots"), [("exact", 8), ("lru", 11)])
def test_means_and_sums(tmp_path: Path, policy: str, slots: int) -> None:
    source = make_trace(sequences=SEQUENCES, policy=policy, slots=slots)
    found = trace_statistics(Trace.open(source.write(tmp_path)))
    rows = source.tables["selections"]
    warm = [r for r in rows if not r["cold"]]
    blocks = sum(len(r["block_ids"]) for r in warm)
    misses = sum(r["n_misses"] for r in warm)
    assert (found.n_rows, found.n_warm_rows) == (len(rows), len(warm))
    assert found.n_steps == 42
    assert found.n_sequences == 2
    assert found.gamma_macro_mean == pytest.approx(sum(r["gamma"] for r in warm) / len(warm))
    weighted = sum(r["gamma"] * len(r["block_ids"]) for r in warm) / blocks
    assert found.gamma_block_weighted_mean == pytest.approx(weighted)
    assert found.gamma_macro_mean != pytest.approx(weighted)
    assert found.gamma_min == min(r["gamma"] for r in warm)
    assert found.misses_total == sum(r["n_misses"] for r in rows)
    assert found.misses_warm == misses
    assert found.hit_rate == pytest.approx(1 - misses / blocks)
    assert found.h2d_bytes == sum(r["h2d_bytes"] for r in rows)
    assert found.d2h_bytes == sum(r["d2h_bytes"] for r in source.tables["steps"] if r["layer"] == -1)
    assert found.sparse_row_share == sum(r["position"] // 4 + 1 > 8 for r in rows) / len(rows)
    assert found.misses_per_row_max == max(r["n_misses"] for r in warm)
    assert found.notes == []


def test_tables_by_head_layer_and_step(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    found = trace_statistics(Trace.open(source.write(tmp_path)))
    for record in found.by_head.to_dict("records"):
        own = [r for r in source.rows(layer=record["layer"], kv_head=record["kv_head"]) if not r["cold"]]
        assert record["gamma_macro_mean"] == pytest.approx(sum(r["gamma"] for r in own) / len(own))
        assert record["misses_per_row"] == pytest.approx(sum(r["n_misses"] for r in own) / len(own))
        assert record["n_rows"] == len(own)
    assert len(found.by_head) == 4
    assert len(found.by_layer) == 2
    for record in found.by_layer_step.to_dict("records"):
        own = [r for r in source.rows(layer=record["layer"], step=record["step"]) if not r["cold"]]
        assert record["gamma_macro_mean"] == pytest.approx(sum(r["gamma"] for r in own) / len(own))


def test_origins_and_their_misses(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    found = trace_statistics(Trace.open(source.write(tmp_path)))
    blocks: Counter[int] = Counter()
    misses: Counter[int] = Counter()
    for rows in streams_of(source).values():
        for before, row in itertools.pairwise(rows):
            for block, origin in zip(row["block_ids"], row["origins"], strict=True):
                blocks[origin] += 1
                current = row["position"] // 4
                misses[origin] += block not in before["block_ids"] and block != current
    assert found.origins["n_blocks"].tolist() == [blocks[i] for i in range(5)]
    assert found.origins["n_misses"].tolist() == [misses[i] for i in range(5)]
    assert found.origins["share"].sum() == pytest.approx(1)
    assert found.origins["n_misses"].sum() == found.misses_warm


def test_reuse_distances(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    found = trace_statistics(Trace.open(source.write(tmp_path)))
    expected: Counter[int] = Counter()
    for rows in streams_of(source).values():
        last: dict[int, int] = {}
        for time, row in enumerate(rows):
            for block in row["block_ids"]:
                if block in last:
                    expected[time - last[block]] += 1
                last[block] = time
    assert found.reuse_steps == dict(sorted(expected.items()))


def test_miss_curve_encloses_replays(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(sequences=SEQUENCES, levels=3).write(tmp_path))
    curve = trace_statistics(trace).lru_miss_curve
    assert [s for s, _, _ in curve] == [8, 10, 12, 14, 16, 18, 20, 22, 24]
    for slots, low, high in curve:
        assert low <= replay(trace, slots=slots, policy="lru").misses.n_misses.sum() <= high
    assert curve[0][1] == curve[0][2]  # slots = k leaves no choice


def test_case_10_never_sparse_says_so(tmp_path: Path) -> None:
    """case 10: a context within the budget reports a sparse share of 0 and no loads, and says it."""
    found = trace_statistics(Trace.open(make_trace(sequences=((9, 6, 0),)).write(tmp_path / "a")))
    assert found.sparse_row_share == 0
    assert found.misses_warm == 0
    assert any("never sparse" in note for note in found.notes)
    found = trace_statistics(Trace.open(make_trace(sequences=((60, 20, 0),)).write(tmp_path / "b")))
    assert found.sparse_row_share == 1
    assert found.misses_warm > 0


def test_of_a_replay(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(sequences=SEQUENCES).write(tmp_path))
    result = replay(trace, method="infllmv2", slots=10)
    found = trace_statistics(trace, result)
    assert found.misses_total == result.misses.n_misses.sum()
    assert found.gamma_macro_mean == pytest.approx(result.summary()["gamma_macro_mean"])
    assert any("queries" in note for note in found.notes)


def test_plain_data_even_of_nothing(tmp_path: Path) -> None:
    source = make_trace(sequences=((9, 1, 0),), scores=False, policy="beta", slots=9)
    found = trace_statistics(Trace.open(source.write(tmp_path)))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["gamma_macro_mean"] is None
    assert data["hit_rate"] is None
    assert data["by_head"] == []
    assert data["origins"][0]["n_misses"] is None
    assert any("unknown" in note for note in data["notes"])
