"""What must hold for every simulated step; a breach is a fault of the simulator, not of the user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_RELATIVE = 1e-9


class SimulatorFault(RuntimeError):
    """The simulator broke one of its own rules: report it as a bug."""


def require(holds: bool, rule: str) -> None:
    """Raise SimulatorFault naming the rule unless it holds."""
    if not holds:
        raise SimulatorFault(f"simulator fault: {rule}")


def require_at_most(small: NDArray[np.float64], large: NDArray[np.float64], rule: str) -> None:
    """small <= large element by element, up to rounding."""
    require(bool(np.all(small <= large * (1 + _RELATIVE) + 1e-9)), rule)


def require_equal(left: NDArray[np.float64], right: NDArray[np.float64], rule: str) -> None:
    """left == right element by element, up to rounding."""
    scale = np.maximum(np.abs(left), np.abs(right))
    require(bool(np.all(np.abs(left - right) <= _RELATIVE * scale + 1e-9)), rule)


def require_not_negative(value: NDArray[np.float64], rule: str) -> None:
    """Finite and >= 0, up to rounding."""
    require(bool(np.all(np.isfinite(value) & (value >= -1e-9))), rule)
