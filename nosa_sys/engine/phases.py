"""Wall time of a layer's phases."""

from __future__ import annotations

import time

SELECT, H2D, ATTENTION, OTHER = PHASES = ("select_us", "h2d_us", "attention_us", "other_us")


class PhaseClock:
    """Laps of one layer: ``lap(phase)`` charges the time since the last lap to ``phase``."""

    def __init__(self) -> None:
        self.phase_us = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phase_us[phase] += (now - self._last) * 1e6
        self._last = now
