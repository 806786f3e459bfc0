"""What a schedule is: a rule in words, the costs that it needs, and the program of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nosa_sys.simulator import pipeline, recurrence
from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.program import ATTENTION, D2H, GEMM, H2D, HOST, SELECT, Program, Transfer
from nosa_sys.simulator.step_times import StepCosts, StepTimes
from nosa_sys.simulator.workload import Workload


class Schedule(ABC):
    """Base of all schedules; variants are entries of SCHEDULES. ``rule`` is printed with every prediction."""

    name: str
    rule: str
    fetches_beside = False  # whether fetches run next to compute, not in line with it
    assumed = False  # whether it rests on something that no trace holds, so that every result is a projection

    def costs(self, model: CostModel, workload: Workload) -> StepCosts:
        """Costs of every step of a workload, with what this schedule needs beyond the common ones."""
        return model.step_costs(workload.loads, beside=self.fetches_beside)

    def check(self, workload: Workload) -> None:  # noqa: B027  most schedules run everything
        """Refuse a workload that the schedule cannot run, by a NosaError that says what to change."""

    def rules(self, workload: Workload) -> list[str]:
        """The rule, and what the schedule assumes about this workload."""
        return [self.rule]

    @abstractmethod
    def program(self, costs: StepCosts) -> Program:
        """The pieces and transfers of a step, for every instance."""

    def simpy(self, costs: StepCosts) -> tuple[StepTimes, list[list[pipeline.Span]]]:
        """Times and spans of every instance by discrete-event simulation."""
        return pipeline.run_program(self.program(costs))

    def recurrence(self, costs: StepCosts) -> StepTimes:
        """The same times by numpy, for many instances."""
        chunks = [
            recurrence.run_program(self.program(costs.rows(slice(i, i + recurrence.CHUNK))))
            for i in range(0, len(costs), recurrence.CHUNK)
        ]
        return StepTimes.concatenate(chunks)


class LayerByLayer(Schedule):
    """One batch, its layers in order: host, select, fetch, attention, rest. Variants say how fetch and attention go."""

    def program(self, costs: StepCosts) -> Program:
        program = Program(len(costs), costs.sharing)
        program.run(HOST, -1, costs.step_host_us)
        for layer in range(costs.n_layers):
            select_layer(program, costs, layer)
            self.attend(program, costs, layer, self.fetch(program, costs, layer))
            program.run(GEMM, layer, costs.gemm_us[:, layer])
        program.run(GEMM, -1, costs.tail_us, name="output head")
        return program

    def fetch(self, program: Program, costs: StepCosts, layer: int) -> Transfer:
        """Post the layer's misses; returns the last transfer of them."""
        return post_fetch(program, costs, layer)

    def attend(self, program: Program, costs: StepCosts, layer: int, arrived: Transfer) -> None:
        """Attention, behind the transfer that it needs."""
        waits = convert_arrived(program, costs, layer, arrived)
        program.run(ATTENTION, layer, costs.attention_us[:, layer], after=waits)


def select_layer(program: Program, costs: StepCosts, layer: int, label: str = "") -> None:
    """Host time and selection of a layer, and behind them the write-back of blocks that the step's token fills."""
    program.run(HOST, layer, costs.host_us[:, layer], name=f"{HOST} {label}".strip())
    program.run(SELECT, layer, costs.select_us[:, layer], name=f"{SELECT} {label}".strip())
    if costs.conversion is not None:
        program.run(SELECT, layer, costs.conversion.quant_us[:, layer], name=f"quantise {label}".strip())
    program.post(
        D2H, layer, costs.d2h_fixed_us[:, layer], costs.d2h_us[:, layer], costs.d2h_bytes[:, layer], "write-back"
    )


def convert_arrived(
    program: Program, costs: StepCosts, layer: int, arrived: Transfer, label: str = ""
) -> Transfer | None:
    """Bring the layer's misses to the device's format where they need it; returns what attention then waits for."""
    if costs.conversion is None:
        return arrived
    name = f"dequantise {label}".strip()
    program.run(ATTENTION, layer, costs.conversion.dequant_us[:, layer], after=arrived, name=name)
    return None


def post_fetch(program: Program, costs: StepCosts, layer: int) -> Transfer:
    """The layer's misses in one launch."""
    return program.post(H2D, layer, costs.h2d_fixed_us[:, layer], costs.h2d_us[:, layer], costs.h2d_bytes[:, layer])
