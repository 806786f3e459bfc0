"""Property tests do not depend on the machine's speed or on chance."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st


def test_case_31_a_slow_example_is_no_failure() -> None:
    """An example slower than Hypothesis's own deadline of 200 ms passes: load alone must not make the suite flaky."""
    assert settings().deadline is None

    @settings(max_examples=1)
    @given(st.integers())
    def slow(value: int) -> None:
        time.sleep(0.3)

    slow()


def test_case_31_every_run_draws_the_same_examples() -> None:
    assert settings().derandomize
    first, second = drawn_integers(), drawn_integers()
    assert first == second
    assert len(set(first)) > 5


def drawn_integers() -> list[int]:
    drawn: list[int] = []

    @settings(max_examples=20)
    @given(st.integers())
    def draw(value: int) -> None:
        drawn.append(value)

    draw()
    return drawn
