"""What goes into a simulated step (StepCosts) and what comes out of it (StepTimes), for many steps at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nosa_sys.simulator.invariants import require_at_most, require_equal, require_not_negative
from nosa_sys.simulator.rates import LinkSharing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-10  # below this share of a transfer's time, what is left of it beside the exposed part is rounding


@dataclass(frozen=True)
class AttentionSplit:
    """Attention in two launches, [n, layer]: over the blocks that are there, and over the misses with the merge."""

    hit_us: Floats
    miss_us: Floats


@dataclass(frozen=True)
class Speculation:
    """Blocks fetched on a guess, [n, layer]; ``covered_bytes`` are misses that an earlier guess made needless."""

    fixed_us: Floats
    bytes_us: Floats
    n_bytes: Ints
    covered_bytes: Ints


@dataclass(frozen=True)
class Conversion:
    """Blocks brought to the device's format, and filled ones to the host's, [n, layer] microseconds alone."""

    dequant_us: Floats
    quant_us: Floats

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Conversion:
        return cls(np.zeros(shape), np.zeros(shape))


@dataclass(frozen=True)
class StepCosts:
    """Durations, each alone on the machine, of n step instances (a step of one configuration each).

    Arrays [n, layer] in microseconds unless named otherwise; ``step_host_us`` and ``tail_us`` (the output head) [n].
    ``*_fixed_us`` is the part of one transfer during which no byte moves; both parts are 0 where nothing is moved.
    What only some schedules need is None elsewhere: ``attention_split``, ``speculation`` (then ``h2d_*`` are the
    misses that no guess covered), ``halves``, the costs of the first and the second half of the rows, 0 where a
    half has none (their own step_host_us and tail_us are not used), and ``conversion`` where host and device formats
    differ.
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
    attention_split: AttentionSplit | None = None
    speculation: Speculation | None = None
    halves: tuple[StepCosts, StepCosts] | None = None
    conversion: Conversion | None = None

    def __len__(self) -> int:
        return len(self.tail_us)

    @property
    def n_layers(self) -> int:
        return self.select_us.shape[1]

    def rows(self, index: slice | NDArray[np.bool_]) -> StepCosts:
        """Some of the instances, in the same order."""
        n = len(self)

        def sharing(values: list[Floats]) -> Floats:
            return np.broadcast_to(values[0], n)[index]

        return _combine([self], lambda values: values[0][index], sharing)

    def with_conversion(self) -> StepCosts:
        """The same costs with a conversion that takes no time where there is none."""
        halves = self.halves and (self.halves[0].with_conversion(), self.halves[1].with_conversion())
        conversion = self.conversion or Conversion.nothing(self.select_us.shape)
        return dataclasses.replace(self, halves=halves, conversion=conversion)

    @classmethod
    def concatenate(cls, parts: list[StepCosts]) -> StepCosts:
        """The instances of several configurations after one another; layer counts and schedule must agree."""

        def sharing(values: list[Floats]) -> Floats:
            return np.concatenate([np.broadcast_to(v, len(p)) for v, p in zip(values, parts, strict=True)])

        if any(part.conversion is not None for part in parts):
            parts = [part.with_conversion() for part in parts]
        return _combine(parts, np.concatenate, sharing)


Combine = Callable[[list[Any]], Any]


def _combine(parts: list[Any], arrays: Combine, sharing: Combine) -> Any:
    """The first part's kind with every array made of those of all parts; ``sharing`` does it for rate factors."""
    kind = type(parts[0])
    made: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        values = [getattr(p, field.name) for p in parts]
        first = values[0]
        if first is None:
            made[field.name] = None
        elif isinstance(first, tuple):
            made[field.name] = tuple(_combine(list(column), arrays, sharing) for column in zip(*values, strict=True))
        elif dataclasses.is_dataclass(first):
            inner = sharing if isinstance(first, LinkSharing) else arrays
            made[field.name] = _combine(values, inner, sharing)
        else:
            made[field.name] = arrays([np.asarray(v) for v in values])
    return kind(**made)


def _hidden(busy_us: Floats, exposed_us: Floats) -> Floats:
    """What of the busy time is not exposed; 0 where both are the same sum in another order."""
    left = busy_us - exposed_us
    return np.where(left > _ROUNDING * busy_us, left, 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Times of n simulated steps in microseconds, arrays [n].

    step = host + select + h2d_exposed + attention + gemm + d2h_exposed: the parts during which the GPU stream, or
    after its end a transfer, holds the step up. Compute slowed by a copy counts with the time that it took. Hidden
    parts run beside others. Busy times count the fixed part of transfers.
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

    @classmethod
    def of_run(
        cls,
        parts: Mapping[str, Floats],
        *,
        waited_us: Floats,
        gpu_end_us: Floats,
        h2d_end_us: Floats,
        h2d_busy_us: Floats,
        d2h_end_us: Floats,
        d2h_busy_us: Floats,
    ) -> StepTimes:
        """From what a run saw: time of each part, time that the GPU stream ``waited`` for fetches, ends and busy times.

        A fetch that outlasts the GPU stream (a guess for a later step) is exposed there, then a write-back.
        """
        fetched = np.maximum(gpu_end_us, h2d_end_us)
        h2d_exposed = waited_us + (fetched - gpu_end_us)
        d2h_exposed = np.maximum(0.0, d2h_end_us - fetched)
        return cls(
            step_us=np.maximum(fetched, d2h_end_us),
            host_us=parts["host"],
            select_us=parts["select"],
            h2d_exposed_us=h2d_exposed,
            h2d_hidden_us=_hidden(h2d_busy_us, h2d_exposed),
            attention_us=parts["attention"],
            gemm_us=parts["gemm"],
            d2h_exposed_us=d2h_exposed,
            d2h_hidden_us=_hidden(d2h_busy_us, d2h_exposed),
        )

    @property
    def h2d_busy_us(self) -> Floats:
        return self.h2d_exposed_us + self.h2d_hidden_us

    @property
    def d2h_busy_us(self) -> Floats:
        return self.d2h_exposed_us + self.d2h_hidden_us

    def rows(self, index: slice) -> StepTimes:
        """Some of the instances, in the same order."""
        return StepTimes(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    @classmethod
    def concatenate(cls, parts: list[StepTimes]) -> StepTimes:
        """The instances of several runs after one another."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)})

    def check(self, h2d_alone_us: Floats, d2h_alone_us: Floats) -> StepTimes:
        """Hold the invariants of every schedule; SimulatorFault names the one broken. Returns self.

        ``*_alone_us`` [n]: what each direction of the link needs at least for its transfers.
        """
        for field in dataclasses.fields(self):
            require_not_negative(getattr(self, field.name), f"{field.name} is negative or not finite")
        parts = (
            self.host_us + self.select_us + self.h2d_exposed_us + self.attention_us + self.gemm_us + self.d2h_exposed_us
        )
        require_equal(self.step_us, parts, "the parts of a step do not add up to its time")
        require_at_most(self.h2d_busy_us, self.step_us, "the host-to-device link is busy for longer than the step")
        require_at_most(self.d2h_busy_us, self.step_us, "the device-to-host link is busy for longer than the step")
        require_at_most(h2d_alone_us, self.h2d_busy_us, "a fetch took less than its time alone on the link")
        require_at_most(d2h_alone_us, self.d2h_busy_us, "a write-back took less than its time alone on the link")
        return self
