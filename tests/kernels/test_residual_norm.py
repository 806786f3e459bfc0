"""Residual addition and RMSNorm against numpy in float64, taken from the rounded sum."""

import numpy as np
import pytest
import torch

from nosa_sys.kernels.residual_norm import add_norm

EPS = 1e-5


def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def norm_in_float64(total: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    rows, gain = total.double().numpy(), weight.double().numpy()
    return np.stack([row / np.sqrt(np.mean(row**2) + EPS) * gain for row in rows])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize("hidden", [1, 24, 576])
@pytest.mark.parametrize("added", [False, True])
def test_equals_numpy(dtype: torch.dtype, tolerance: float, hidden: int, added: bool) -> None:
    x, y = draw((3, hidden), dtype), draw((3, hidden), dtype, seed=1)
    weight = draw((hidden,), dtype, seed=2)
    before = x.clone()
    total, h = add_norm(x, y if added else None, weight, EPS)
    assert torch.equal(x, before)
    if added:
        exact = x.double() + y.double()
        assert torch.equal(total, exact.to(dtype))
    else:
        assert total is x
    assert total.dtype == h.dtype == dtype
    np.testing.assert_allclose(h.double().numpy(), norm_in_float64(total, weight), rtol=tolerance, atol=1e-6)


def test_statistics_do_not_overflow_half_precision() -> None:
    """Squares of 300 leave float16's range: the mean of squares must be kept wider."""
    x = draw((2, 64), torch.float16, scale=300.0)
    _, h = add_norm(x, None, torch.ones(64, dtype=torch.float16), EPS)
    np.testing.assert_allclose(h.double().numpy(), norm_in_float64(x, torch.ones(64)), rtol=2e-3)


def test_zero_row_gives_zeros() -> None:
    _, h = add_norm(torch.zeros(1, 8), None, torch.ones(8), EPS)
    assert torch.equal(h, torch.zeros(1, 8))
