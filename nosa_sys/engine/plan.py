"""The plan of a decode step: which rows run, what each selects, what moves. Pure data; the recorder reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nosa_sys.kernels.block_selection.reference import Selection
from nosa_sys.kernels.compressed_keys.reference import completes_window
from nosa_sys.methods import Method
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class StepLayout:
    """The batch of one step, the same for all layers. Lists are per row (sequence), on the Python side; tensors are
    int64 on the device.

    A row consumes the token at ``positions`` p: its context is p + 1 tokens, its current block floor(p / block).
    ``born`` rows open their current block with this token, ``filled`` rows fill it, ``windows_done`` rows complete a
    pooling window. ``blocks`` is N per row; ``max_blocks`` and ``max_windows`` are the batch's.
    """

    step: int
    sequences: list[int]
    lanes: list[int]
    positions: list[int]
    cold: list[bool]
    blocks: list[int]
    born: list[bool]
    filled: list[bool]
    windows_done: list[int]
    dense_blocks: int  # a row of at most so many blocks selects everything
    n_written_back: int  # rows whose filled block goes to the host pool
    max_blocks: int
    max_windows: int
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

    @property
    def all_dense(self) -> bool:
        """Whether every row selects everything."""
        return self.max_blocks <= self.dense_blocks

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def over_lanes(self, per_lane: Tensor) -> Tensor:
        """Rows of the batch from a [lane, ...] tensor: a view where the batch is lanes 0 .. batch - 1."""
        return per_lane[self.lane_index]


def make_layout(
    step: int,
    sequences: Sequence[int],
    lanes: Sequence[int],
    positions: Sequence[int],
    cold: Sequence[bool],
    cfg: SparseConfig,
    method: Method,
    n_kv_heads: int,
    n_slots: int,
    device: torch.device,
) -> StepLayout:
    """Work out a step's geometry once, for all layers. ``n_slots`` is a head's slots on the device."""
    lengths = [p + 1 for p in positions]
    blocks = [cfg.n_blocks(length) for length in lengths]
    windows = [cfg.n_windows(length) for length in lengths]
    filled = [length % cfg.block_size == 0 for length in lengths]
    budget = max(blocks) if method.dense else cfg.topk

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    lanes_t = tensor(lanes)
    last_pick = tensor([min(n, budget) - 1 for n in blocks])
    heads = torch.arange(n_kv_heads, device=device)
    in_order = list(lanes) == list(range(len(lanes)))
    return StepLayout(
        step=step,
        sequences=list(sequences),
        lanes=list(lanes),
        positions=list(positions),
        cold=list(cold),
        blocks=blocks,
        born=[p % cfg.block_size == 0 for p in positions],
        filled=filled,
        windows_done=[row for row, n in enumerate(lengths) if completes_window(n, cfg.kernel_size, cfg.kernel_stride)],
        dense_blocks=budget,
        n_written_back=0 if method.dense else sum(filled),
        max_blocks=max(blocks),
        max_windows=max(windows),
        lanes_t=lanes_t,
        positions_t=tensor(positions),
        lengths_t=tensor(lengths),
        current_t=tensor([n - 1 for n in blocks]),
        n_blocks_t=tensor(blocks),
        n_windows_t=tensor(windows),
        last_pick=last_pick[:, None, None].expand(-1, n_kv_heads, 1),
        row_base=(lanes_t[:, None] * n_kv_heads + heads)[..., None] * n_slots,
        offsets=tensor([p % cfg.block_size for p in positions])[:, None],
        heads=heads,
        lane_index=slice(0, len(lanes)) if in_order else lanes_t,
    )


@dataclass(frozen=True)
class LayerPlan:
    """What one layer decided: its selection, ``n_misses`` int [batch, kv_head]; where scores are recorded also the
    stage-1 window scores [batch, kv_head, window] and the beta means [rows of windows_done, kv_head] that became
    complete; and the time of its phases in microseconds (None where it was not measured)."""

    selection: Selection
    n_misses: Tensor
    window_scores: Tensor | None
    new_beta_means: Tensor | None
    phase_us: dict[str, float] | None


@dataclass(frozen=True)
class StepPlan:
    """A whole step: its layout, one LayerPlan a layer, and the wall time in microseconds, sampling left out."""

    layout: StepLayout
    layers: list[LayerPlan]
    time_us: float

    def misses(self) -> Tensor:
        """Misses int64 [layer, batch, kv_head] on the host."""
        return torch.stack([layer.n_misses for layer in self.layers]).to("cpu", torch.int64)
