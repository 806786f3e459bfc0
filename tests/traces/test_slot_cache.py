"""Slot caches against a list of slots in plain Python, and Belady against the true optimum by exhaustion."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.traces.policies import get_policy
from nosa_sys.traces.replay import misses_of
from nosa_sys.traces.reuse import block_uses, stack_distances
from nosa_sys.traces.rows import SelectionRows
from nosa_sys.traces.slot_cache import SlotCache
from tests.traces.synthetic import DictSlots

BLOCK = 4


def rows_of(streams: list[tuple[int, list[list[int]]]]) -> SelectionRows:
    """Each stream: (first position, selections step by step); stream i is sequence i."""
    flat = [(i, start + t, t, ids) for i, (start, steps) in enumerate(streams) for t, ids in enumerate(steps)]
    flat.sort(key=lambda r: (r[2], r[0]))
    ids = [b for r in flat for b in r[3]]
    zeros = np.zeros(len(flat), dtype=np.int64)
    return SelectionRows(
        step=np.array([r[2] for r in flat]),
        position=np.array([r[1] for r in flat]),
        sequence=np.array([r[0] for r in flat]),
        layer=zeros,
        kv_head=zeros,
        n_misses=zeros,
        h2d_bytes=zeros,
        gamma=np.full(len(flat), np.nan),
        cold=np.array([r[2] == 0 for r in flat]),
        block_ids=np.array(ids, dtype=np.int64),
        origins=np.zeros(len(ids), dtype=np.int8),
        offsets=np.cumsum([0] + [len(r[3]) for r in flat]),
    )


@st.composite
def request_streams(draw: st.DrawFn, n_steps: int = 12, n_wanted: int = 4) -> list[tuple[int, list[list[int]]]]:
    """Streams whose selections always hold the current block, like real ones."""
    streams = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 40))
        steps = []
        for t in range(draw(st.integers(1, n_steps))):
            current = (start + t) // BLOCK
            others = draw(st.sets(st.integers(0, max(0, current - 1)), max_size=n_wanted - 1))
            steps.append(sorted({b for b in others if b < current} | {current}))
        streams.append((start, steps))
    return streams


def misses(streams: list, slots: int, policy: str, betas: np.ndarray | None = None, **options: bool) -> list[list[int]]:
    uses = block_uses(rows_of(streams))
    cache = SlotCache(uses, slots=slots, policy=get_policy(policy), block_size=BLOCK, pooled_betas=betas, **options)
    counts = misses_of(uses, cache.run())
    return [part.tolist() for part in np.split(counts, uses.streams.first[1:])]


@given(request_streams(), st.integers(4, 9), st.sampled_from(["exact", "lru"]))
def test_equals_slots_in_plain_python(streams: list, slots: int, policy: str) -> None:
    expected = []
    for start, steps in streams:
        cache = DictSlots(slots, policy, start, BLOCK)
        expected.append([cache.serve(ids, (start + t) // BLOCK, t, {}) for t, ids in enumerate(steps)])
    assert misses(streams, slots, policy) == expected


@given(request_streams(), st.integers(4, 7), st.integers(0, 2**16), st.sampled_from([2, 1000]))
def test_beta_ranked_equals_slots_in_plain_python(streams: list, slots: int, seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    uses = block_uses(rows_of(streams))
    betas = rng.integers(levels, size=uses.n_blocks).astype(np.float32)
    expected = []
    for i, (start, steps) in enumerate(streams):
        own = range(uses.first_block[i], uses.first_block[i + 1])
        beta = {int(uses.block_ids[b]): float(betas[b]) for b in own}
        cache = DictSlots(slots, "beta", start, BLOCK)
        expected.append([cache.serve(ids, (start + t) // BLOCK, t, beta) for t, ids in enumerate(steps)])
    assert misses(streams, slots, "beta", betas) == expected


def fewest_misses(start: int, steps: list[list[int]], slots: int) -> int:
    """Exhaustive optimum: after each step keep any subset of what is there, G included, that fits the slots."""
    first = frozenset([start // BLOCK]) if start % BLOCK else frozenset()
    states = {first: 0}
    for t, ids in enumerate(steps):
        wanted, current = frozenset(ids), (start + t) // BLOCK
        after: dict[frozenset[int], int] = {}
        for resident, cost in states.items():
            cost += sum(b not in resident and b != current for b in wanted)
            spare = resident - wanted
            room = min(len(spare), slots - len(wanted))
            for kept in itertools.combinations(sorted(spare), room):
                state = wanted | frozenset(kept)
                after[state] = min(cost, after.get(state, 10**9))
        states = after
    return min(states.values())


@given(request_streams(n_steps=9, n_wanted=3), st.integers(3, 5))
def test_belady_is_the_optimum(streams: list, slots: int) -> None:
    found = [sum(per_step) for per_step in misses(streams, slots, "belady")]
    assert found == [fewest_misses(start, steps, slots) for start, steps in streams]


@given(request_streams(n_steps=25), st.integers(4, 10), st.integers(0, 2**16))
def test_belady_never_misses_more_than_the_others(streams: list, slots: int, seed: int) -> None:
    uses = block_uses(rows_of(streams))
    betas = np.random.default_rng(seed).random(uses.n_blocks)
    best = [sum(s) for s in misses(streams, slots, "belady")]
    for policy in ("exact", "lru", "beta"):
        other = [sum(s) for s in misses(streams, slots, policy, betas)]
        assert all(b <= o for b, o in zip(best, other, strict=True))


@given(request_streams(n_steps=25), st.integers(4, 14))
def test_stack_distances_enclose_lru(streams: list, slots: int) -> None:
    uses = block_uses(rows_of(streams))
    ((_, low, high),) = stack_distances(uses, BLOCK).miss_curve([slots])
    assert low <= sum(sum(s) for s in misses(streams, slots, "lru")) <= high


def test_case_20_reload_costs_one_block_and_residents_fit() -> None:
    """case 20: capacity 4, blocks A B C D, then E evicts A, A again: one load each."""
    far = 100 * BLOCK  # the current block, 100, stays resident beside the four
    steps = [[0, 1, 2, 3, 100], [4, 100], [0, 100]]
    assert misses([(far + 1, steps)], 5, "lru") == [[4, 1, 1]]
    assert misses([(far + 1, steps)], 6, "lru") == [[4, 1, 0]]


def test_case_30_cache_smaller_than_one_step_is_refused() -> None:
    """case 30: 3 slots for 4 wanted blocks names the minimum; an exact fit works."""
    streams = [(3 * BLOCK, [[0, 1, 2, 3], [0, 1, 2, 3]])]
    with pytest.raises(CapacityError, match=r"slots=3 .* 4 blocks"):
        misses(streams, 3, "lru")
    for policy in ("exact", "lru", "belady"):
        assert misses(streams, 4, policy) == [[3, 0]]


def test_case_24_equal_steps_load_nothing() -> None:
    """case 24: an empty miss set is a no-op for every policy."""
    assert misses([(9, [[0, 2]] * 3)], 2, "exact") == [[1, 0, 0]]


def test_partial_current_block_is_resident_and_a_born_one_is_no_load() -> None:
    assert misses([(9, [[0, 1, 2]])], 3, "lru") == [[2]]  # position 9: block 2 holds a token of the prefill
    assert misses([(8, [[0, 1, 2], [0, 1, 2]])], 3, "lru") == [[2, 0]]  # block 2 is born at position 8


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'fifo'"):
        get_policy("fifo")
