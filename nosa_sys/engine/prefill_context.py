"""Where a prefill's chunks find the K and V of the chunks before them, its NaN reports, and the clock of its layers."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from nosa_sys.engine.memory import Memory
from nosa_sys.engine.memory_plan import prefill_buffer_bytes
from nosa_sys.engine.pinned import refuse_unless_free
from nosa_sys.engine.tensors import free_bytes
from nosa_sys.errors import NumericsError
from nosa_sys.kernels.block_selection import raise_selection_errors
from nosa_sys.models.llama import LlamaModel


class PromptContext(Protocol):
    """K and V of one prompt while it is prefilled. ``reads_pool``: earlier blocks cross from the pool again."""

    reads_pool: bool

    def extend(self, layer: int, first: int, k: Tensor, v: Tensor) -> Tensor:
        """Add tokens from ``first`` on, k and v [n, kv_head, D]; K and V of all so far, [2, kv_head, L, D]."""


class PoolContext:
    """Reads the earlier blocks from the engine's memory for every chunk: no storage of its own between chunks."""

    def __init__(self, memory: Memory, lane: int, pages: list[int]) -> None:
        self._memory, self._lane, self._pages = memory, lane, pages
        self.reads_pool = memory.offload

    def extend(self, layer: int, first: int, k: Tensor, v: Tensor) -> Tensor:
        earlier = self._memory.read_context(layer, self._lane, self._pages, first)
        return torch.cat([earlier, torch.stack((k, v)).transpose(1, 2)], dim=2)


class KeptContext:
    """Keeps the prompt's K and V of all layers on the device until the prefill ends, so that nothing is read back.

    Raises CapacityError when that does not fit.
    """

    reads_pool = False

    def __init__(self, model: LlamaModel, n_tokens: int) -> None:
        shape = model.shape
        needed = prefill_buffer_bytes(shape, n_tokens)
        refuse_unless_free(
            needed,
            free_bytes(model.device),
            f"{model.device.type} memory for the K and V of a prompt of {n_tokens} tokens during its prefill",
            "prefill fewer tokens, or leave more memory free (fewer lanes or slots)",
        )
        # tokens outermost: what attention reads of a layer is one contiguous [L, kv_head, D]
        size = (shape.n_layers, 2, n_tokens, shape.n_kv_heads, shape.head_dim)
        self._kv = torch.empty(size, dtype=model.dtype, device=model.device)

    def extend(self, layer: int, first: int, k: Tensor, v: Tensor) -> Tensor:
        end = first + len(k)
        self._kv[layer, 0, first:end] = k
        self._kv[layer, 1, first:end] = v
        return self._kv[layer, :, :end].transpose(1, 2)


class ChunkReports:
    """The end of one chunk, with the NaN reports of its layers: a GPU is given the next chunk before they are read.

    ``errors``: one entry a layer, int32 [last queries, kv_head], whose last query is at position ``end`` - 1; none of
    a dense method, or where everything was selected.
    """

    def __init__(self, errors: list[Tensor], end: int, device: torch.device) -> None:
        self._errors, self._end = errors, end
        on_gpu = device.type == "cuda"
        if errors:
            worst = torch.stack(errors).amax()
            self._worst = torch.empty((), dtype=worst.dtype, pin_memory=on_gpu).copy_(worst, non_blocking=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def check(self) -> None:
        """Wait for the chunk; NumericsError for a NaN, naming layer, position, head and block."""
        if self._done is not None:
            self._done.synchronize()
        if not self._errors or int(self._worst) < 0:
            return
        for layer, reports in enumerate(self._errors):
            try:
                raise_selection_errors(reports, first_row=self._end - len(reports))
            except NumericsError as error:
                raise NumericsError(f"layer {layer}, prefill, row = position: {error}") from None


class LayerClock:
    """Time of each layer, summed over chunks: by the device's own clock on a GPU, which is read in ``collect`` only."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self._events: list[list[torch.cuda.Event]] | None = [] if device.type == "cuda" else None
        self.time_us = [0.0] * n_layers

    def begin_chunk(self) -> None:
        """Before the first layer."""
        if self._events is None:
            self._last_s = time.perf_counter()
        else:
            self._events.append([])
            self._mark(self._events[-1])

    def end_layer(self, layer: int) -> None:
        """After each layer, in order."""
        if self._events is None:
            now_s = time.perf_counter()
            self.time_us[layer] += (now_s - self._last_s) * 1e6
            self._last_s = now_s
        else:
            self._mark(self._events[-1])

    def collect(self) -> list[float]:
        """Microseconds a layer; all work must be done."""
        for marks in self._events or []:
            for layer in range(len(self.time_us)):
                self.time_us[layer] += marks[layer].elapsed_time(marks[layer + 1]) * 1e3
        return self.time_us

    @staticmethod
    def _mark(marks: list[torch.cuda.Event]) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
