"""Schedules of a captured step: which stream runs what, and who waits for whom. All give the same tokens.

Compute runs on the current stream, fetches on it too or on the host-to-device stream, write-back on the
device-to-host stream.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from nosa_sys.engine.cuda.part import LanePart, given, load_list
from nosa_sys.engine.cuda.spec import StepOptions
from nosa_sys.engine.cuda.streams import Mark, Streams
from nosa_sys.errors import ConfigError
from nosa_sys.kernels.block_selection import select_pooled
from nosa_sys.kernels.set_difference import SlotPlan


class StepSchedule(ABC):
    """Base of all schedules; variants are entries of STEP_SCHEDULES. ``n_parts`` is how many ranges of lanes take
    turns; ``splits_attention``: hits and misses are attended to apart; ``speculates``: needs spare slots."""

    name: str
    summary: str
    n_parts = 1
    splits_attention = False
    speculates = False

    @abstractmethod
    def run(self, parts: Sequence[LanePart], streams: Streams, options: StepOptions, n_layers: int) -> Sequence[Tensor]:
        """Launch all layers of all parts; nothing may be left on a side stream at the end. Returns what was speculated:
        blocks brought on a guess and guesses that left unused, [layer] each, or nothing."""


def planned(part: LanePart, streams: Streams, layer: int) -> Mark:
    """Plan a layer, and write its filled blocks back beside what follows; returns where the plan ends."""
    part.select(layer)
    mark = streams.mark()
    if part.offload and not part.spec.options.fetch_only:
        with streams.d2h(mark):
            part.write_back(layer)
    return mark


class Serial(StepSchedule):
    """As the public reference: keys of all misses, then values of all misses, then attention."""

    name = "serial"
    summary = "fetch keys, fetch values, attend: one after another"
    halves = True

    def run(self, parts: Sequence[LanePart], streams: Streams, options: StepOptions, n_layers: int) -> Sequence[Tensor]:
        for layer in range(n_layers):
            for part in parts:
                planned(part, streams, layer)
                part.fetch(layer, options.alone, halves=self.halves)
                part.finish(layer, part.attend(layer)[0])
        streams.join()
        return ()


class FusedKV(Serial):
    """One launch moves whole blocks, K and V adjacent."""

    name = "fused_kv"
    summary = "fetch keys and values in one launch, attend: one after another"
    halves = False


class SplitMerge(StepSchedule):
    """Attention over the hits runs while the misses arrive; then attention over them, merged by LSE."""

    name = "split_merge"
    summary = "attend to hits while misses arrive, then to the misses; merge"
    splits_attention = True

    def run(self, parts: Sequence[LanePart], streams: Streams, options: StepOptions, n_layers: int) -> Sequence[Tensor]:
        for layer in range(n_layers):
            for part in parts:
                arrived = fetched(part, streams, layer, options, planned(part, streams, layer))
                if not part.offload:
                    part.finish(layer, part.attend(layer)[0])
                    continue
                hits = part.attend(layer, "hits")
                streams.wait(arrived)
                part.finish(layer, part.merge(layer, hits, part.attend(layer, "misses")))
        streams.join()
        return ()


class TwoBatch(StepSchedule):
    """Two halves of the batch: one computes while the misses of the other arrive."""

    name = "two_batch"
    summary = "one half of the batch computes while the other half's misses arrive"
    n_parts = 2

    def run(self, parts: Sequence[LanePart], streams: Streams, options: StepOptions, n_layers: int) -> Sequence[Tensor]:
        arrived = [fetched(part, streams, 0, options, planned(part, streams, 0)) for part in parts]
        for layer in range(n_layers):
            for index, part in enumerate(parts):
                streams.wait(arrived[index])
                part.finish(layer, part.attend(layer)[0])
                if layer + 1 < n_layers:
                    mark = planned(part, streams, layer + 1)
                    arrived[index] = fetched(part, streams, layer + 1, options, mark)
        streams.join()
        return ()


class Prefetch(StepSchedule):
    """As fused_kv, and behind each fetch the blocks ranked next are brought into spare slots, beside the layers that
    follow. A wrong guess costs link time and a slot, never a token."""

    name = "prefetch"
    summary = "fetch, attend; the blocks ranked next are brought into spare slots meanwhile"
    speculates = True

    def run(self, parts: Sequence[LanePart], streams: Streams, options: StepOptions, n_layers: int) -> Sequence[Tensor]:
        guesses = [Guesses(part, options.n_prefetch) for part in parts]
        for layer in range(n_layers):
            for part, guess in zip(parts, guesses, strict=True):
                arrived = fetched(part, streams, layer, options, planned(part, streams, layer))
                streams.wait(arrived)
                attention = part.attend(layer)[0]
                mark = streams.mark()
                with streams.h2d(mark):
                    # behind attention: a guess may take the slot of a block that was selected before, never now
                    guess.bring(layer)
                part.finish(layer, attention)
        streams.join()
        return _sums(parts, guesses)


def fetched(part: LanePart, streams: Streams, layer: int, options: StepOptions, plan: Mark) -> Mark:
    """Fetch on the host-to-device stream, behind ``plan``; returns where it ends."""
    with streams.h2d(plan):
        part.fetch(layer, options.beside)
        return streams.mark()


class Guesses:
    """Speculation of one part: the blocks that a budget of ``n`` more query-aware picks would have selected."""

    def __init__(self, part: LanePart, n: int) -> None:
        self._part, cfg = part, part.cfg
        self._cfg = dataclasses.replace(cfg, topk=cfg.topk + n, select_blocks=cfg.select_blocks + n)
        self.counts = torch.zeros_like(part.counts)
        self._list = load_list(part.n_rows * part.n_heads * self._cfg.topk, part.counts.device)
        self.plans: list[SlotPlan] = []
        self._kept: list[Tensor] = []
        injection = part.spec.injection
        self._injected = None if injection is None else part.of_this_step(given(injection.guess_table))

    def bring(self, layer: int) -> None:
        """Plan and fetch the guesses of a layer, for its next step."""
        part, ids = self._part, self._ids(layer)
        self._kept.append(ids)
        loads = part.loads_of(self._list, self.counts, layer)
        self.plans.append(part.plan_into(layer, ids, None, loads, speculative=True))
        if not part.spec.options.skip_fetch:
            part.bring(layer, loads, part.spec.options.beside)

    def _ids(self, layer: int) -> Tensor:
        """Selected blocks and guesses, int32 [row, kv_head, k + n]."""
        if self._injected is not None:
            return self._injected[layer]
        part = self._part
        selection = part.selections[layer]
        scores, betas = given(selection.pooled_scores), given(selection.pooled_betas)
        lengths = part.geometry.lengths
        n_blocks = (lengths + part.cfg.block_size - 1) // part.cfg.block_size
        return select_pooled(scores, betas, n_blocks, self._cfg, part.method)[0]


def _sums(parts: Sequence[LanePart], guesses: Sequence[Guesses]) -> tuple[Tensor, Tensor]:
    """Blocks brought on a guess, and guesses that lost their slot unused, int64 [layer] each."""
    brought = torch.stack([guess.counts for guess in guesses]).sum(0)
    plans = [(*part.plans, *guess.plans) for part, guess in zip(parts, guesses, strict=True)]
    n_layers = len(parts[0].plans)
    wasted = torch.stack([torch.stack([given(plan.n_wasted).sum() for plan in own]) for own in plans])
    return brought, wasted.view(len(parts), 2, n_layers).sum((0, 1))


STEP_SCHEDULES: dict[str, StepSchedule] = {
    s.name: s for s in (Serial(), FusedKV(), SplitMerge(), TwoBatch(), Prefetch())
}


def get_step_schedule(name: str) -> StepSchedule:
    """Look a schedule up; the error lists the known ones."""
    if name not in STEP_SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r} for an engine; known: {', '.join(STEP_SCHEDULES)}")
    return STEP_SCHEDULES[name]
