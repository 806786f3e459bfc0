"""The one rule for work that runs side by side: how fast copies and compute go beside one another.

The SimPy pipeline and the numpy recurrence both call `shared_rates`; nothing else in the simulator shares a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nosa_sys.errors import HardwareError


@dataclass(frozen=True)
class LinkSharing:
    """Shares of its speed alone that work keeps beside other work, each a scalar or an array over step instances.

    ``duplex_factor``: a copy while both directions of the link move bytes. ``beside_compute_factor``: a copy while a
    compute kernel runs. ``compute_beside_copy_factor``: a compute kernel while a fetch moves bytes; write-backs slow
    no compute. 0.5 <= duplex_factor <= beside_compute_factor <= 1: below 0.5 taking turns would beat running
    together, and above the other bound a faster link could end a step later. 0.5 <= compute_beside_copy_factor <= 1
    for the first of these reasons.
    """

    duplex_factor: NDArray[np.float64] | float = 1.0
    beside_compute_factor: NDArray[np.float64] | float = 1.0
    compute_beside_copy_factor: NDArray[np.float64] | float = 1.0

    def __post_init__(self) -> None:
        duplex, beside = np.asarray(self.duplex_factor), np.asarray(self.beside_compute_factor)
        if not bool(np.all((duplex >= 0.5) & (duplex <= beside) & (beside <= 1.0))):
            raise HardwareError(
                f"duplex_factor={self.duplex_factor} and beside_compute_factor={self.beside_compute_factor} must "
                "satisfy 0.5 <= duplex_factor <= beside_compute_factor <= 1; correct the hardware profile"
            )
        compute = np.asarray(self.compute_beside_copy_factor)
        if not bool(np.all((compute >= 0.5) & (compute <= 1.0))):
            raise HardwareError(
                f"compute_beside_copy_factor={self.compute_beside_copy_factor} must be in [0.5, 1]; "
                "correct the hardware profile"
            )

    @property
    def shares_nothing(self) -> NDArray[np.bool_]:
        """True where everything keeps its full speed whatever runs beside it."""
        slowest = np.minimum(
            self.duplex_factor, np.minimum(self.beside_compute_factor, self.compute_beside_copy_factor)
        )
        return slowest == 1.0


def shared_rates(
    compute: NDArray[np.bool_] | bool,
    h2d: NDArray[np.bool_] | bool,
    d2h: NDArray[np.bool_] | bool,
    sharing: LinkSharing,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(speed of every copy now moving bytes, speed of compute), each as a share of its speed alone.

    The three flags say which of compute, host-to-device and device-to-host is moving at this moment; both
    directions get the same share. Flags and factors broadcast.
    """
    duplex = np.where(np.logical_and(h2d, d2h), sharing.duplex_factor, 1.0)
    copy = duplex * np.where(compute, sharing.beside_compute_factor, 1.0)
    return copy, np.where(h2d, sharing.compute_beside_copy_factor, 1.0)
