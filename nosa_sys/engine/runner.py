"""What an engine asks of whoever runs its decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nosa_sys.engine.decode import DecodeRunner
from nosa_sys.engine.plan import StepBatch, StepPlan
from nosa_sys.engine.sampling import Draws, sample
from nosa_sys.traces.timeline import Mark


@dataclass(frozen=True)
class StepResult:
    """A finished step: the next token of each row, its plan, the logits [row, vocab] where they are kept, and for rows
    whose numbers are of no use the reason (their token means nothing)."""

    tokens: list[int]
    plan: StepPlan
    logits: Tensor | None
    failures: dict[int, str] = field(default_factory=dict)


class StepRunner(Protocol):
    """Runs steps in the order in which they are launched; ``looks_ahead``: a step may be launched before the one before
    it is collected, its token -1 standing for the one that will be sampled; ``last_spans``: what ran when at the step
    collected last, where it was timed."""

    looks_ahead: bool
    last_spans: list[Mark]

    @property
    def schedule_in_use(self) -> str:
        """The schedule of the running steps."""

    def launch(self, batch: StepBatch, tokens: list[int], draws: Draws | None) -> None:
        """Start a step that consumes ``tokens``; without ``draws`` every row takes its best token."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""

    def stop_recording(self) -> None:
        """Keep nothing for a recorder in the steps to come."""


class EagerRunner:
    """Every operation at once, one after another (reference kernels)."""

    looks_ahead = False

    def __init__(self, decode: DecodeRunner) -> None:
        self._decode = decode
        self.schedule_in_use = decode.schedule.name
        self.last_spans: list[Mark] = []

    def launch(self, batch: StepBatch, tokens: list[int], draws: Draws | None) -> None:
        """Raises NumericsError for NaN scores; the step is then undone but for what repeats itself."""
        logits, plan = self._decode.step(batch, tokens)
        finite = logits.amax(dim=-1).isfinite().tolist()
        failures = {row: NOT_FINITE for row, good in enumerate(finite) if not good}
        if failures:
            logits = torch.where(logits.isfinite(), logits, 0.0)
        self._result = StepResult(sample(logits, draws), plan, logits, failures)

    def collect(self) -> StepResult:
        return self._result

    def stop_recording(self) -> None:
        self._decode.record_scores = False


NOT_FINITE = "NaN or infinite logits"
