"""A situation of the CUDA engine for calibration or validation, the sets injected into it, and the loads they cause."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nosa_sys.engine.injection import Injection, synthetic_injection, trace_injection
from nosa_sys.engine.memory_plan import device_bytes, required_bytes
from nosa_sys.kernels.set_difference.reference import update_slots
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.workload import n_first_half
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses
from nosa_sys.traces.playback import recorded_sets
from nosa_sys.traces.reader import Trace

# Rows start so many tokens apart, so that they do not fill their blocks at one step.
_STAGGER_TOKENS, _STAGGER_PERIOD = 37, 512
# Comparisons of wanted blocks with slots at once; what they take on the device is a few times as many bytes.
_MOST_COMPARED = 2**28


@dataclass(frozen=True)
class GpuSetting:
    """One engine: everything but the schedule. ``context``: tokens of the longest row; ``misses`` a head and step on
    average, of which ``reuse`` come back soon; ``trace``: directory of recorded sets in their place."""

    model_shape: str
    method: str
    batch: int
    context: int
    block_size: int
    topk: int
    slots: int
    misses: float = 0.0
    reuse: float = 0.5
    trace: str | None = None
    kernel_stride: int = 16
    seed: int = 0

    @property
    def dense(self) -> bool:
        return get_method(self.method).dense

    @property
    def policy(self) -> str:
        return "exact" if self.slots <= self.topk else "lru"

    @classmethod
    def of_trace(cls, model_shape: str, directory: Path, batch: int, seed: int) -> GpuSetting:
        """The recorded sets of a trace under its own budgets, ``batch`` rows of them with slots = k."""
        meta = Trace.open(directory).meta
        longest = max(int(own.position[-1]) + 1 for own in recorded_sets(Trace.open(directory)))
        sparse = meta.sparse
        return cls(
            model_shape, meta.method, batch, longest, sparse.block_size, sparse.topk, sparse.topk,
            trace=str(directory), kernel_stride=sparse.kernel_stride, seed=seed,
        )  # fmt: skip

    @property
    def recorded_steps(self) -> int | None:
        """Steps of a trace's longest sequence, None without a trace."""
        if self.trace is None:
            return None
        return max(len(own.position) for own in recorded_sets(Trace.open(self.trace)))

    @property
    def sparse(self) -> SparseConfig:
        """A quarter of the budget is window, a quarter selected by the query, as in the model's own configuration; a
        trace has its own."""
        if self.trace is not None:
            return Trace.open(self.trace).meta.sparse
        window = max(self.block_size, self.topk * self.block_size // 4 // self.block_size * self.block_size)
        return SparseConfig(
            block_size=self.block_size,
            kernel_size=2 * self.kernel_stride,
            kernel_stride=self.kernel_stride,
            topk=self.topk,
            init_blocks=1,
            window_size=window,
            select_blocks=max(1, self.topk // 4),
        )

    @property
    def contexts(self) -> list[int]:
        """Prompt tokens of each row."""
        period = min(_STAGGER_PERIOD, self.context // 2)
        return [self.context - row * _STAGGER_TOKENS % period for row in range(self.batch)]

    def key(self) -> dict[str, Any]:
        """What tells one setting from another; the seed does not."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "seed"}

    def required(self, shape: ModelShape, n_steps: int) -> dict[str, int]:
        """Bytes by use for ``n_steps`` steps, weights left out (see memory_plan)."""
        return required_bytes(
            shape, self.sparse, get_method(self.method), n_slots=self.slots, offload=not self.dense,
            lanes=self.batch, tokens_a_lane=self.context + n_steps,
        )  # fmt: skip

    def table_bytes(self, shape: ModelShape, n_steps: int) -> int:
        """Device bytes of the injected sets."""
        return 0 if self.dense else 4 * n_steps * shape.n_layers * self.batch * shape.n_kv_heads * self.topk

    def fits(self, shape: ModelShape, n_steps: int, *, gpu_bytes: float, host_bytes: float) -> bool:
        """Whether it fits next to the weights."""
        need = self.required(shape, n_steps)
        on_device = device_bytes(need) + shape.weight_bytes + self.table_bytes(shape, n_steps)
        return on_device <= gpu_bytes and need["host_pool_bytes"] <= host_bytes

    def inject(self, shape: ModelShape, n_steps: int, device: torch.device) -> Injection | None:
        """The sets of ``n_steps`` steps; None for dense attention."""
        if self.dense:
            return None
        if self.trace is not None:
            return trace_injection(
                Path(self.trace), shape.n_layers, shape.n_kv_heads, self.batch, n_steps, self.seed, device
            )
        return synthetic_injection(
            self.sparse, self.method, shape.n_layers, shape.n_kv_heads, self.contexts, n_steps, self.misses,
            self.seed, device, self.reuse,
        )  # fmt: skip


def expected_loads(
    setting: GpuSetting, shape: ModelShape, injection: Injection | None, n_steps: int
) -> tuple[LayerStepMisses, LayerStepMisses]:
    """What every step loads, attends to and fills: (all rows, first half of the rows).

    From the injected sets alone: a cache of ``slots`` runs over them, as the reference places blocks.
    """
    contexts = np.array(setting.contexts if injection is None else injection.contexts)
    block, size = setting.sparse.block_size, len(contexts)
    position = contexts - 1 + np.arange(n_steps)[:, None]
    cells = (n_steps, shape.n_layers, size)
    if injection is None:
        misses = np.zeros(cells, dtype=np.int64)
        blocks = (position // block + 1) * shape.n_kv_heads
        attended = np.broadcast_to(blocks[:, None], cells)
        filled = np.zeros((n_steps, size), dtype=np.int64)
    else:
        misses = _misses(setting, injection, n_steps)
        attended = np.stack([(ids >= 0).sum((2, 3)).cpu().numpy() for ids in injection.ids_table[:n_steps]])
        filled = ((position + 1) % block == 0) * shape.n_kv_heads

    def sums(rows: slice) -> LayerStepMisses:
        return LayerStepMisses(
            steps=np.arange(n_steps, dtype=np.int32),
            n_sequences=np.full(n_steps, len(range(size)[rows]), dtype=np.int32),
            misses=misses[..., rows].sum(-1),
            filled_blocks=np.broadcast_to(filled[:, rows].sum(-1)[:, None], cells[:2]).copy(),
            attended_blocks=attended[..., rows].sum(-1),
            context_tokens=(position[:, rows] + 1).sum(-1),
            cold=np.arange(n_steps) == 0,
        )

    return sums(slice(None)), sums(slice(int(n_first_half(size))))


@torch.no_grad()
def _misses(setting: GpuSetting, injection: Injection, n_steps: int) -> np.ndarray:
    """int64 [step, layer, row]: blocks that the slots do not hold, the current one left out, over KV heads."""
    n_layers, batch, heads, k = injection.ids_table.shape[1:]
    at_once = max(1, _MOST_COMPARED // (batch * heads * k * setting.slots))
    parts = [
        _misses_of(setting, injection, injection.ids_table[:n_steps, first : first + at_once])
        for first in range(0, n_layers, at_once)
    ]
    return np.concatenate(parts, axis=1)


def _misses_of(setting: GpuSetting, injection: Injection, table: Tensor) -> np.ndarray:
    """The same for a table [step, layer, row, kv_head, k] of some layers."""
    n_steps, n_layers, batch, heads, _ = table.shape
    block, device = setting.sparse.block_size, table.device
    first = torch.tensor(injection.contexts, device=device) - 1
    streams = n_layers * batch * heads

    def by_stream(rows: Tensor) -> Tensor:
        return rows[None, :, None].expand(n_layers, batch, heads).reshape(streams)

    slots = torch.full((streams, setting.slots), -1, dtype=torch.int32, device=device)
    # after a prefill of all tokens but the last, an unfinished block lies in slot 0
    slots[:, 0] = by_stream(torch.where(first % block != 0, first // block, -1)).int()
    last_use = torch.full((streams, setting.slots), -1, dtype=torch.int64, device=device)
    found = torch.empty((n_steps, n_layers, batch), dtype=torch.int64, device=device)
    for step in range(n_steps):
        update = update_slots(slots, table[step].reshape(streams, -1), last_use, setting.policy != "exact")
        current = by_stream((first + step) // block)
        loads = ((update.load_blocks >= 0) & (update.load_blocks != current[:, None])).sum(-1)
        found[step] = loads.view(n_layers, batch, heads).sum(-1)
        slots = update.slot_blocks
        used = torch.zeros((streams, setting.slots + 1), dtype=torch.bool, device=device)
        used.scatter_(1, torch.where(update.wanted_slots >= 0, update.wanted_slots, setting.slots).long(), True)
        last_use = torch.where(used[:, :-1], step, last_use)
    return found.cpu().numpy()


def at_steps(loads: LayerStepMisses, steps: np.ndarray) -> LayerStepMisses:
    """Some steps of a workload, in the order given."""
    return LayerStepMisses(**{f.name: getattr(loads, f.name)[steps] for f in dataclasses.fields(loads)})


def slots_for(topk: int, factor: float) -> int:
    """Slots of ``factor`` times the budget, rounded up."""
    return math.ceil(factor * topk - 1e-9)
