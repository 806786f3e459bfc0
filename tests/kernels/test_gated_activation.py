"""silu(gate) * up against numpy in float64."""

import numpy as np
import pytest
import torch

from nosa_sys.kernels.gated_activation import silu_mul


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize("inner", [1, 20, 320])
def test_equals_numpy(dtype: torch.dtype, tolerance: float, inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    gate_up = (3 * torch.randn((4, 2 * inner), generator=generator, dtype=torch.float64)).to(dtype)
    gate, up = gate_up.double().numpy()[:, :inner], gate_up.double().numpy()[:, inner:]
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double().numpy(), gate / (1 + np.exp(-gate)) * up, rtol=tolerance, atol=1e-6)


def test_far_gates_neither_overflow_nor_turn_nan() -> None:
    """exp(200) is past float32: a closed gate gives 0, an open one passes the product."""
    out = silu_mul(torch.tensor([[-200.0, 200.0, 0.0, 3.0, 0.5, 7.0]]))
    assert torch.equal(out, torch.tensor([[0.0, 100.0, 0.0]])), out
