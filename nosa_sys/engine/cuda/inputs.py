"""What changes from step to step: a few numbers a lane, staged in pinned memory and copied to fixed device tensors.

A captured graph reads these tensors and nothing else that the host decides, so that its replays stay right over block
borders, joins and leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.sampling import Draws

_LANE, _POSITION, _TOKEN = range(3)
_TEMPERATURE, _TOP_P, _UNIFORM = range(3)
# A step may be staged while the one before still waits to be copied.
_N_STAGES = 2


class StepInputs:
    """Device tensors of one step. Row r of the batch is lane r: ``lanes`` int64 [lane] holds r, or -1 for a lane that
    does not run; ``positions`` int64 [lane]; ``tokens`` int64 [lane], -1: the token that the step before sampled, which
    it left in ``sampled`` int64 [lane]. ``temperature``, ``top_p``, ``uniform`` float64 [lane].

    int64 [1] each: ``step``; ``use_rank``, the eviction rank of a slot that this step uses; ``guess_rank``, the rank of
    one that it fills on a guess. Ranks grow with the step and are odd once a block was used, even before.
    """

    def __init__(self, n_lanes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._ints = torch.zeros((3, n_lanes), dtype=torch.int64, device=device)
        self._floats = torch.ones((3, n_lanes), dtype=torch.float64, device=device)
        self._numbers = torch.zeros(3, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(n_lanes, dtype=torch.int64, device=device)
        self._staged = [
            (
                torch.zeros((3, n_lanes), dtype=torch.int64, pin_memory=pinned),
                torch.ones((3, n_lanes), dtype=torch.float64, pin_memory=pinned),
                torch.zeros(3, dtype=torch.int64, pin_memory=pinned),
            )
            for _ in range(_N_STAGES)
        ]
        self._turn = 0
        self.n_lanes = n_lanes
        self.lanes, self.positions, self.tokens = self._ints
        self.temperature, self.top_p, self.uniform = self._floats
        self.step, self.use_rank, self.guess_rank = self._numbers.split(1)
        self.clear()

    def clear(self) -> None:
        """No lane runs: what a warm-up before a capture needs."""
        self._ints[_LANE] = -1
        self._ints[_POSITION:] = 0

    def stage(self, step: int, lanes: list[int], positions: list[int], tokens: list[int], draws: Draws | None) -> None:
        """Put a step's numbers on their way, on the current stream. One entry a row; other lanes do not run."""
        ints, floats, numbers = self._staged[self._turn]
        self._turn = (self._turn + 1) % _N_STAGES
        values = ints.numpy()
        values[_LANE] = -1
        values[_POSITION:] = 0
        values[:, lanes] = (lanes, positions, tokens)
        numbers.numpy()[:] = (step, 2 * step + 1, 2 * step)
        self._ints.copy_(ints, non_blocking=True)
        self._numbers.copy_(numbers, non_blocking=True)
        if draws is not None:
            floats.numpy()[:, lanes] = (draws.temperature, draws.top_p, draws.uniform)
            self._floats.copy_(floats, non_blocking=True)

    def current_tokens(self, lanes: slice) -> Tensor:
        """Token ids int64 [row] that the rows consume."""
        return torch.where(self.tokens[lanes] >= 0, self.tokens[lanes], self.sampled[lanes])
