"""The plan of a decode step: which rows run, what each selects, what moves. Pure data; the recorder reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.compressed_keys.reference import completes_window
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class StepBatch:
    """Who runs at one step, the same for all layers: Python lists, one entry a row (sequence).

    A row consumes the token at ``positions`` p: its context is p + 1 tokens, its current block floor(p / block).
    ``blocks`` is N, ``windows`` the complete pooling windows. ``born`` rows open their current block with this token,
    ``filled`` rows fill it; ``windows_done`` lists the rows that complete a window.
    """

    step: int
    sequences: list[int]
    lanes: list[int]
    positions: list[int]
    cold: list[bool]
    blocks: list[int]
    windows: list[int]
    born: list[bool]
    filled: list[bool]
    windows_done: list[int]
    dense_blocks: int  # a row of at most so many blocks selects everything
    n_written_back: int  # rows whose filled block goes to the host pool

    @property
    def max_blocks(self) -> int:
        return max(self.blocks)

    @property
    def max_windows(self) -> int:
        return max(self.windows)

    @property
    def all_dense(self) -> bool:
        """Whether every row selects everything."""
        return self.max_blocks <= self.dense_blocks

    @property
    def size(self) -> int:
        return len(self.sequences)

    def subset(self, rows: Sequence[int]) -> StepBatch:
        """The same step of some of its rows."""
        lists = ("sequences", "lanes", "positions", "cold", "blocks", "windows", "born", "filled")
        chosen: dict[str, Any] = {name: [getattr(self, name)[row] for row in rows] for name in lists}
        done = [i for i, row in enumerate(rows) if row in self.windows_done]
        written = sum(chosen["filled"]) if self.n_written_back else 0
        return dataclasses.replace(self, **chosen, windows_done=done, n_written_back=written)


def make_batch(
    step: int,
    sequences: Sequence[int],
    lanes: Sequence[int],
    positions: Sequence[int],
    cold: Sequence[bool],
    cfg: SparseConfig,
    method: Method,
    *,
    offload: bool,
) -> StepBatch:
    """A step's geometry. ``offload``: filled blocks are written back to a host pool."""
    blocks = [p // cfg.block_size + 1 for p in positions]
    filled = [(p + 1) % cfg.block_size == 0 for p in positions]
    return StepBatch(
        step=step,
        sequences=list(sequences),
        lanes=list(lanes),
        positions=list(positions),
        cold=list(cold),
        blocks=blocks,
        windows=[cfg.n_windows(p + 1) for p in positions],
        born=[p % cfg.block_size == 0 for p in positions],
        filled=filled,
        windows_done=[
            row for row, p in enumerate(positions) if completes_window(p + 1, cfg.kernel_size, cfg.kernel_stride)
        ],
        dense_blocks=max(blocks) if method.dense else cfg.topk,
        n_written_back=sum(filled) if offload else 0,
    )


@dataclass(frozen=True)
class StepLayout:
    """A batch and what the eager runner needs of it on the device, worked out once for all layers; int64."""

    rows: StepBatch
    # int64 [batch] unless said
    lanes_t: Tensor
    positions_t: Tensor
    lengths_t: Tensor
    current_t: Tensor
    n_blocks_t: Tensor
    n_windows_t: Tensor
    last_pick: Tensor = field(repr=False)  # [batch, kv_head, 1]: where in the ascending selection the current block is
    row_base: Tensor = field(repr=False)  # [batch, kv_head, 1]: first slot row of the head
    offsets: Tensor = field(repr=False)  # [batch, 1]: the token's place in its block
    heads: Tensor = field(repr=False)  # [kv_head]
    lane_index: slice | Tensor = field(repr=False)

    def over_lanes(self, per_lane: Tensor) -> Tensor:
        """Rows of the batch from a [lane, ...] tensor: a view where the batch is lanes 0 .. batch - 1."""
        return per_lane[self.lane_index]


def make_layout(rows: StepBatch, cfg: SparseConfig, n_kv_heads: int, n_slots: int, device: torch.device) -> StepLayout:
    """``n_slots`` is a head's slots on the device."""

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    lanes_t, positions_t, n_blocks_t = tensor(rows.lanes), tensor(rows.positions), tensor(rows.blocks)
    last_pick = n_blocks_t.clamp(max=rows.dense_blocks) - 1
    heads = torch.arange(n_kv_heads, device=device)
    in_order = rows.lanes == list(range(rows.size))
    return StepLayout(
        rows=rows,
        lanes_t=lanes_t,
        positions_t=positions_t,
        lengths_t=positions_t + 1,
        current_t=n_blocks_t - 1,
        n_blocks_t=n_blocks_t,
        n_windows_t=tensor(rows.windows),
        last_pick=last_pick[:, None, None].expand(-1, n_kv_heads, 1),
        row_base=(lanes_t[:, None] * n_kv_heads + heads)[..., None] * n_slots,
        offsets=(positions_t % cfg.block_size)[:, None],
        heads=heads,
        lane_index=slice(0, rows.size) if in_order else lanes_t,
    )


@dataclass(frozen=True)
class LayerPlan:
    """What one layer of the eager runner decided: its selection, ``n_misses`` int [batch, kv_head]; where scores are
    recorded also the stage-1 window scores [batch, kv_head, window] and the beta means [rows of windows_done, kv_head]
    that became complete; and the time of its phases in microseconds (None where it was not measured)."""

    selection: Selection
    n_misses: Tensor
    window_scores: Tensor | None
    new_beta_means: Tensor | None
    phase_us: dict[str, float] | None


@dataclass(frozen=True)
class StepPlan:
    """A whole step as the recorder sees it, on the host; ``time_us`` is its wall time, sampling left out.

    ``n_misses`` int [layer, batch, kv_head]; ``block_ids`` int32 and ``origins`` int8 [layer, batch, kv_head, k], -1
    padded, and ``counts`` int [batch] blocks selected (None unless they are recorded); where scores are recorded
    ``window_scores`` float32 [layer, batch, kv_head, window] and ``new_beta_means`` [layer, rows of windows_done,
    kv_head]; ``phase_us``: each phase's time a layer, float [layer]; ``prefetch_loads`` and ``wasted_loads`` int
    [layer].
    """

    batch: StepBatch
    n_misses: NDArray[np.int32]
    time_us: float
    block_ids: NDArray[np.int32] | None = None
    origins: NDArray[np.int8] | None = None
    counts: NDArray[np.int32] | None = None
    window_scores: NDArray[np.float32] | None = None
    new_beta_means: NDArray[np.float32] | None = None
    phase_us: dict[str, NDArray[np.float64]] | None = None
    prefetch_loads: NDArray[np.int64] | None = None
    wasted_loads: NDArray[np.int64] | None = None

    def subset(self, rows: Sequence[int]) -> StepPlan:
        """The plan of some of the rows; times and speculation stay those of the whole step."""

        def by_row(values: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if values is None else values[:, list(rows)]

        done = [i for i, row in enumerate(self.batch.windows_done) if row in rows]
        means = self.new_beta_means
        return dataclasses.replace(
            self,
            batch=self.batch.subset(rows),
            n_misses=self.n_misses[:, list(rows)],
            block_ids=by_row(self.block_ids),
            origins=by_row(self.origins),
            counts=None if self.counts is None else self.counts[list(rows)],
            window_scores=by_row(self.window_scores),
            new_beta_means=None if means is None else means[:, done],
        )


def collect_layers(batch: StepBatch, layers: Sequence[LayerPlan], time_us: float) -> StepPlan:
    """The plan of a step out of its layers' device tensors."""

    def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> NDArray[Any]:
        return torch.stack(list(tensors)).to("cpu", dtype).numpy()

    scores = [layer.window_scores for layer in layers if layer.window_scores is not None]
    means = [layer.new_beta_means for layer in layers if layer.new_beta_means is not None]
    phases = [layer.phase_us for layer in layers if layer.phase_us is not None]
    return StepPlan(
        batch=batch,
        n_misses=stacked([layer.n_misses for layer in layers], torch.int32),
        time_us=time_us,
        block_ids=stacked([layer.selection.block_ids for layer in layers], torch.int32),
        origins=stacked([layer.selection.origins for layer in layers], torch.int8),
        counts=layers[0].selection.counts.to("cpu", torch.int32).numpy(),
        window_scores=stacked(scores, torch.float32) if scores else None,
        new_beta_means=stacked(means, torch.float32) if means else None,
        phase_us={name: np.array([p[name] for p in phases]) for name in phases[0]} if phases else None,
    )
