"""LRU misses of whole documents against a list of blocks in plain Python, and against the bounds of stack distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import ConfigError
from nosa_sys.traces.reuse import block_uses, stack_distances
from nosa_sys.training.hot_slots import lru_misses
from nosa_sys.training.scoring import score_document
from tests.traces.test_slot_cache import rows_of
from tests.training.small import SPARSE, tiny, tokens

Selections = list[list[set[int]]]  # head, step


@st.composite
def selections(draw: st.DrawFn, most: int = 4) -> tuple[Selections, int]:
    """Sets of one to three heads from position 0 on, the current block in each, at most ``most`` blocks; block size."""
    size, n_steps = draw(st.sampled_from([1, 2, 5])), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    stay = draw(st.sampled_from([0.3, 0.8, 0.97]))  # how often a block stays selected
    heads: Selections = []
    for _ in range(draw(st.integers(1, 3))):
        chosen: set[int] = set()
        steps = []
        for t in range(n_steps):
            chosen = {b for b in chosen if rng.random() < stay}
            spare = rng.permutation(t // size).tolist()
            while spare and len(chosen) < most - 1:
                chosen.add(spare.pop())
            others = sorted(chosen - {t // size}, key=lambda _: rng.random())[: most - 1]
            chosen = {*others, t // size}
            steps.append(chosen)
        heads.append(steps)
    return heads, size


def as_members(heads: Selections, size: int) -> torch.Tensor:
    n_steps = len(heads[0])
    member = torch.zeros(len(heads), n_steps, (n_steps - 1) // size + 1, dtype=torch.bool)
    for head, steps in enumerate(heads):
        for t, chosen in enumerate(steps):
            member[head, t, sorted(chosen)] = True
    return member


def misses_of_a_list(steps: list[set[int]], slots: int, size: int) -> list[int]:
    """Residents in the order in which they go: the oldest use first, among equal ones the lowest id."""
    residents: list[int] = []
    found = []
    for t, chosen in enumerate(steps):
        found.append(len(chosen - set(residents) - {t // size}))
        residents = [b for b in residents if b not in chosen] + sorted(chosen)
        residents = residents[max(0, len(residents) - slots) :]
    return found


@given(selections(), st.integers(4, 12))
def test_equals_a_list_of_blocks(made: tuple[Selections, int], slots: int) -> None:
    heads, size = made
    expected = np.sum([misses_of_a_list(steps, slots, size) for steps in heads], axis=0)
    assert lru_misses(as_members(heads, size), slots, size).tolist() == expected.tolist()


@given(selections(), st.integers(4, 9))
def test_lies_between_the_bounds_of_any_order_of_ties(made: tuple[Selections, int], slots: int) -> None:
    heads, size = made
    uses = block_uses(rows_of([(0, [sorted(chosen) for chosen in steps]) for steps in heads]))
    ((_, low, high),) = stack_distances(uses, size).miss_curve([slots])
    assert low <= int(lru_misses(as_members(heads, size), slots, size).sum()) <= high


def test_no_spare_slot_is_the_engines_exact_policy() -> None:
    """With slots = k the count is that of the sets before; more slots load fewer, as many as there are blocks none."""
    model, ids = tiny("float64"), tokens(400).tolist()
    totals = []
    for slots in (5, 7, 10, 25):
        score = score_document(model, ids, SPARSE, method="infllmv2", hot_slots=slots, chunk=96)
        assert score.hot_misses is not None
        if slots == 5:
            assert (score.hot_misses == score.misses).all()
        totals.append(int(score.hot_misses.sum()))
    assert totals[0] > totals[1] > totals[2] > totals[3] == 0
    assert score_document(model, ids[:90], SPARSE).hot_misses is None
    with pytest.raises(ConfigError, match="hot_slots=4 cannot hold the 5 blocks"):
        score_document(model, ids, SPARSE, hot_slots=4)
