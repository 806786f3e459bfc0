"""Situations of the results page priced by the simulator: one even step with a given number of misses a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.prediction import Prediction
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.workload import Workload, n_first_half
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses

# What the engine's schedule auto chooses among.
AUTO = ("serial", "fused_kv", "split_merge", "two_batch")
EVEN_RULE = "misses are spread evenly over layers, heads and steps"


@dataclass(frozen=True)
class Situation:
    """``misses`` of blocks a head and step; ``offload`` False: every block stays on the device, nothing is missed."""

    shape: ModelShape
    sparse: SparseConfig
    method: str
    batch: int
    context: int
    misses: float = 0.0
    slots: int | None = None
    offload: bool = True

    def workload(self) -> Workload:
        """One warm step of ``batch`` sequences of ``context`` tokens."""
        dense = get_method(self.method).dense
        slots = 0 if dense else self.slots or self.sparse.topk
        block_bytes = self.shape.kv_block_bytes(self.sparse.block_size)
        first = self._loads(int(n_first_half(self.batch)))
        return Workload(
            self._loads(self.batch), self.shape, self.sparse, self.method, slots, "lru", block_bytes, block_bytes,
            self.batch, self.context, False, first,
        )  # fmt: skip

    def _loads(self, rows: int) -> LayerStepMisses:
        heads, n_layers = rows * self.shape.n_kv_heads, self.shape.n_layers
        dense, n_blocks = get_method(self.method).dense, self.sparse.n_blocks(self.context)
        moves = self.offload and not dense
        attended = n_blocks if dense else min(self.sparse.topk, n_blocks)
        total = np.round(np.arange(n_layers + 1) * heads * (self.misses if moves else 0.0)).astype(np.int64)
        filled = round(heads / self.sparse.block_size) if moves else 0
        return LayerStepMisses(
            steps=np.zeros(1, dtype=np.int32),
            n_sequences=np.full(1, rows, dtype=np.int32),
            misses=np.diff(total)[None, :],
            filled_blocks=np.full((1, n_layers), filled, dtype=np.int64),
            attended_blocks=np.full((1, n_layers), heads * attended, dtype=np.int64),
            context_tokens=np.full(1, rows * self.context, dtype=np.int64),
            cold=np.zeros(1, dtype=np.bool_),
        )

    def fits(self, profile: HardwareProfile) -> bool:
        """Whether weights, KV and what selection reads fit the memory of device and host."""
        kept = self if self.offload or get_method(self.method).dense else self._all_resident()
        memory = kept.workload().memory()
        if not self.offload:
            memory = dataclasses.replace(memory, host_pool_bytes=0)
        return not memory.limits(profile)

    def _all_resident(self) -> Situation:
        return dataclasses.replace(self, slots=max(self.sparse.topk, self.sparse.n_blocks(self.context)))


@dataclass(frozen=True)
class Priced:
    """A situation with the prediction for it."""

    situation: Situation
    prediction: Prediction
    fits: bool

    @property
    def tokens_per_s(self) -> float | None:
        """None where it does not fit the memory: a gap in a line."""
        return self.prediction.tokens_per_s if self.fits else None


def price_all(situations: Sequence[Situation], profiles: Sequence[HardwareProfile], schedule: str) -> list[Prediction]:
    """Predicted steps in one call of the fast path. Situations are of one model, ``profiles`` has one for each.

    Outside what a profile was measured at its forms go on; `outside_note` tells where.
    """
    works = [
        (situation.workload(), profile.extrapolating()) for situation, profile in zip(situations, profiles, strict=True)
    ]
    return price(works, get_schedule(schedule)) if works else []


def best_of(situations: Sequence[Situation], profiles: Sequence[HardwareProfile]) -> list[Priced]:
    """Each situation under the fastest of the schedules that the engine would try."""
    tried = [price_all(situations, profiles, name) for name in AUTO]
    return [
        Priced(situation, min(own, key=lambda p: p.step_time_us), situation.fits(profile))
        for situation, profile, own in zip(situations, profiles, zip(*tried, strict=True), strict=True)
    ]


def outside_note(found: Sequence[Priced]) -> str:
    """How many of the points that fit were extrapolated, with the first reason for each axis; empty for none."""
    fitting = [point for point in found if point.fits]
    outside = [point for point in fitting if point.prediction.extrapolated]
    reasons: dict[str, str] = {}
    for point in outside:
        for sentence in point.prediction.extrapolated:
            reasons.setdefault(sentence.partition(" is ")[0].rstrip("0123456789, "), sentence)
    if not outside:
        return ""
    return f"{len(outside)} of {len(fitting)} simulated points are extrapolated: {'; '.join(reasons.values())}"
