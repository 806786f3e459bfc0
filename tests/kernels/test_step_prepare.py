"""A step's geometry against plain Python, one row at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.step_prepare import prepare_step
from nosa_sys.kernels.step_prepare.reference import StepGeometry


def check_row(got: StepGeometry, row: int, lane: int, position: int, table: list[list[int]], heads: int, block: int):
    """Every field of one row; the table lists pages by lane."""
    current = position // block
    page = table[lane][current] if lane >= 0 and current < len(table[lane]) else -1
    by_head = slice(row * heads, (row + 1) * heads)
    assert got.lengths[row].item() == (position + 1 if lane >= 0 else 0)
    assert got.current_blocks[row].item() == (current if lane >= 0 else -1)
    assert got.head_blocks[by_head].tolist() == [got.current_blocks[row].item()] * heads
    assert got.row_heads[by_head].tolist() == [lane * heads + h if lane >= 0 else -1 for h in range(heads)]
    pool_rows = [page * heads + h if page >= 0 else -1 for h in range(heads)]
    assert got.page_rows[by_head].tolist() == pool_rows
    fills = lane >= 0 and position % block == block - 1
    assert got.write_back_rows[by_head].tolist() == (pool_rows if fills else [-1] * heads)


@given(
    heads=st.integers(1, 4),
    block=st.sampled_from([1, 16, 48, 64]),
    lanes=st.lists(st.integers(-1, 5), min_size=1, max_size=6),
    data=st.data(),
)
def test_geometry_equals_plain_python(heads: int, block: int, lanes: list[int], data: st.DataObject) -> None:
    """Padding, blocks on both sides of an edge, unknown pages and blocks past the table."""
    n_blocks = data.draw(st.integers(1, 4))
    near_edge = st.integers(0, n_blocks + 1).flatmap(lambda b: st.integers(max(0, b * block - 2), b * block + 2))
    positions = [data.draw(near_edge) for _ in lanes]
    page = st.integers(-1, 2**40)
    table = [data.draw(st.lists(page, min_size=n_blocks, max_size=n_blocks)) for _ in range(6)]
    frequencies = torch.tensor([1.0, 0.25, 1e-3])
    got = prepare_step(torch.tensor(lanes), torch.tensor(positions), torch.tensor(table), frequencies, heads, block)
    for row, (lane, position) in enumerate(zip(lanes, positions, strict=True)):
        check_row(got, row, lane, position, table, heads, block)
        at = position if lane >= 0 else 0
        for pair, frequency in enumerate(frequencies.tolist()):
            assert got.cos[row, pair].item() == pytest.approx(math.cos(at * frequency), abs=2e-5)
            assert got.sin[row, pair].item() == pytest.approx(math.sin(at * frequency), abs=2e-5)
    types = {t.dtype for t in (got.lengths, got.current_blocks, got.head_blocks)}
    assert types == {torch.int32}
    assert {t.dtype for t in (got.row_heads, got.page_rows, got.write_back_rows)} == {torch.int64}
    assert got.cos.dtype == got.sin.dtype == torch.float32


def test_rotary_factors_keep_float64() -> None:
    got = prepare_step(
        torch.tensor([0]), torch.tensor([70_001]), torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([0.7], dtype=torch.float64), 1, 64,
    )  # fmt: skip
    assert got.cos.item() == pytest.approx(math.cos(70_001 * 0.7), abs=1e-9)
    assert got.cos.dtype == torch.float64
