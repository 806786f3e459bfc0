"""two_batch: the rows in two halves, one computing while the other's misses arrive."""

from __future__ import annotations

import dataclasses

import numpy as np

from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.invariants import SimulatorFault, require
from nosa_sys.simulator.program import ATTENTION, GEMM, HOST, Program, Transfer
from nosa_sys.simulator.schedules.base import Schedule, convert_arrived, post_fetch, select_layer
from nosa_sys.simulator.step_times import StepCosts
from nosa_sys.simulator.workload import Workload, second_half


class TwoBatch(Schedule):
    """Every layer's matrices are read once for each half; the output head runs once over all rows."""

    name = "two_batch"
    fetches_beside = True
    rule = (
        "two_batch: the rows in two halves A (the smaller where they are odd) and B, each with its own launches, so "
        "that a layer's matrices are read twice; select A and post its fetch, select B and post its fetch, then per "
        "layer: wait for A, attention and rest of A, select A of the next layer and post its fetch, the same for B; "
        "the output head runs once; fetches of both halves share the link in order of posting; write-backs as in "
        "serial"
    )

    def costs(self, model: CostModel, workload: Workload) -> StepCosts:
        whole, first = workload.loads, workload.first_half
        second = second_half(whole, first)
        halves = (
            model.step_costs(first, beside=self.fetches_beside),
            model.step_costs(second, beside=self.fetches_beside),
        )
        costs = dataclasses.replace(super().costs(model, workload), halves=halves)
        for name in ("h2d_bytes", "d2h_bytes"):
            moved = sum(getattr(half, name) for half in halves)
            require(np.array_equal(moved, getattr(costs, name)), f"{name} of the halves do not add up to the batch's")
        return costs

    def program(self, costs: StepCosts) -> Program:
        if costs.halves is None:
            raise SimulatorFault("two_batch needs the costs of both halves")
        halves = list(zip(costs.halves, "AB", strict=True))
        program = Program(len(costs), costs.sharing)
        program.run(HOST, -1, costs.step_host_us)
        arrived = [_select(program, half, 0, label) for half, label in halves]
        for layer in range(costs.n_layers):
            for index, (half, label) in enumerate(halves):
                waits = convert_arrived(program, half, layer, arrived[index], label)
                program.run(ATTENTION, layer, half.attention_us[:, layer], after=waits, name=f"attention {label}")
                program.run(GEMM, layer, half.gemm_us[:, layer], name=f"gemm {label}")
                if layer + 1 < costs.n_layers:
                    arrived[index] = _select(program, half, layer + 1, label)
        program.run(GEMM, -1, costs.tail_us, name="output head")
        return program


def _select(program: Program, half: StepCosts, layer: int, label: str) -> Transfer:
    select_layer(program, half, layer, label)
    return post_fetch(program, half, layer)
