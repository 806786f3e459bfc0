"""What a schedule is: a rule in words, the costs that it needs, and the program of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nosa_sys.simulator import pipeline, recurrence
from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.program import D2H, Program, Transfer
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


def post_write_back(program: Program, costs: StepCosts, layer: int) -> Transfer:
    """Blocks that the step's token fills, device to host."""
    return program.post(
        D2H, layer, costs.d2h_fixed_us[:, layer], costs.d2h_us[:, layer], costs.d2h_bytes[:, layer], "write-back"
    )
