"""Clock marks of a timed step: when each layer's phases began and ended on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nosa_sys.engine.phases import ATTENTION, H2D, OTHER, SELECT
from nosa_sys.kernels.step_marks import mark
from nosa_sys.traces.timeline import GPU, Mark
from nosa_sys.traces.timeline import H2D as H2D_TRACK

LAYER_START, PROJECTED, PLANNED, ATTEND_START, ATTEND_END, LAYER_END, FETCH_START, FETCH_END = range(N_MARKS := 8)


class Marks:
    """Device clock readings int64 [part, layer, mark] in nanoseconds; without ``enabled`` nothing is launched.

    A mark is a launch of its own (1 to 2 us), so a timed step is a little longer than an untimed one.
    """

    def __init__(self, n_parts: int, n_layers: int, device: torch.device, enabled: bool) -> None:
        self._enabled, self._n_layers = enabled, n_layers
        self.clock = torch.zeros((n_parts, n_layers, N_MARKS), dtype=torch.int64, device=device)

    def set(self, part: int, layer: int, what: int) -> None:
        """Read the clock on the current stream."""
        if self._enabled:
            mark(self.clock.view(-1), (part * self._n_layers + layer) * N_MARKS + what)


def phases(clock: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Time of each phase a layer in microseconds, float [layer], summed over the parts.

    ``h2d`` is what attention waited for between the plan and its start; where a schedule does other work in that gap
    (two_batch), that work is in it too, and the timeline tells them apart.
    """
    at = clock.astype(np.float64).sum(axis=0) / 1e3
    select, attention = at[:, PLANNED] - at[:, PROJECTED], at[:, ATTEND_END] - at[:, ATTEND_START]
    h2d = at[:, ATTEND_START] - at[:, PLANNED]
    other = at[:, PROJECTED] - at[:, LAYER_START] + at[:, LAYER_END] - at[:, ATTEND_END]
    return {SELECT: select, H2D: h2d, ATTENTION: attention, OTHER: other}


def spans(clock: NDArray[np.int64], h2d_bytes: NDArray[np.int64]) -> list[Mark]:
    """(track, name, layer, start_us, end_us, n_bytes) of one step, from its first mark; ``h2d_bytes`` [part, layer]."""
    origin = clock[:, :, LAYER_START].min()
    at = (clock - origin) / 1e3
    found: list[Mark] = []
    for part, layers in enumerate(at):
        for layer, times in enumerate(layers):
            pieces = (
                (GPU, "projection", LAYER_START, PROJECTED, 0),
                (GPU, "select", PROJECTED, PLANNED, 0),
                (GPU, "attention", ATTEND_START, ATTEND_END, 0),
                (GPU, "rest", ATTEND_END, LAYER_END, 0),
                (H2D_TRACK, "copy", FETCH_START, FETCH_END, int(h2d_bytes[part, layer])),
            )
            found += [(track, name, layer, times[a], times[b], n) for track, name, a, b, n in pieces if times[b] > 0]
    return found
