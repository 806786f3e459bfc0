"""Synthetic selections: they obey the locality theorem, come near the measured table, and act on every budget."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.errors import CapacityError, ConfigError, NosaError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality_model import LocalityModel, synthetic_positions, synthetic_selections
from nosa_sys.sparse_config import SparseConfig

SHAPE = dataclasses.replace(ModelShape.preset("smollm2-135m"), n_layers=8)
SMOL = SparseConfig(topk=32, init_blocks=1, window_size=512, select_blocks=8)


def draw(sparse=SMOL, method="nosa", context=7000, steps=60, shape=SHAPE, **others):
    return synthetic_selections(shape, sparse, method, context=context, steps=steps, model=LocalityModel(), **others)


def sets_of(selections, stream):
    rows = selections.rows
    own = np.flatnonzero(rows.layer * selections.n_kv_heads + rows.kv_head == stream)
    return [(int(rows.position[i]), set(rows.block_ids[rows.offsets[i] : rows.offsets[i + 1]].tolist())) for i in own]


def misses_of_streams(history):
    return history.n_misses.reshape(len(history.position), -1)


@pytest.mark.parametrize(("policy", "slots"), [("exact", 32), ("lru", 40), ("lru", 64)])
def test_misses_equal_a_dictionary_model(policy, slots):
    """Residents of a stream as a dictionary block -> (last use, slot), served in plain Python."""
    selections = draw(steps=80)
    misses = misses_of_streams(selections.history(slots, policy))
    for stream in (0, 7, 23):
        resident: dict[int, list[int]] = {}
        for step, (position, wanted) in enumerate(sets_of(selections, stream)):
            current = position // 64
            if step == 0 and position % 64:
                resident[current] = [-1, 0]
            loads = sorted(wanted - set(resident))
            assert misses[step, stream] == len(set(loads) - {current})
            if policy == "exact":
                resident = {b: v for b, v in resident.items() if b in wanted}
            for block in loads:
                free = [s for s in range(slots) if s not in {v[1] for v in resident.values()}]
                if free:
                    slot = free[0]
                else:
                    victim = min((b for b in resident if b not in wanted), key=lambda b: tuple(resident[b]))
                    slot = resident.pop(victim)[1]
                resident[block] = [step, slot]
            for block in wanted:
                resident[block][0] = step
            assert len(resident) <= slots


@given(st.integers(0, 99), st.integers(1, 20), st.sampled_from(["nosa", "infllmv2", "dma"]))
@settings(max_examples=10)
def test_loads_stay_within_the_locality_bound(seed, select, method):
    sparse = dataclasses.replace(SMOL, select_blocks=select)
    selections = draw(sparse, method, steps=20, shape=dataclasses.replace(SHAPE, n_layers=2), seed=seed)
    history = selections.history(32, "exact")
    bound = get_method(method).max_loads(sparse, 7000 // 64)
    assert history.n_misses[1:].max() <= bound
    assert (history.n_selected == 32).all()
    assert history.cold.tolist() == [True] + [False] * 19


def test_default_parameters_come_near_the_measured_table():
    """SmolLM2 with the first eviction head at 8K, misses a head and step; the fit is stated in LocalityModel."""
    measured = [
        ("nosa", 32, "exact", 1.92, 0.15),
        ("nosa", 40, "lru", 0.44, 0.25),
        ("nosa", 48, "lru", 0.17, 0.25),
        ("infllmv2", 32, "exact", 3.62, 0.15),
    ]
    drawn = {name: draw(method=name, context=7600, steps=300) for name in ("nosa", "infllmv2")}
    for method, slots, policy, value, tolerance in measured:
        warm = drawn[method].history(slots, policy).n_misses[60:].mean()
        assert warm == pytest.approx(value, rel=tolerance), (method, slots)


def test_every_budget_acts():
    def mean(sparse=SMOL, method="nosa", slots=None, policy="exact", context=7000):
        history = draw(sparse, method, context).history(slots or sparse.topk, policy)
        return history.n_misses[10:].mean()

    base = mean()
    assert mean(method="infllmv2") > 1.5 * base
    assert mean(method="dma") == 0.0
    assert mean(slots=40, policy="lru") < 0.5 * base
    assert mean(slots=40, policy="belady") < mean(slots=40, policy="lru")
    assert mean(slots=40, policy="beta") < base
    assert mean(dataclasses.replace(SMOL, select_blocks=4)) < base < mean(dataclasses.replace(SMOL, select_blocks=12))
    assert mean(context=1500) == 0.0  # 24 blocks are fewer than k
    for block_size in (16, 32, 128):
        other = SMOL.with_block_size(block_size)
        assert 0 < mean(other) < other.select_blocks


def test_block_of_two_units_scores_their_maximum():
    """Without noise the selection of 128-token blocks follows from the 64-token scores."""
    fixed = LocalityModel(slow_correlation=1.0, fast_spread=0.0)
    shape = dataclasses.replace(SHAPE, n_layers=1)
    chosen = {}
    for block_size in (64, 128):
        sparse = SparseConfig(block_size=block_size, topk=16, init_blocks=1, window_size=256, select_blocks=4)
        selections = synthetic_selections(shape, sparse, "infllmv2", context=8192, steps=2, model=fixed)
        assert selections.history(16, "exact").n_misses[1:].sum() == 0
        chosen[block_size] = sets_of(selections, 0)[0][1]
    best_units = sorted(chosen[64])[1:-5]  # free picks of 64: 11 of 16
    parents = {unit // 2 for unit in best_units}
    assert len(parents & chosen[128]) >= len(parents) - 1


def test_same_scores_whatever_the_budgets_and_the_batch():
    wide = draw(dataclasses.replace(SMOL, topk=48), steps=5)
    narrow = draw(steps=5)
    for (_, more), (_, fewer) in zip(sets_of(wide, 3), sets_of(narrow, 3), strict=True):
        assert fewer <= more
    assert np.array_equal(draw(steps=5, sequence=2).rows.block_ids, draw(steps=5, sequence=2).rows.block_ids)
    assert not np.array_equal(draw(steps=5, sequence=2).rows.block_ids, draw(steps=5, sequence=1).rows.block_ids)


def test_positions_start_at_the_context_and_differ_in_phase():
    assert synthetic_positions(100, 3, 0, 0).tolist() == [99, 100, 101]
    phases = {int(synthetic_positions(8192, 1, 0, s)[0]) for s in range(8)}
    assert len(phases) > 4
    assert all(8192 - 64 <= p + 1 <= 8192 for p in phases)
    assert synthetic_positions(1, 2, 0, 5).tolist() == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"slow_correlation": 1.5}, {"fast_spread": -1.0}, {"beta_correlation": -2.0}, {"fast_spread": float("nan")},
        {"popularity_spread": float("inf")}, {"part_correlation": True},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        LocalityModel(**change)


def test_absurd_requests_are_refused_before_any_work():
    with pytest.raises(CapacityError, match="locality model"):
        draw(context=2**40)
    with pytest.raises(NosaError, match="select_blocks"):
        draw(dataclasses.replace(SMOL, select_blocks=0))
