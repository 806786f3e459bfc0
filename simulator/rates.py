"""The one rule for work that runs side by side: how fast a copy goes beside compute and the other direction.

The SimPy pipeline and the numpy recurrence both call `copy_rate`; nothing else in the simulator shares a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nosa_sys.errors import HardwareError


@dataclass(frozen=True)
class LinkSharing:
    """Shares of its speed alone that a copy keeps, each a scalar or an array over step instances.

    ``duplex_factor``: while both directions of the link move bytes. ``beside_compute_factor``: while a compute
    kernel runs. 0.5 <= duplex_factor <= beside_compute_factor <= 1: below 0.5 taking turns would beat running
    together, and above the other bound a faster link could end a step later.
    """

    duplex_factor: NDArray[np.float64] | float = 1.0
    beside_compute_factor: NDArray[np.float64] | float = 1.0

    def __post_init__(self) -> None:
        duplex, beside = np.asarray(self.duplex_factor), np.asarray(self.beside_compute_factor)
        if not bool(np.all((duplex >= 0.5) & (duplex <= beside) & (beside <= 1.0))):
            raise HardwareError(
                f"duplex_factor={self.duplex_factor} and beside_compute_factor={self.beside_compute_factor} must "
                "satisfy 0.5 <= duplex_factor <= beside_compute_factor <= 1; correct the hardware profile"
            )

    @property
    def shares_nothing(self) -> NDArray[np.bool_]:
        """True where every copy keeps its full speed whatever runs beside it."""
        return (np.asarray(self.duplex_factor) == 1.0) & (np.asarray(self.beside_compute_factor) == 1.0)


def copy_rate(
    compute: NDArray[np.bool_] | bool,
    h2d: NDArray[np.bool_] | bool,
    d2h: NDArray[np.bool_] | bool,
    sharing: LinkSharing,
) -> NDArray[np.float64]:
    """Speed of every copy now moving bytes, as a share of its speed alone.

    The three flags say which of compute, host-to-device and device-to-host is moving at this moment; both
    directions get the same share. Flags and factors broadcast.
    """
    duplex = np.where(np.logical_and(h2d, d2h), sharing.duplex_factor, 1.0)
    return duplex * np.where(compute, sharing.beside_compute_factor, 1.0)
