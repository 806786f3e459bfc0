"""What goes into a simulated step (StepCosts) and what comes out of it (StepTimes), for many steps at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nosa_sys.simulator.invariants import require_at_most, require_equal, require_not_negative
from nosa_sys.simulator.rates import LinkSharing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepCosts:
    """Durations, each alone on the machine, of n step instances (a step of one configuration each).

    Arrays [n, layer] in microseconds unless named otherwise; ``step_host_us`` and ``tail_us`` (the output head) [n].
    ``*_fixed_us`` is the part of a transfer during which no byte moves; both parts are 0 where nothing is moved.
    """

    host_us: Floats
    select_us: Floats
    h2d_fixed_us: Floats
    h2d_us: Floats
    attention_us: Floats
    gemm_us: Floats
    d2h_fixed_us: Floats
    d2h_us: Floats
    step_host_us: Floats
    tail_us: Floats
    h2d_bytes: Ints
    d2h_bytes: Ints
    sharing: LinkSharing

    def __len__(self) -> int:
        return len(self.tail_us)

    @property
    def n_layers(self) -> int:
        return self.select_us.shape[1]

    def rows(self, index: slice | NDArray[np.bool_]) -> StepCosts:
        """Some of the instances, in the same order."""
        arrays = {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self) if f.name != "sharing"}
        sharing = LinkSharing(*(_row_values(v, index, len(self)) for v in dataclasses.astuple(self.sharing)))
        return StepCosts(**arrays, sharing=sharing)

    @classmethod
    def concatenate(cls, parts: list[StepCosts]) -> StepCosts:
        """The instances of several configurations after one another; layer counts must agree."""
        names = [f.name for f in dataclasses.fields(cls) if f.name != "sharing"]
        arrays = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
        factors = [
            np.concatenate([np.broadcast_to(getattr(p.sharing, name), len(p)) for p in parts])
            for name in ("duplex_factor", "beside_compute_factor")
        ]
        return cls(**arrays, sharing=LinkSharing(*factors))


def _row_values(value: Floats | float, index: slice | NDArray[np.bool_], n: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), n)[index]


@dataclass(frozen=True)
class StepTimes:
    """Times of n simulated steps in microseconds, arrays [n].

    step = host + select + h2d_exposed + attention + gemm + d2h_exposed: the parts during which the GPU stream, or
    after its end the write-back, holds the step up. Hidden parts run beside others. Busy times count the fixed part
    of transfers.
    """

    step_us: Floats
    host_us: Floats
    select_us: Floats
    h2d_exposed_us: Floats
    h2d_hidden_us: Floats
    attention_us: Floats
    gemm_us: Floats
    d2h_exposed_us: Floats
    d2h_hidden_us: Floats

    @property
    def h2d_busy_us(self) -> Floats:
        return self.h2d_exposed_us + self.h2d_hidden_us

    @property
    def d2h_busy_us(self) -> Floats:
        return self.d2h_exposed_us + self.d2h_hidden_us

    def rows(self, index: slice) -> StepTimes:
        """Some of the instances, in the same order."""
        return StepTimes(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    def check(self, costs: StepCosts) -> StepTimes:
        """Hold the invariants of every schedule; SimulatorFault names the one broken. Returns self."""
        for field in dataclasses.fields(self):
            require_not_negative(getattr(self, field.name), f"{field.name} is negative or not finite")
        parts = (
            self.host_us + self.select_us + self.h2d_exposed_us + self.attention_us + self.gemm_us + self.d2h_exposed_us
        )
        require_equal(self.step_us, parts, "the parts of a step do not add up to its time")
        require_at_most(self.h2d_busy_us, self.step_us, "the host-to-device link is busy for longer than the step")
        require_at_most(self.d2h_busy_us, self.step_us, "the device-to-host link is busy for longer than the step")
        alone = (costs.h2d_fixed_us + costs.h2d_us).sum(axis=1)
        require_at_most(alone, self.h2d_busy_us, "a fetch took less than its time alone on the link")
        alone = (costs.d2h_fixed_us + costs.d2h_us).sum(axis=1)
        require_at_most(alone, self.d2h_busy_us, "a write-back took less than its time alone on the link")
        return self
