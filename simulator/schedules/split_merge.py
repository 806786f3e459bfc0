"""split_merge: attention over the blocks that are there runs while the misses arrive."""

from __future__ import annotations

import dataclasses

from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.invariants import SimulatorFault
from nosa_sys.simulator.program import ATTENTION, Program, Transfer
from nosa_sys.simulator.schedules.base import LayerByLayer, convert_arrived
from nosa_sys.simulator.step_times import StepCosts
from nosa_sys.simulator.workload import Workload


class SplitMerge(LayerByLayer):
    """Two attention launches a layer; softmax makes the merge exact."""

    name = "split_merge"
    fetches_beside = True
    rule = (
        "split_merge: per layer host, select, post the fetch of misses (K and V in one launch), attention over hits "
        "beside it, wait for the misses, attention over them and merge by log-sum-exp, rest; a layer without a miss "
        "has one attention launch and no merge; finished blocks are written back as in serial"
    )

    def costs(self, model: CostModel, workload: Workload) -> StepCosts:
        costs = super().costs(model, workload)
        return dataclasses.replace(costs, attention_split=model.attention_split(workload.loads))

    def attend(self, program: Program, costs: StepCosts, layer: int, arrived: Transfer) -> None:
        split = costs.attention_split
        if split is None:
            raise SimulatorFault("split_merge needs the attention costs of hits and of misses")
        program.run(ATTENTION, layer, split.hit_us[:, layer], name="attention over hits")
        waits = convert_arrived(program, costs, layer, arrived)
        program.run(ATTENTION, layer, split.miss_us[:, layer], after=waits, name="attention over misses")
