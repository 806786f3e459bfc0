"""One whole decode step as launches over fixed memory: embedding, layers in a schedule's order, sampling, results.

Nothing in it waits for the device or looks at data, so a CUDA graph can hold it; on a CPU the same launches run at
once through the reference kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nosa_sys.engine.cuda.inputs import StepInputs
from nosa_sys.engine.cuda.marks import Marks
from nosa_sys.engine.cuda.part import LanePart, given
from nosa_sys.engine.cuda.schedules import StepSchedule
from nosa_sys.engine.cuda.spec import StepSpec
from nosa_sys.engine.cuda.streams import Streams
from nosa_sys.engine.record_level import RECORD_NOTHING
from nosa_sys.engine.sampling import sample_rows


@dataclass(frozen=True)
class StepOutputs:
    """Where a step leaves its results; every replay writes the same memory.

    ``packed`` int32: tokens [lane], not-finite flags [lane], misses [layer, lane, kv_head], and with speculation the
    blocks brought on a guess [layer] and those of them that left unused [layer]. ``errors`` int32 [layer, lane,
    kv_head] of the selection, None for dense attention. ``block_ids`` int32 and ``origins`` int8 [layer, lane, kv_head,
    k], ``window_scores`` float32 [layer, lane, kv_head, window], ``new_beta_means`` [layer, lane, kv_head]: None unless
    recorded. ``clock``: see marks.
    """

    packed: Tensor
    logits: Tensor
    errors: Tensor | None
    block_ids: Tensor | None
    origins: Tensor | None
    window_scores: Tensor | None
    new_beta_means: Tensor | None
    clock: Tensor


class StepProgram:
    """The launches of one ``StepSpec`` under one schedule."""

    def __init__(self, spec: StepSpec, schedule: StepSchedule, inputs: StepInputs, streams: Streams) -> None:
        self._spec, self._schedule, self._inputs, self._streams = spec, schedule, inputs, streams
        n_parts = min(schedule.n_parts, spec.n_lanes)
        self._marks = Marks(n_parts, spec.model.n_layers, spec.model.device, spec.options.timed)
        borders = part_borders(spec.n_lanes, n_parts)
        self._parts = [LanePart(spec, i, borders[i], borders[i + 1], self._marks) for i in range(n_parts)]

    @torch.inference_mode()
    def run(self) -> StepOutputs:
        """Launch everything; the results are there when the current stream has got so far."""
        spec, parts = self._spec, self._parts
        for part in parts:
            part.begin(self._inputs)
        speculation = self._schedule.run(parts, self._streams, spec.options, spec.model.n_layers)
        hidden = torch.cat([part.output() for part in parts]) if len(parts) > 1 else parts[0].output()
        logits = F.linear(hidden, spec.model.lm_head)
        lanes, inputs = self._inputs.lanes[: spec.n_lanes], self._inputs
        best, tokens = best_of(logits)
        if spec.sampled:
            rows = slice(0, spec.n_lanes)
            tokens = sample_rows(logits, inputs.temperature[rows], inputs.top_p[rows], inputs.uniform[rows])
        sampled = inputs.sampled[: spec.n_lanes]
        sampled.copy_(torch.where(lanes >= 0, tokens, sampled))
        pieces = [tokens.int(), (~best.isfinite()).int()]
        if parts[0].offload:
            pieces.append(
                self._by_lane([[part.by_head(plan.n_loads) for plan in part.plans] for part in parts]).flatten()
            )
        pieces += [count.int() for count in speculation]
        return StepOutputs(packed=torch.cat(pieces), logits=logits, clock=self._marks.clock, **self._selections())

    def _by_lane(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """[layer, lane, ...] out of each part's layers, [row, ...] each."""
        parts = [torch.stack(list(layers)) for layers in rows]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _selections(self) -> dict[str, Tensor | None]:
        """The fields of the outputs that come from the selections."""
        spec, parts = self._spec, self._parts
        names = ("errors", "block_ids", "origins", "window_scores", "new_beta_means")
        found: dict[str, Tensor | None] = dict.fromkeys(names)
        wanted = {"errors": True, "block_ids": spec.options.record > RECORD_NOTHING}
        wanted |= {"origins": wanted["block_ids"], "window_scores": parts[0].keeps_scores}
        for name in names[:-1]:
            if parts[0].selections and wanted[name]:
                found[name] = self._by_lane([[given(getattr(s, name)) for s in part.selections] for part in parts])
        if parts[0].selections and parts[0].keeps_scores:
            found["new_beta_means"] = self._by_lane([part.new_beta_means() for part in parts])
        return found


def part_borders(n_lanes: int, n_parts: int) -> list[int]:
    """First lane of each part, and the number of lanes behind the last.

    >>> part_borders(5, 2)
    [0, 2, 5]
    """
    return [n_lanes * i // n_parts for i in range(n_parts + 1)]


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its place in each row [row, vocab], NaN being larger than anything; ties go to the lower place
    among those of one device kernel's order. In two steps, since one row is too few programs for a GPU."""
    n_rows, vocab = logits.shape
    pieces = next(n for n in (32, 16, 8, 4, 2, 1) if vocab % n == 0)
    best, places = logits.view(n_rows, pieces, vocab // pieces).max(dim=-1)
    top, piece = best.max(dim=-1)
    return top, piece * (vocab // pieces) + places.gather(1, piece[:, None])[:, 0]
