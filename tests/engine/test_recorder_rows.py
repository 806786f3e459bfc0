"""The recorder's tables against plain loops over dictionaries, on random plans with joins and leaves."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.recorder_rows import count_shared
from nosa_sys.errors import ConfigError
from nosa_sys.traces.reader import Trace
from tests.engine.random_plans import META, Traffic, play, random_traffic

BLOCK_BYTES = META.block_bytes


def expected_selections(traffic: Traffic) -> list[dict[str, Any]]:
    rows, previous = [], {}
    for plan in traffic.plans:
        batch = plan.batch
        for b, sequence in enumerate(batch.sequences):
            for layer in range(plan.n_misses.shape[0]):
                for head in range(plan.n_misses.shape[2]):
                    k = int(plan.counts[b])
                    ids = plan.block_ids[layer, b, head].tolist()[:k]
                    key = (sequence, layer, head)
                    gamma = None if batch.cold[b] else len(set(ids) & previous[key]) / k
                    previous[key] = set(ids)
                    misses = int(plan.n_misses[layer, b, head])
                    rows.append(
                        {
                            "step": batch.step,
                            "position": batch.positions[b],
                            "sequence": sequence,
                            "layer": layer,
                            "kv_head": head,
                            "block_ids": ids,
                            "origins": plan.origins[layer, b, head].tolist()[:k],
                            "n_misses": misses,
                            "h2d_bytes": misses * BLOCK_BYTES,
                            "gamma": gamma,
                            "cold": batch.cold[b],
                        }
                    )
    return rows


def expected_steps(traffic: Traffic) -> list[dict[str, Any]]:
    rows = []
    for plan in traffic.plans:
        n_layers, n_rows, n_heads = plan.n_misses.shape
        written = sum((p + 1) % META.sparse.block_size == 0 for p in plan.batch.positions)
        own = []
        for layer in range(n_layers):
            misses = sum(plan.n_misses[layer].ravel().tolist())
            row = {
                "step": plan.batch.step,
                "layer": layer,
                "n_sequences": n_rows,
                "n_misses": misses,
                "h2d_bytes": misses * BLOCK_BYTES,
                "d2h_bytes": written * n_heads * BLOCK_BYTES,
                "prefetch_bytes": 0 if plan.prefetch_loads is None else int(plan.prefetch_loads[layer]) * BLOCK_BYTES,
                "wasted_prefetch_bytes": 0
                if plan.wasted_loads is None
                else int(plan.wasted_loads[layer]) * BLOCK_BYTES,
                "time_us": None,
                **dict.fromkeys(PHASES),
            }
            if plan.phase_us is not None:
                row |= {name: float(plan.phase_us[name][layer]) for name in PHASES}
                row["time_us"] = sum(row[name] for name in PHASES)
            own.append(row)
        total = {"step": plan.batch.step, "layer": -1, "n_sequences": n_rows, "time_us": plan.time_us}
        for name in set(own[0]) - set(total):
            values = [row[name] for row in own]
            total[name] = None if None in values else sum(values)
        rows += [*own, total]
    return rows


def expected_scores(traffic: Traffic) -> list[dict[str, Any]]:
    rows = []
    for plan in traffic.plans:
        n_layers, n_rows, n_heads = plan.n_misses.shape
        for layer in range(n_layers):
            for b in range(n_rows):
                for head in range(n_heads):
                    key = (plan.batch.step, plan.batch.sequences[b], layer, head)
                    n_windows = META.sparse.n_windows(plan.batch.positions[b] + 1)
                    scores = plan.window_scores[layer, b, head].tolist()[:n_windows]
                    rows.append(
                        dict(
                            zip(("step", "sequence", "layer", "kv_head", "window_scores"), (*key, scores), strict=True)
                        )
                    )
    return rows


def expected_betas(traffic: Traffic) -> list[dict[str, Any]]:
    rows = []
    for plan in traffic.plans:
        if plan.new_beta_means is None:
            continue
        for layer, done, head in np.ndindex(plan.new_beta_means.shape):
            b = plan.batch.windows_done[done]
            rows.append(
                {
                    "sequence": plan.batch.sequences[b],
                    "layer": layer,
                    "kv_head": head,
                    "window": META.sparse.n_windows(plan.batch.positions[b] + 1) - 1,
                    "beta_mean": float(plan.new_beta_means[layer, done, head]),
                }
            )
    return rows


def assert_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert set(mine) == set(other)
        for name, value in other.items():
            if isinstance(value, float):
                assert math.isclose(mine[name], value, rel_tol=1e-12), (name, mine, other)
            else:
                assert mine[name] == value, (name, mine, other)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("seed", "method"), [(0, "nosa"), (1, "nosa"), (2, "nosa"), (3, "full")])
def test_tables_equal_plain_loops(tmp_path: Path, seed: int, method: str, background: bool) -> None:
    traffic = random_traffic(seed, 40, method=method, scores=True)
    with Recorder(tmp_path / "t", background=background) as recorder:
        for _ in play(traffic, recorder, dense=method == "full"):
            pass
    trace = Trace.open(tmp_path / "t")
    for table, expected in (
        ("selections", expected_selections(traffic)),
        ("steps", expected_steps(traffic)),
        ("scores", expected_scores(traffic)),
        ("betas", expected_betas(traffic)),
    ):
        assert_rows(trace.table(table).to_pylist(), expected)
    counts = {}
    for plan in traffic.plans:
        for sequence in plan.batch.sequences:
            counts[sequence] = counts.get(sequence, 0) + 1
    assert {info.id: info.new_tokens for info in trace.meta.sequences} == counts
    assert trace.meta.n_steps == 40
    if method == "full":
        assert trace.meta.slots == max(max(plan.batch.blocks) for plan in traffic.plans)


def test_random_traffic_has_what_it_is_for() -> None:
    """Rows join, leave, change place in the batch, and select fewer than k blocks beside others of k."""
    plans = random_traffic(0, 40).plans
    assert any(len(set(plan.counts.tolist())) > 1 for plan in plans)
    assert any(set(a.batch.sequences) != set(b.batch.sequences) for a, b in itertools.pairwise(plans))
    assert any(sum(plan.batch.cold) not in (0, plan.batch.size) for plan in plans)
    assert any(sorted(plan.batch.sequences) != plan.batch.sequences for plan in plans)


def test_a_plan_without_its_selection_is_refused(tmp_path: Path) -> None:
    traffic = random_traffic(0, 1)
    object.__setattr__(traffic.plans[0], "block_ids", None)
    with pytest.raises(ConfigError, match="step 0 holds no selection"):
        list(play(traffic, Recorder(tmp_path)))


@pytest.mark.parametrize("table_bytes", [1, 100, 2**20])
def test_count_shared_against_sets(monkeypatch: pytest.MonkeyPatch, table_bytes: int) -> None:
    """Rows of different sizes, padded; whatever number of them is counted at once."""
    monkeypatch.setattr("nosa_sys.engine.recorder_rows._TABLE_BYTES", table_bytes)
    rng = np.random.default_rng(0)
    for _ in range(50):
        sides = []
        for width in rng.integers(1, 9, 2):
            side = np.full((3, 2, width), -1, dtype=np.int32)
            for row in np.ndindex(3, 2):
                k = int(rng.integers(0, width + 1))
                side[row][:k] = np.sort(rng.choice(9, k, replace=False))
            sides.append(side)
        a, b = sides
        expected = [
            [len((set(x) & set(y)) - {-1}) for x, y in zip(*p, strict=True)]
            for p in zip(a.tolist(), b.tolist(), strict=True)
        ]
        assert count_shared(a, b).tolist() == expected
