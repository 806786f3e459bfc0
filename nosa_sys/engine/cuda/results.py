"""The way of a step's results to the host: graph memory -> ring on the device -> pinned ring.

The first hop is a copy within the device, in line with the steps; the second crosses the link on a stream of its own,
beside the next step.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Two steps may be in flight while a third is being read.
_N_RESULTS = 3
# Shapes of one result that keep their buffers: joins and leaves change shapes to and fro, growing contexts for good.
_N_SHAPES = 4


class StepResults:
    """Copies results out: graph memory -> ring on the device -> pinned ring, the second hop beside the next step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._rings: dict[tuple[str, torch.Size], list[tuple[Tensor, Tensor]]] = {}
        self._turn = 0
        self._last: deque[torch.cuda.Event] = deque(maxlen=_N_RESULTS)

    def send(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Host copies of ``tensors``, whole when the event has happened."""
        if not self._on_gpu:
            return {name: tensor.clone() for name, tensor in tensors.items()}, None
        stream = torch.cuda.current_stream()
        if len(self._last) == _N_RESULTS:
            stream.wait_event(self._last[0])
        slots = [self._ring(name, tensor)[self._turn] for name, tensor in tensors.items()]
        self._turn = (self._turn + 1) % _N_RESULTS
        for tensor, (there, _) in zip(tensors.values(), slots, strict=True):
            there.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            torch.cuda.current_stream().wait_event(copied)
            for there, here in slots:
                here.copy_(there, non_blocking=True)
            done.record()
        self._last.append(done)
        return dict(zip(tensors, (here for _, here in slots), strict=True)), done

    def release(self) -> None:
        """Give all buffers back, once nothing is copied through them any more."""
        self._settle()
        self._rings.clear()

    def _settle(self) -> None:
        for done in self._last:
            done.synchronize()
        self._last.clear()

    def _ring(self, name: str, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        key = (name, like.shape)
        ring = self._rings.pop(key, None)
        if ring is None:
            others = [k for k in self._rings if k[0] == name]
            if len(others) >= _N_SHAPES:
                self._settle()
                del self._rings[others[0]]
            ring = [
                (torch.empty_like(like), torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_gpu))
                for _ in range(_N_RESULTS)
            ]
        self._rings[key] = ring  # the one used longest ago is the first to go
        return ring
