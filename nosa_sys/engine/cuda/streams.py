"""The streams of a step: compute, copies to the device, copies to the host. On a CPU they are one and the same."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

Mark = torch.cuda.Event | None


class Streams:
    """Side streams that fork from the current (compute) stream and join it again; a graph capture follows them.

    Everything handed to a side stream must stay referenced until the join: the allocator knows one stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # copies first: their few CTAs should not queue behind a compute kernel that fills every SM
            self._h2d = torch.cuda.Stream(device, priority=-1)
            self._d2h = torch.cuda.Stream(device, priority=-1)

    def h2d(self) -> AbstractContextManager[object]:
        """Work inside goes to the host-to-device stream."""
        return torch.cuda.stream(self._h2d) if self._on_gpu else contextlib.nullcontext()

    def d2h(self) -> AbstractContextManager[object]:
        """Work inside goes to the device-to-host stream."""
        return torch.cuda.stream(self._d2h) if self._on_gpu else contextlib.nullcontext()

    def mark(self) -> Mark:
        """A point of the stream that is current."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """The stream that is current goes on after ``mark``."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)
