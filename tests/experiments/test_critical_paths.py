"""Critical paths against times laid out by hand, and their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.experiments.critical_paths import (
    CRITICAL_PATHS,
    Parts,
    prefetch_path,
    serial_path,
    split_merge_path,
    two_batch_path,
)


def test_case_27_serial_adds_up_and_overhead_is_added_once() -> None:
    assert serial_path(Parts(4, 0.5, 0.5, 1.0, 0.0, 1.0)) == pytest.approx(3.0)
    assert serial_path(Parts(4, 0.5, 0.5, 1.0, 0.05, 1.0)) == pytest.approx(3.05)


def test_hits_hide_a_copy_as_far_as_they_last() -> None:
    """2 layers of before 1, hits 2, after 3: a copy of 1 hides, one of 5 shows 3 a layer."""
    assert split_merge_path(Parts(2, 2, 4, 6, 0.5, 2)) == pytest.approx(12.5)
    assert split_merge_path(Parts(2, 2, 4, 6, 0.5, 10)) == pytest.approx(12.5 + 2 * 3)


def test_guesses_delay_the_demand_of_the_next_layer_alone() -> None:
    """before 1, demand 1, attention 1, after 1: layer 0 has its misses at 2, guesses go from 3 on. Guesses of 0.5
    end at 3.5, before layer 1 has its list: it ends at 8. Guesses of 4 end at 7: layer 1's misses are there
    at 8, its guesses at 13, and the step does not end before them."""
    assert prefetch_path(Parts(2, 2, 2, 2, 0, 2, speculative=1)) == pytest.approx(8)
    assert prefetch_path(Parts(2, 2, 2, 2, 0, 2, speculative=8)) == pytest.approx(13)


def test_two_halves_by_hand() -> None:
    """1 layer, halves of before 1, after 2, demand 3: copies arrive at 4 and 7; A ends at 6, B at 9."""
    assert two_batch_path(Parts(1, 2, 0, 4, 0, 6)) == pytest.approx(9)
    # nothing to copy: compute alone
    assert two_batch_path(Parts(3, 3, 3, 6, 1, 0)) == pytest.approx(13)


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    times=st.lists(st.floats(0, 10), min_size=5, max_size=5),
    name=st.sampled_from(sorted(CRITICAL_PATHS)),
)
def test_every_path_lies_between_its_longest_part_and_their_sum(n: int, times: list[float], name: str) -> None:
    parts = Parts(n, *times)
    path = CRITICAL_PATHS[name](parts)
    assert max(parts.compute, parts.demand) <= path + 1e-9
    assert path <= parts.compute + parts.demand + 1e-9
