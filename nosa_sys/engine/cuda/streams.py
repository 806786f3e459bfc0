"""The streams of a step: compute, copies to the device, copies to the host. On a CPU they are one and the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

Mark = torch.cuda.Event | None


class Streams:
    """Side streams that fork from the current (compute) stream and join it again; a graph capture follows them.

    Everything handed to a side stream must stay referenced until the join: the allocator knows one stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._forked: set[torch.cuda.Stream] = set()
        if self._on_gpu:
            # copies first: their few CTAs should not queue behind a compute kernel that fills every SM
            self._h2d = torch.cuda.Stream(device, priority=-1)
            self._d2h = torch.cuda.Stream(device, priority=-1)

    def h2d(self, after: Mark) -> AbstractContextManager[object]:
        """Work inside goes to the host-to-device stream, behind ``after``."""
        return self._side(self._h2d, after) if self._on_gpu else contextlib.nullcontext()

    def d2h(self, after: Mark) -> AbstractContextManager[object]:
        """Work inside goes to the device-to-host stream, behind ``after``."""
        return self._side(self._d2h, after) if self._on_gpu else contextlib.nullcontext()

    @contextlib.contextmanager
    def _side(self, stream: torch.cuda.Stream, after: Mark) -> Iterator[None]:
        self._forked.add(stream)
        with torch.cuda.stream(stream):
            self.wait(after)
            yield

    def join(self) -> None:
        """The current stream goes on when the side streams that were used have ended."""
        for stream in self._forked:
            torch.cuda.current_stream().wait_stream(stream)
        self._forked.clear()

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
