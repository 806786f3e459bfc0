"""Injected sets, judged by plain Python sets. The locality theorem does not apply to them and is not asserted."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.engine.injected_guesses import with_guesses
from nosa_sys.engine.injection import Injection, Misses, geometric_origins, synthetic_injection, trace_injection
from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import ORIGIN_DENSE, ORIGIN_QUERY, ORIGIN_SINK, ORIGIN_WINDOW
from tests.traces.synthetic import make_trace

SMALL = SparseConfig(
    block_size=16, kernel_size=16, kernel_stride=8, topk=5, init_blocks=1, window_size=16, select_blocks=2
)
WIDE = SparseConfig(
    block_size=4, kernel_size=4, kernel_stride=2, topk=12, init_blocks=1, window_size=8, select_blocks=6
)


def set_of(injection: Injection, step: int, cell: tuple[int, int, int]) -> list[int]:
    return [block for block in injection.ids_table[(step, *cell)].tolist() if block >= 0]


def walk(injection: Injection, sparse: SparseConfig) -> dict[tuple[int, int, int], list[int]]:
    """Checks every set and counts each cell's misses by step: blocks not in the last set, the born one left out."""
    n_steps, n_layers, batch, heads, k = injection.ids_table.shape
    assert k == sparse.topk
    misses: dict[tuple[int, int, int], list[int]] = {}
    for cell in itertools.product(range(n_layers), range(batch), range(heads)):
        before: set[int] = set()
        for step in range(n_steps):
            position = injection.contexts[cell[1]] - 1 + step
            current = position // sparse.block_size
            ids = set_of(injection, step, cell)
            row = injection.ids_table[(step, *cell)].tolist()
            assert row == ids + [-1] * (k - len(ids)), "padding stands behind the ids"
            assert ids == sorted(set(ids))
            assert len(ids) == min(k, current + 1)
            assert ids[0] >= 0
            assert ids[-1] == current
            for block in range(current + 1):
                if block < sparse.init_blocks or block >= current - sparse.local_blocks:
                    assert block in ids
            if step:
                fresh = set(ids) - before
                if position % sparse.block_size == 0:
                    assert current in fresh
                    fresh.discard(current)
                misses.setdefault(cell, []).append(len(fresh))
            before = set(ids)
    return misses


@settings(deadline=None, max_examples=40)
@given(
    sparse=st.sampled_from([SMALL, WIDE]),
    method=st.sampled_from(["nosa", "infllmv2", "dma"]),
    contexts=st.lists(st.integers(1, 240), min_size=1, max_size=3),
    n_steps=st.integers(1, 40),
    rate=st.one_of(st.floats(0, 8), st.dictionaries(st.integers(0, 6), st.floats(0.1, 1), min_size=1, max_size=3)),
    seed=st.integers(0, 5),
)
def test_sets_are_valid_and_never_miss_more_than_may(
    sparse: SparseConfig, method: str, contexts: list[int], n_steps: int, rate: Misses, seed: int
) -> None:
    injection = synthetic_injection(sparse, method, 2, 2, contexts, n_steps, rate, seed)
    found = walk(injection, sparse)
    picks = {"nosa": sparse.query_budget, "infllmv2": sparse.topk, "dma": 0}[method] - sparse.n_forced
    for cell, counts in found.items():
        for step, count in enumerate(counts, 1):
            n_blocks = (contexts[cell[1]] - 1 + step) // sparse.block_size + 1
            assert count <= min(max(0, picks), max(0, n_blocks - sparse.topk))
    if n_steps > 1:
        misses, kept = injection.fresh_counts(1, n_steps, sparse)
        for cell, counts in found.items():
            assert misses[(slice(None), *cell)].tolist() == counts
            for step in range(1, n_steps):
                both = set(set_of(injection, step, cell)) & set(set_of(injection, step - 1, cell))
                assert kept[(step - 1, *cell)] == len(both)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 2.25, 5.0])
def test_a_mean_is_kept_by_every_head(rate: float) -> None:
    n_steps = 41
    counts = walk(synthetic_injection(WIDE, "infllmv2", 2, 2, [400, 333], n_steps, rate, 3), WIDE)
    for own in counts.values():
        assert set(own) <= {int(rate), int(rate) + (rate % 1 > 0)}
        assert abs(sum(own) - rate * (n_steps - 1)) <= 1
    if rate == 0.5:
        firsts = [own[0] for own in counts.values()]
        assert 0 < sum(firsts) < len(firsts), "heads do not miss all at one step"


def test_a_distribution_is_drawn_with_its_weights() -> None:
    counts = walk(synthetic_injection(WIDE, "infllmv2", 2, 2, [400] * 4, 60, {0: 3, 4: 1}, 5), WIDE)
    flat = np.array(list(counts.values())).ravel()
    assert set(flat.tolist()) == {0, 4}
    assert np.mean(flat == 4) == pytest.approx(0.25, abs=0.05)


def test_segments_change_the_rate_on_the_way() -> None:
    injection = synthetic_injection(WIDE, "infllmv2", 1, 2, [400], 31, [(10, 0.0), (20, 3.0)], 0)
    for own in walk(injection, WIDE).values():
        assert own == [0] * 10 + [3] * 20


@pytest.mark.parametrize("reuse", [0.0, 0.7, 1.0])
def test_reuse_brings_back_what_left_last(reuse: float) -> None:
    """One miss a step in a long context: a least-recently-used list of what left counts the returns."""
    n_steps = 150
    injection = synthetic_injection(WIDE, "infllmv2", 1, 4, [2000], n_steps, 1.0, 0, reuse=reuse)
    walk(injection, WIDE)
    returns = 0
    for head in range(4):
        left: list[int] = []
        before = set(set_of(injection, 0, (0, 0, head)))
        for step in range(1, n_steps):
            now = set(set_of(injection, step, (0, 0, head)))
            current = (1999 + step) // WIDE.block_size
            returns += sum(block in left[-4:] for block in now - before - {current})
            left = [block for block in left if block not in now] + sorted(before - now)
            before = now
    assert returns / (4 * (n_steps - 1)) == pytest.approx(reuse, abs=0.06)
    assert ("left last" in injection.label) == (reuse > 0)


def test_seeds_repeat_and_differ() -> None:
    def table(seed: int) -> torch.Tensor:
        return synthetic_injection(WIDE, "nosa", 1, 1, [300], 9, 2.0, seed).ids_table

    assert torch.equal(table(1), table(1))
    assert not torch.equal(table(1), table(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "full"}, "no selection to inject"),
        ({"contexts": []}, "must be >= 1"),
        ({"misses": -1.0}, "must be a number >= 0"),
        ({"misses": {3: 0.0}}, "not all zero"),
        ({"misses": [(3, 1.0)]}, "must add up to 4"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"method": "nosa", "contexts": [100], "misses": 1.0} | changes
    with pytest.raises(ConfigError, match=message):
        synthetic_injection(SMALL, n_layers=1, n_kv_heads=1, n_steps=5, **arguments)  # type: ignore[arg-type]


# ---- traces
def test_a_trace_is_played_by_depth_heads_and_offsets(tmp_path: Path) -> None:
    made = make_trace(sequences=((60, 14, 0), (45, 12, 2)), n_layers=2, n_kv_heads=2)
    trace = Trace.open(made.write(tmp_path / "trace"))
    recorded = {
        (r["sequence"], r["position"], r["layer"], r["kv_head"]): r["block_ids"] for r in made.tables["selections"]
    }
    injection = trace_injection(trace, n_layers=3, n_kv_heads=3, batch=5, n_steps=6, seed=4)
    assert injection.contexts[:2] == [60, 45]
    assert "toy" in injection.label
    walk(injection, trace.meta.sparse)
    for step, layer, row, head in itertools.product(range(6), range(3), range(5), range(3)):
        position = injection.contexts[row] - 1 + step
        own = recorded[row % 2, position, (2 * layer + 1) * 2 // 6, head % 2]
        assert set_of(injection, step, (layer, row, head)) == own
    assert injection.contexts == trace_injection(trace, 3, 3, 5, 6, seed=4).contexts
    assert len({trace_injection(trace, 3, 3, 5, 6, seed=s).contexts[2] for s in range(12)}) > 1


def test_a_trace_that_is_too_short_or_dense_is_refused(tmp_path: Path) -> None:
    short = Trace.open(make_trace(sequences=((40, 5, 0),)).write(tmp_path / "short"))
    with pytest.raises(ConfigError, match="has 5 rows"):
        trace_injection(short, 2, 2, 1, 6)
    dense = Trace.open(make_trace(method="full", sequences=((40, 5, 0),)).write(tmp_path / "dense"))
    with pytest.raises(TraceError, match="dense attention"):
        trace_injection(dense, 2, 2, 1, 2)


# ---- guesses
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_guesses_foresee_the_share_asked_for(share: float) -> None:
    n_steps, n = 30, 4
    plain = synthetic_injection(WIDE, "infllmv2", 2, 2, [160, 150, 3], n_steps, 3.0, 1)
    injection = with_guesses(plain, WIDE, n, share, seed=2)
    assert injection.guess_table is not None
    assert torch.equal(injection.ids_table, plain.ids_table)
    hits = fresh_blocks = 0
    for step, layer, row, head in itertools.product(range(n_steps), range(2), range(3), range(2)):
        own = set(set_of(injection, step, (layer, row, head)))
        both = [b for b in injection.guess_table[step, layer, row, head].tolist() if b >= 0]
        current = (injection.contexts[row] - 1 + step) // WIDE.block_size
        assert both == sorted(set(both))
        assert own <= set(both) <= set(range(current + 1))
        assert len(both) <= len(own) + n
        if step + 1 < n_steps:
            fresh = set(set_of(injection, step + 1, (layer, row, head))) - own - {current + 1}
            hits += len(fresh & set(both))
            fresh_blocks += len(fresh)
            if current + 1 - len(own) - len(fresh) >= n:
                assert len(both) == len(own) + n
    assert fresh_blocks > 500
    assert hits / fresh_blocks == pytest.approx(share, abs=0.08)
    assert f"{share:g} (assumed)" in injection.label


def test_impossible_guesses_are_refused() -> None:
    plain = synthetic_injection(WIDE, "nosa", 1, 1, [160], 3, 1.0, 1)
    for n, share in ((0, 0.5), (2, 1.5)):
        with pytest.raises(ConfigError, match="hit_share"):
            with_guesses(plain, WIDE, n, share)


def test_origins_of_injected_ids_against_a_plain_loop() -> None:
    """Rows shorter than k are dense and padded; the window is the current block and the local ones before it."""
    rng = np.random.default_rng(3)
    n_blocks = [3, SMALL.topk, SMALL.topk + 1, 40]
    ids = np.full((2, 4, 2, SMALL.topk), -1, dtype=np.int32)
    for layer, row, head in np.ndindex(2, 4, 2):
        k = min(n_blocks[row], SMALL.topk)
        ids[layer, row, head, :k] = np.sort(rng.choice(n_blocks[row], k, replace=False))
    found = geometric_origins(ids, n_blocks, SMALL)
    assert found.dtype == np.int8
    for place in np.ndindex(ids.shape):
        block, n = ids[place], n_blocks[place[1]]
        if block < 0:
            expected = -1
        elif n <= SMALL.topk:
            expected = ORIGIN_DENSE
        elif block >= n - 1 - SMALL.local_blocks:
            expected = ORIGIN_WINDOW
        else:
            expected = ORIGIN_SINK if block < SMALL.init_blocks else ORIGIN_QUERY
        assert found[place] == expected
