"""Sums of one fixed order, and the accumulation type."""

import math

import pytest
import torch

from nosa_sys.kernels.numerics import acc_dtype, tree_sum


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 32, 33])
def test_tree_sum_equals_an_exact_sum(n: int) -> None:
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    for row, total in zip(x.tolist(), tree_sum(x).tolist(), strict=True):
        assert total == pytest.approx(math.fsum(row), rel=1e-13, abs=1e-13)


def test_tree_sum_is_bit_equal_whatever_the_layout() -> None:
    x = torch.randn(300, 5, 31, generator=torch.Generator().manual_seed(0))
    whole = tree_sum(x)
    assert torch.equal(whole[7:8], tree_sum(x[7:8]))
    strided = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert strided.stride() != x.stride()
    assert torch.equal(whole, tree_sum(strided))


def test_acc_dtype_is_float32_unless_something_is_float64() -> None:
    half, single, double = (torch.zeros(1, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    assert acc_dtype(half) == acc_dtype(half, single) == torch.float32
    assert acc_dtype(half, double) == torch.float64
