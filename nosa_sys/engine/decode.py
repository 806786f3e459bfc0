"""One decode step over a batch of sequences of unequal lengths: plan each layer, then launch it.

Attention reads what lies on the device and nothing else: slots, or without offload pages. The host pool is touched by
block_fetch and write_back alone. Every operation is one batched call a layer.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from nosa_sys.engine.injection import Injection, geometric_origins
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.phases import ATTENTION, H2D, OTHER, SELECT, PhaseClock
from nosa_sys.engine.plan import LayerPlan, StepBatch, StepLayout, StepPlan, collect_layers, make_layout
from nosa_sys.engine.policies import Policy
from nosa_sys.engine.schedules import Schedule
from nosa_sys.engine.slot_cache import SlotCache
from nosa_sys.errors import NumericsError
from nosa_sys.kernels.block_fetch.reference import fetch_blocks, write_back
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import Selection, select_blocks
from nosa_sys.kernels.set_difference.reference import update_slots
from nosa_sys.kernels.sparse_decode_attention.reference import sparse_decode_attention
from nosa_sys.kernels.stage1_scores.reference import stage1_scores
from nosa_sys.models.llama import LlamaModel


def copy_one_by_one(host: Tensor, slots: Tensor, host_rows: Tensor, slot_rows: Tensor) -> None:
    """``fetch_blocks`` by one asynchronous copy a block, in the order given; no row may be -1."""
    for host_row, slot_row in zip(host_rows.tolist(), slot_rows.tolist(), strict=True):
        slots[slot_row].copy_(host[host_row], non_blocking=True)


class DecodeRunner:
    """Runs decode steps of one engine. ``record_scores`` keeps the stage-1 scores of every row in the plan;
    ``injection``: sets that take the place of the selections."""

    def __init__(
        self,
        model: LlamaModel,
        memory: Memory,
        policy: Policy,
        schedule: Schedule,
        *,
        record_scores: bool = False,
        injection: Injection | None = None,
    ) -> None:
        self.model, self.memory, self.policy, self.schedule = model, memory, policy, schedule
        self.injection = injection
        self.cfg, self.method = memory.cfg, memory.method
        self.record_scores = record_scores
        n_forced = self.cfg.n_forced
        self._ranks_query = not self.method.dense and self.method.query_aware_picks(self.cfg, n_forced) > 0
        self._ranks_beta = not self.method.dense and (self.method.fill(self.cfg, n_forced) > 0 or policy.ranks_by_beta)
        self._measure = model.device.type == "cpu"

    @torch.inference_mode()
    def step(self, batch: StepBatch, tokens: list[int]) -> tuple[Tensor, StepPlan]:
        """Consume ``tokens`` [batch] at the batch's positions; returns logits [batch, vocab] and the plan."""
        start = time.perf_counter()
        model, memory = self.model, self.memory
        if self.injection is not None:
            self.injection.check_step(batch.step, batch.lanes, batch.positions)
        layout = make_layout(batch, self.cfg, memory.n_kv_heads, memory.n_slots, model.device)
        everything = self._select_all(layout) if batch.all_dense else None
        x = model.embed(torch.tensor(tokens, device=model.device))
        layers = []
        for index in range(model.n_layers):
            clock = PhaseClock()
            q, k, v, beta = model.attention_inputs(index, x)
            q, k = model.rope(q, k, layout.positions_t)
            clock.lap(OTHER)
            work = _LayerStep(self, index, layout, q, everything, clock)
            work.append(k, v, beta)
            work.plan()
            work.place_token(k, v, beta)
            clock.lap(SELECT)
            attention = self.schedule.run(work)
            work.write_back_filled()
            clock.lap(H2D)
            x = model.attention_output(index, x, attention)
            clock.lap(OTHER)
            phase_us = clock.phase_us if self._measure else None
            layers.append(LayerPlan(work.selection, work.n_misses, work.window_scores, work.new_beta_means, phase_us))
        logits = model.logits(x)
        if not self._measure:
            torch.cuda.synchronize(model.device)
        plan = collect_layers(batch, layers, (time.perf_counter() - start) * 1e6)
        if self.injection is not None and plan.block_ids is not None:
            plan = dataclasses.replace(plan, origins=geometric_origins(plan.block_ids, batch.blocks, self.cfg))
        return logits, plan

    def _select_all(self, layout: StepLayout) -> Selection:
        """The selection of a step whose rows all select everything: the same in every layer."""
        nothing = torch.zeros(
            (layout.rows.size, self.memory.n_kv_heads, layout.rows.max_blocks), device=self.model.device
        )
        whole = select_blocks(nothing, nothing, layout.n_blocks_t, self.cfg, self.method)
        width = layout.rows.max_blocks
        return Selection(whole.block_ids[..., :width], whole.origins[..., :width], whole.counts)


class _LayerStep:
    """One layer of one step: the planning state, and the launches that a schedule orders."""

    window_scores: Tensor | None = None
    new_beta_means: Tensor | None = None

    def __init__(
        self,
        runner: DecodeRunner,
        layer: int,
        layout: StepLayout,
        q: Tensor,
        everything: Selection | None,
        clock: PhaseClock,
    ) -> None:
        self.runner, self.layer, self.layout, self.q, self.clock = runner, layer, layout, q, clock
        self.memory, self.cfg = runner.memory, runner.cfg
        self._everything = everything
        self._loads: tuple[Tensor, Tensor] | None = None

    # ---- planning
    def append(self, k: Tensor, v: Tensor, beta: Tensor) -> None:
        """Let the token into the device-side context, and complete the windows that it ends."""
        layout, context = self.layout, self.memory.context
        if not context.kept:
            return
        context.append_tokens(self.layer, layout.lanes_t, layout.positions_t, k, beta)
        if layout.rows.windows_done:
            rows = layout.rows.windows_done
            means = context.complete_windows(self.layer, layout.lanes_t[rows], layout.lengths_t[rows])
            if self.runner.record_scores:
                self.new_beta_means = means

    def plan(self) -> None:
        """Select blocks, and find their slots and the misses."""
        self.selection, pooled_betas = self._select()
        injection = self.runner.injection
        if injection is not None:
            ids = injection.ids_table[self.layout.rows.step, self.layer, self.layout.lanes_t]
            self.selection = self.selection._replace(block_ids=ids)
        if self.memory.slots is None:
            self._find_pages()
        else:
            self._update_slots(self.memory.slots, pooled_betas)

    def _select(self) -> tuple[Selection, Tensor | None]:
        runner, layout, context = self.runner, self.layout, self.memory.context
        if runner.record_scores or (runner._ranks_query and not layout.rows.all_dense):
            key_means = layout.over_lanes(context.key_means[self.layer])[:, :, : layout.rows.max_windows]
            scores = stage1_scores(self.q, key_means, layout.n_windows_t)
            if runner.record_scores:
                self.window_scores = scores
        if self._everything is not None:
            return self._everything, None
        n_windows, n_blocks = layout.n_windows_t, layout.rows.max_blocks
        pooled_scores = pooled_betas = None
        if runner._ranks_query:
            pooled_scores = pool_windows(scores, n_windows, n_blocks, self.cfg)
        if runner._ranks_beta:
            beta_means = layout.over_lanes(context.beta_means[self.layer])[:, :, : layout.rows.max_windows]
            pooled_betas = pool_windows(beta_means, n_windows, n_blocks, self.cfg)
        # a ranking that the method does not use is never looked at: the other one stands in its place
        scores_in = pooled_betas if pooled_scores is None else pooled_scores
        betas_in = pooled_scores if pooled_betas is None else pooled_betas
        if scores_in is None or betas_in is None:  # forced blocks alone fill the budget
            scores_in = betas_in = torch.zeros(
                (layout.rows.size, self.memory.n_kv_heads, n_blocks), device=self.q.device
            )
        try:
            selection = select_blocks(scores_in, betas_in, layout.n_blocks_t, self.cfg, runner.method)
        except NumericsError as error:
            raise NumericsError(
                f"layer {self.layer}, step {layout.rows.step}, rows = sequences {layout.rows.sequences}: {error}"
            ) from None
        return selection, pooled_betas

    def _find_pages(self) -> None:
        """Rows of the selected blocks in the pages on the device: nothing is ever missing."""
        ids, lanes, heads = self.selection.block_ids, self.layout.lanes_t, self.layout.heads
        pages = self.memory.page_table[lanes[:, None, None], ids.clamp(min=0)]
        self.slot_rows = torch.where(ids >= 0, pages * len(heads) + heads[:, None], -1)
        self.n_misses = torch.zeros(ids.shape[:2], dtype=torch.int64)

    def _update_slots(self, slots: SlotCache, pooled_betas: Tensor | None) -> None:
        layout, policy = self.layout, self.runner.policy
        index, heads, n_slots = layout.lane_index, self.memory.n_kv_heads, slots.n_slots
        old = slots.blocks[self.layer][index]
        rank = policy.rank(old, slots.last_use[self.layer][index][..., :n_slots], pooled_betas)
        wanted = self.selection.block_ids
        update = update_slots(old.flatten(0, 1), wanted.flatten(0, 1), rank.flatten(0, 1), policy.keep_unwanted)
        shape = (layout.rows.size, heads, -1)
        new, wanted_slots = update.slot_blocks.view(shape), update.wanted_slots.view(shape).long()
        base = layout.row_base
        if slots.poisons:
            freed = (old >= 0) & (new < 0)
            slots.poison_rows(self.layer, (base + torch.arange(n_slots, device=old.device))[freed])
        slots.blocks[self.layer][index] = new
        if policy.ranks_by_use:
            padded = torch.where(wanted_slots >= 0, wanted_slots, n_slots)
            slots.last_use[self.layer][layout.lanes_t[:, None, None], layout.heads[:, None], padded] = layout.rows.step
        self.slot_rows = torch.where(wanted_slots >= 0, wanted_slots + base, -1)
        self._plan_loads(slots, update.load_blocks.view(shape), update.load_slots.view(shape), update.n_loads)

    def _plan_loads(self, cache: SlotCache, blocks: Tensor, slots: Tensor, n_loads: Tensor) -> None:
        """Misses are the loads but for the current block: born on the device at this step, it never crosses."""
        layout, heads = self.layout, self.memory.n_kv_heads
        width = int(n_loads.max())
        if width == 0:
            self.n_misses = n_loads.view(layout.rows.size, heads)
            return
        blocks, slots = blocks[..., :width], slots[..., :width]
        missed = (blocks >= 0) & (blocks != layout.current_t[:, None, None])
        self.n_misses = missed.sum(-1)
        lane, head, entry = missed.nonzero(as_tuple=True)
        if lane.numel():
            ids = blocks[lane, head, entry].long()
            rows = layout.row_base[lane, head, 0] + slots[lane, head, entry]
            lanes = layout.lanes_t[lane]
            host_rows = self.memory.page_table[lanes, ids] * heads + head
            cache.betas[self.layer][rows] = self.memory.context.token_betas[self.layer][lanes, head, ids]
            self._loads = (host_rows, rows)

    def place_token(self, k: Tensor, v: Tensor, beta: Tensor) -> None:
        """Write the token's row into the current block, the last one of the ascending selection."""
        layout, slots = self.layout, self.memory.slots
        self.current_rows = self.slot_rows.gather(-1, layout.last_pick)[..., 0]
        if slots is not None and slots.poisons and any(layout.rows.born):
            born = torch.tensor(layout.rows.born, device=self.q.device)
            slots.poison_rows(self.layer, self.current_rows[born].flatten())
        rows, betas = self.memory.attended(self.layer)
        rows[self.current_rows, :, layout.offsets] = torch.stack((k, v), dim=2)
        if betas is not None:
            betas[self.current_rows, layout.offsets] = beta

    # ---- launches
    def fetch(self) -> None:
        """Missed blocks: host pool -> slots; from host memory to a GPU by one copy a block, as the baseline does."""
        if self._loads is not None:
            pool, slots = self.memory.pool.layers[self.layer], self.memory.attended(self.layer)[0]
            copy = fetch_blocks if slots.device == pool.device else copy_one_by_one
            copy(pool, slots, *self._loads)
        self.clock.lap(H2D)

    def attend(self) -> Tensor:
        """Biased attention over the selected blocks, [batch, q_head, head_dim]."""
        rows, betas = self.memory.attended(self.layer)
        out, _ = sparse_decode_attention(
            self.q, rows, betas, self.slot_rows, self.selection.block_ids, self.layout.lengths_t
        )
        self.clock.lap(ATTENTION)
        return out

    def write_back_filled(self) -> None:
        """Blocks that this token filled: slots -> host pool, once; they stay resident."""
        layout = self.layout
        if not layout.rows.n_written_back:
            return
        filled = torch.tensor([row for row, full in enumerate(layout.rows.filled) if full], device=self.q.device)
        pages = self.memory.page_table[layout.lanes_t[filled], layout.current_t[filled]]
        host_rows = pages[:, None] * self.memory.n_kv_heads + layout.heads
        write_back(
            self.memory.attended(self.layer)[0],
            self.memory.pool.layers[self.layer],
            self.current_rows[filled].flatten(),
            host_rows.flatten(),
        )
