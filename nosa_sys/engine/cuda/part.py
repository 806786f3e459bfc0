"""A range of a step's lanes: the launches of one layer over them. Schedules put these in order.

Every tensor that has one entry a lane is a view of its own range, so that row numbers start at 0 in each part. Nothing
here looks at data: sizes are fixed, lengths and lists are read on the device.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nosa_sys.engine.cuda.inputs import StepInputs
from nosa_sys.engine.cuda.marks import (
    ATTEND_END,
    ATTEND_START,
    FETCH_END,
    FETCH_START,
    LAYER_END,
    LAYER_START,
    PLANNED,
    PROJECTED,
    Marks,
)
from nosa_sys.engine.cuda.spec import FetchPath, StepSpec
from nosa_sys.engine.record_level import RECORD_SCORES
from nosa_sys.errors import NosaError
from nosa_sys.kernels.block_fetch import fetch_blocks, write_back
from nosa_sys.kernels.block_fetch.reference import Part
from nosa_sys.kernels.block_selection import StepSelection, score_and_select
from nosa_sys.kernels.eviction_head import append_token
from nosa_sys.kernels.eviction_head.append_reference import CurrentBlocks, HeadShape, TokenContext
from nosa_sys.kernels.gated_activation import silu_mul
from nosa_sys.kernels.paged_decode_attention import paged_decode_attention
from nosa_sys.kernels.residual_norm import add_norm
from nosa_sys.kernels.set_difference import LoadList, SlotPlan, TokenRows, plan_slots
from nosa_sys.kernels.sparse_decode_attention import merge_partials, sparse_decode_attention
from nosa_sys.kernels.step_prepare import prepare_step

# Write-back moves a block now and then; it should not take SMs from compute.
_WRITE_BACK_CTAS = 4
Entries = Literal["all", "hits", "misses"]
T = TypeVar("T")


class LanePart:
    """Lanes ``first`` .. ``last`` - 1. ``select`` -> ``fetch`` -> ``attend`` -> ``finish`` make a layer.

    ``x`` [row, hidden] is the residual stream and ``y`` what is still to be added to it. What a layer leaves for the
    end of the step is kept in lists with an entry a layer: ``selections``, ``plans``; keeping them also keeps their
    memory from being used again while a side stream reads it.
    """

    def __init__(self, spec: StepSpec, index: int, first: int, last: int, marks: Marks) -> None:
        self.spec, self.index, self.marks = spec, index, marks
        self.model, self.memory = spec.model, spec.memory
        self.cfg, self.method = spec.memory.cfg, spec.memory.method
        shape, device = spec.model.shape, spec.model.device
        self.first, self.n_rows, self.n_heads = first, last - first, shape.n_kv_heads
        self.lanes = slice(first, last)
        self.offload = spec.memory.slots is not None
        self.keeps_scores = spec.options.record == RECORD_SCORES
        self.keeps_pooled = spec.policy.ranks_by_beta or spec.options.n_prefetch > 0 or self.keeps_scores
        head = spec.model.head if self.method.uses_beta or self.keeps_scores else "none"
        self._head_shape = HeadShape(shape.n_q_heads, shape.n_kv_heads, shape.head_dim, head, self.cfg.kernel_stride)
        self._nothing = None if spec.memory.context.kept else self._empty_context()
        self._no_lanes = torch.full((self.n_rows,), -1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(spec.model.n_layers, dtype=torch.int32, device=device)
        self.selections: list[StepSelection] = []
        self.plans: list[SlotPlan] = []
        if spec.memory.slots is not None:
            per_lane = self.n_heads * spec.memory.slots.n_slots
            self._slot_rows = slice(first * per_lane, last * per_lane)
            self.loads = load_list(self.n_rows * self.n_heads * self.cfg.topk, device)

    # ---- the step's frame
    def begin(self, inputs: StepInputs) -> None:
        """Geometry, embedding and empty load lists."""
        self.inputs = inputs
        lanes = inputs.lanes[self.lanes]
        self.rows = lanes if self.first == 0 else torch.where(lanes >= 0, lanes - self.first, -1)
        self.positions = inputs.positions[self.lanes]
        self.table = self.memory.page_table[self.lanes]
        model = self.model
        self.geometry = prepare_step(
            self.rows, self.positions, self.table, model.rope_frequencies, self.n_heads, self.cfg.block_size
        )
        if self.offload:
            filled = self.geometry.write_back_rows >= 0
            self._n_filled = filled.sum(dtype=torch.int32)[None]
            self._filled_first = (~filled).int().argsort(stable=True)
        if self.spec.injection is not None:
            self._injected = self.of_this_step(self.spec.injection.ids_table)
        self.x = model.embedding[inputs.current_tokens(self.lanes)]
        self.y: Tensor | None = None
        self.counts.zero_()
        self.selections, self.plans = [], []

    def output(self) -> Tensor:
        """Normed residual stream [row, hidden] after the last layer."""
        return add_norm(self.x, self.y, self.model.final_norm, self.model.config.rms_norm_eps)[1]

    # ---- a layer
    def select(self, layer: int) -> None:
        """Everything up to the plan: projections, the token's append, selection, slots and load list."""
        self.marks.set(self.index, layer, LAYER_START)
        if self.spec.options.fetch_only:
            self._plan(layer, self._injected[layer], None)
            return
        model, weights, g = self.model, self.model.layers[layer], self.geometry
        self.x, h = add_norm(self.x, self.y, weights.attention_norm, model.config.rms_norm_eps)
        qkv = F.linear(h, weights.qkv)
        self.marks.set(self.index, layer, PROJECTED)
        context = self._context(layer)
        rows = self._no_lanes if self.method.dense else self.rows
        self.q, k, v, beta = append_token(
            qkv,
            weights.A,
            weights.delta,
            g.cos,
            g.sin,
            self.positions,
            context,
            self._head_shape,
            lanes=rows,
            current=None if self.offload else self._page_blocks(layer),
        )
        if not self.method.dense:
            selection = score_and_select(
                self.q,
                context.key_means[:, :, : self.spec.n_windows],
                context.beta_means[:, :, : self.spec.n_windows],
                g.lengths,
                self.spec.n_blocks,
                self.cfg,
                self.method,
                keep_pooled=self.keeps_pooled,
            )
            if self.spec.injection is not None:
                selection = selection._replace(block_ids=self._injected[layer])
            self.selections.append(selection)
            if self.offload:
                token = TokenRows(k, v, beta, self.positions, *self.slots(layer))
                self._plan(layer, selection.block_ids, selection.pooled_betas, token)
        self.marks.set(self.index, layer, PLANNED)

    def fetch(self, layer: int, path: FetchPath, *, halves: bool = False) -> None:
        """Missed blocks: host pool -> slots; ``halves``: keys in one launch, values in another."""
        if not self.offload or self.spec.options.skip_fetch:
            return
        self.marks.set(self.index, layer, FETCH_START)
        loads = self.loads_of(self.loads, self.counts, layer)
        if halves:
            self.bring(layer, loads, FetchPath("uva", path.n_ctas), "k")
            self.bring(layer, loads, FetchPath("uva", path.n_ctas), "v")
        else:
            self.bring(layer, loads, path)
        self.marks.set(self.index, layer, FETCH_END)

    def bring(self, layer: int, loads: LoadList, path: FetchPath, half: Part = "kv") -> None:
        """Blocks of a list, or one half of each: host pool -> slots."""
        fetch_blocks(
            self.memory.pool.layers[layer],
            self.slots(layer)[0],
            loads.host_rows,
            loads.slot_rows,
            loads.count,
            n_ctas=path.n_ctas,
            path=path.path,
            part=half,
        )

    @staticmethod
    def loads_of(loads: LoadList, counts: Tensor, layer: int) -> LoadList:
        """A layer's list: the rows serve every layer, the count is its own."""
        return dataclasses.replace(loads, count=counts[layer : layer + 1])

    def write_back(self, layer: int) -> None:
        """Blocks that this token filled: slots -> host pool; they stay resident."""
        if self.offload:
            slots = self.slots(layer)[0]
            write_back(
                slots,
                self.memory.pool.layers[layer],
                self.plans[layer].current_rows,
                self.geometry.write_back_rows,
                self._n_filled,
                order=self._filled_first,
                n_ctas=_WRITE_BACK_CTAS,
            )

    def attend(self, layer: int, entries: Entries = "all") -> tuple[Tensor, Tensor]:
        """Attention over what was selected, or its hits or misses alone: [row, q_head, D] and LSE [row, q_head]."""
        if self.spec.options.fetch_only:
            return self.x, self.x
        lengths, memory = self.geometry.lengths, self.memory
        if entries != "misses":
            self.marks.set(self.index, layer, ATTEND_START)
        if self.method.dense:
            pages = memory.pool.layers[layer].unflatten(0, (-1, self.n_heads))
            found = paged_decode_attention(self.q, pages, self.table, lengths)
        elif not self.offload:
            ids, betas = self.selections[layer].block_ids, memory.pool.betas[layer]
            found = sparse_decode_attention(
                self.q, memory.pool.layers[layer], betas, None, ids, lengths, page_table=self.table
            )
        else:
            found = self._attend_slots(layer, entries)
        if entries == "all":
            self.marks.set(self.index, layer, ATTEND_END)
        return found

    def merge(self, layer: int, hits: tuple[Tensor, Tensor], misses: tuple[Tensor, Tensor]) -> Tensor:
        """One attention output out of two."""
        merged = hits[0] if self.spec.options.fetch_only else merge_partials(*hits, *misses)[0]
        self.marks.set(self.index, layer, ATTEND_END)
        return merged

    def finish(self, layer: int, attention: Tensor) -> None:
        """Output projection and MLP."""
        if not self.spec.options.fetch_only:
            weights, eps = self.model.layers[layer], self.model.config.rms_norm_eps
            o = F.linear(attention.reshape(self.n_rows, -1), weights.o)
            self.x, h = add_norm(self.x, o, weights.mlp_norm, eps)
            self.y = F.linear(silu_mul(F.linear(h, weights.gate_up)), weights.down)
        self.marks.set(self.index, layer, LAYER_END)

    def of_this_step(self, table: Tensor) -> Tensor:
        """This step's part of a table [step, layer, lane, ...]: [layer, row, ...], one launch for all layers."""
        return table[:, :, self.lanes].index_select(0, self.inputs.step)[0]

    def by_head(self, values: Tensor) -> Tensor:
        """[row, kv_head] out of one value for each (row, KV head)."""
        return values.view(self.n_rows, self.n_heads)

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """K/V rows and betas of the part's slots."""
        slots = given(self.memory.slots)
        return slots.kv[layer][self._slot_rows], slots.betas[layer][self._slot_rows]

    def new_beta_means(self) -> list[Tensor]:
        """Mean of each row's newest complete window [row, kv_head], a layer each; of use where this token ended one."""
        cfg = self.cfg
        window = ((self.geometry.lengths.long() - cfg.kernel_size) // cfg.kernel_stride).clamp(min=0)
        index = window[:, None, None].expand(-1, self.n_heads, 1)
        return [layer[self.lanes].gather(-1, index)[..., 0] for layer in self.memory.context.beta_means]

    # ---- pieces
    def _context(self, layer: int) -> TokenContext:
        if self._nothing is not None:
            return self._nothing
        context, lanes = self.memory.context, self.lanes
        return TokenContext(
            context.ring[layer][lanes],
            context.token_betas[layer][lanes],
            context.key_means[layer][lanes],
            context.beta_means[layer][lanes],
        )

    def _empty_context(self) -> TokenContext:
        """Of one lane that nobody reads or writes, for a method that keeps none."""
        model, heads, size = self.model, self.n_heads, self.cfg.block_size
        dim, rows = model.shape.head_dim, self.cfg.kernel_size
        ring = torch.zeros((1, rows, heads, dim), dtype=model.dtype, device=model.device)
        shapes = ((1, heads, 1, size), (1, heads, 1, dim), (1, heads, 1))
        return TokenContext(ring, *(torch.zeros(s, dtype=model.acc_dtype, device=model.device) for s in shapes))

    def _page_blocks(self, layer: int) -> CurrentBlocks:
        pool = self.memory.pool
        return CurrentBlocks(pool.layers[layer], pool.betas[layer], self.by_head(self.geometry.page_rows))

    def _attend_slots(self, layer: int, entries: Entries) -> tuple[Tensor, Tensor]:
        plan = self.plans[layer]
        shape = (self.n_rows, self.n_heads, -1)
        ids = self.selections[layer].block_ids
        rows, counts = plan.slot_rows, None
        if entries == "hits":
            rows = given(plan.hit_rows)
        elif entries == "misses":
            rows, ids, counts = given(plan.miss_rows), given(plan.miss_ids).view(shape), plan.n_loads
        kv, slot_betas = self.slots(layer)
        betas = slot_betas if self.method.uses_beta else None
        return sparse_decode_attention(self.q, kv, betas, rows.view(shape), ids, self.geometry.lengths, counts=counts)

    def _plan(self, layer: int, ids: Tensor, pooled_betas: Tensor | None, token: TokenRows | None = None) -> None:
        """Slots of the wanted blocks; misses go to the layer's load list, the token into its block."""
        split = self.cfg.topk if self.spec.splits_attention else None
        loads = self.loads_of(self.loads, self.counts, layer)
        self.plans.append(self.plan_into(layer, ids, pooled_betas, loads, split=split, token=token))

    def plan_into(
        self,
        layer: int,
        ids: Tensor,
        pooled_betas: Tensor | None,
        loads: LoadList,
        *,
        split: int | None = None,
        speculative: bool = False,
        token: TokenRows | None = None,
    ) -> SlotPlan:
        """``plan_slots`` for wanted ``ids`` [row, kv_head, k]. ``speculative``: blocks that are loaded count as not
        used yet."""
        slots, policy, g = given(self.memory.slots), self.spec.policy, self.geometry
        slot_betas = self.slots(layer)[1]
        blocks, last_use = slots.blocks[layer][self.lanes], slots.last_use[layer][self.lanes]
        rank, use_step = blocks, None
        if policy.ranks_by_use:
            rank, use_step = last_use, self.inputs.guess_rank if speculative else self.inputs.use_rank
        elif policy.keep_unwanted:
            rank = policy.rank(blocks, last_use, pooled_betas)
        uses_beta = self.method.uses_beta
        return plan_slots(
            blocks.flatten(0, 1),
            ids.flatten(0, 1),
            rank.flatten(0, 1),
            policy.keep_unwanted,
            loads,
            row_heads=g.row_heads,
            current_blocks=g.head_blocks,
            page_table=self.table,
            n_kv_heads=self.n_heads,
            use_step=use_step,
            token_betas=self.memory.context.token_betas[layer][self.lanes].flatten(0, 1) if uses_beta else None,
            slot_betas=slot_betas if uses_beta else None,
            split=split,
            touch="loads" if speculative else "wanted",
            count_wasted=self.spec.options.n_prefetch > 0,
            token=token,
        )


def load_list(capacity: int, device: torch.device) -> LoadList:
    """An empty list of loads."""
    rows = torch.zeros((2, capacity), dtype=torch.int64, device=device)
    return LoadList(rows[0], rows[1], torch.zeros(1, dtype=torch.int32, device=device))


def given(value: T | None) -> T:
    """A value that the step's settings promise."""
    if value is None:
        raise NosaError("a captured step reached for something that its settings leave out")
    return value
