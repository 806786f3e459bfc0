"""serial and fused_kv: every kernel waits for the one before, attention for its misses."""

from __future__ import annotations

from nosa_sys.simulator.program import H2D, Program, Transfer
from nosa_sys.simulator.schedules.base import LayerByLayer
from nosa_sys.simulator.step_times import StepCosts


class FusedKv(LayerByLayer):
    """K and V of a block are one run of bytes and move in one launch."""

    name = "fused_kv"
    rule = (
        "fused_kv: per layer host, select, fetch misses (K and V in one launch), attention, rest, one after another; "
        "finished blocks are written back beside it from the end of the layer's selection; the step ends when both "
        "have ended"
    )


class Serial(LayerByLayer):
    """The reference's order."""

    name = "serial"
    rule = (
        "serial: per layer host, select, fetch K of all misses, fetch V of all misses (two launches, each with the "
        "fixed cost of a fetch), attention, rest, one after another; finished blocks are written back beside it from "
        "the end of the layer's selection; the step ends when both have ended"
    )

    def fetch(self, program: Program, costs: StepCosts, layer: int) -> Transfer:
        fixed, half = costs.h2d_fixed_us[:, layer], costs.h2d_us[:, layer] / 2
        key_bytes = costs.h2d_bytes[:, layer] // 2
        program.post(H2D, layer, fixed, half, key_bytes, "copy K")
        return program.post(H2D, layer, fixed, half, costs.h2d_bytes[:, layer] - key_bytes, "copy V")
