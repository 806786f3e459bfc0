"""prefetch: after its attention, each layer brings guessed blocks into spare slots for the next step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.methods import get_method
from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.invariants import SimulatorFault
from nosa_sys.simulator.program import H2D, Program, Transfer
from nosa_sys.simulator.schedules.base import LayerByLayer
from nosa_sys.simulator.step_times import StepCosts
from nosa_sys.simulator.workload import Workload

DEFAULT_HIT_SHARE = 0.5


@dataclass(frozen=True)
class Prefetch(LayerByLayer):
    """``n_blocks`` guessed a head, layer and step (None: every slot beyond k); ``hit_share`` of them are then missed.

    The share is an assumption, not a measurement: no trace says how good a guess would be.
    """

    n_blocks: int | None = None
    hit_share: float = DEFAULT_HIT_SHARE

    name = "prefetch"
    rule = (
        "prefetch: per layer host, select, fetch the misses that no guess covered, attention, post the guessed blocks "
        "for the next step, rest; a later layer's fetch queues behind the guesses; the step ends when the last guess "
        "has arrived too; write-backs as in serial; guesses change no token"
    )
    assumed = True
    fetches_beside = True

    def __post_init__(self) -> None:
        if self.n_blocks is not None and (
            isinstance(self.n_blocks, bool) or not isinstance(self.n_blocks, int) or self.n_blocks < 1
        ):
            raise ConfigError(f"prefetch_blocks={self.n_blocks!r} must be a whole number >= 1")
        share = self.hit_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1 or math.isnan(share):
            raise ConfigError(f"prefetch_hit_share={share!r} must be in [0, 1]")

    def guessed(self, workload: Workload) -> int:
        """Blocks a head, layer and step; CapacityError where the slots beyond k cannot hold them."""
        if get_method(workload.method).dense:
            return 0
        spare = workload.slots - workload.sparse.topk
        wanted = spare if self.n_blocks is None else self.n_blocks
        if spare < max(1, wanted):
            raise CapacityError(
                f"schedule prefetch needs slots >= topk + {max(1, wanted)} = {workload.sparse.topk + max(1, wanted)}, "
                f"this situation has slots={workload.slots}; give more slots (policy lru)"
                + ("" if wanted <= 1 else " or fewer prefetch_blocks")
            )
        return wanted

    def check(self, workload: Workload) -> None:
        self.guessed(workload)

    def rules(self, workload: Workload) -> list[str]:
        return [
            self.rule,
            f"assumed, not measured: {self.guessed(workload)} blocks are guessed a head, layer and step, and a share "
            f"of {self.hit_share:g} of them would have been missed at the next step; a cold step has no guess; the "
            "misses are those of a cache that keeps all its slots",
        ]

    def costs(self, model: CostModel, workload: Workload) -> StepCosts:
        loads = workload.loads
        blocks = model.guessed_blocks(loads, self.guessed(workload))
        covered = model.covered_blocks(loads, blocks, self.hit_share)
        demand = dataclasses.replace(loads, misses=loads.misses - covered)
        return dataclasses.replace(
            model.step_costs(demand, beside=self.fetches_beside),
            speculation=model.speculation(blocks, covered),
            conversion=model.conversion(demand.misses + blocks, loads.filled_blocks),
        )

    def attend(self, program: Program, costs: StepCosts, layer: int, arrived: Transfer) -> None:
        guess = costs.speculation
        if guess is None:
            raise SimulatorFault("prefetch needs the costs of guessed blocks")
        super().attend(program, costs, layer, arrived)
        program.post(
            H2D, layer, guess.fixed_us[:, layer], guess.bytes_us[:, layer], guess.n_bytes[:, layer], "prefetch"
        )
