"""serial and fused_kv: every kernel waits for the one before, attention for its misses."""

from __future__ import annotations

from nosa_sys.simulator.program import ATTENTION, GEMM, H2D, HOST, SELECT, Program, Transfer
from nosa_sys.simulator.schedules.base import Schedule, post_write_back
from nosa_sys.simulator.step_times import StepCosts


class OneStream(Schedule):
    """Fetches run in the GPU stream's order, one after another with its kernels."""

    def program(self, costs: StepCosts) -> Program:
        program = Program(len(costs), costs.sharing)
        program.run(HOST, -1, costs.step_host_us)
        for layer in range(costs.n_layers):
            program.run(HOST, layer, costs.host_us[:, layer])
            program.run(SELECT, layer, costs.select_us[:, layer])
            post_write_back(program, costs, layer)
            arrived = self.fetch(program, costs, layer)
            program.run(ATTENTION, layer, costs.attention_us[:, layer], after=arrived)
            program.run(GEMM, layer, costs.gemm_us[:, layer])
        program.run(GEMM, -1, costs.tail_us, name="output head")
        return program

    def fetch(self, program: Program, costs: StepCosts, layer: int) -> Transfer:
        """Post the layer's misses; returns the last transfer of them."""
        return post_fetch(program, costs, layer)


class FusedKv(OneStream):
    """K and V of a block are one run of bytes and move in one launch."""

    name = "fused_kv"
    rule = (
        "fused_kv: per layer host, select, fetch misses (K and V in one launch), attention, rest, one after another; "
        "finished blocks are written back beside it from the end of the layer's selection; the step ends when both "
        "have ended"
    )


class Serial(OneStream):
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


def post_fetch(program: Program, costs: StepCosts, layer: int) -> Transfer:
    """The layer's misses in one launch."""
    return program.post(H2D, layer, costs.h2d_fixed_us[:, layer], costs.h2d_us[:, layer], costs.h2d_bytes[:, layer])
