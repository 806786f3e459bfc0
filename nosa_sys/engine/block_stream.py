"""Copies of finished blocks from the device into a host pool, on a stream of their own beside the compute stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class BlockStream:
    """One copy stream, made at its first use."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def write(self, by_page: Tensor, pages: list[int], blocks: Tensor) -> None:
        """by_page[pages[i]] = blocks[i], one copy for each run of consecutive pages; returns at once.

        by_page [page, kv_head, 2, block, head_dim] in registered host memory; blocks [n, kv_head, 2, block, head_dim]
        on the device, any strides: a contiguous copy made on the current stream is what crosses, and it lives until it
        has crossed.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(blocks.device)
        staged = blocks.clone(memory_format=torch.contiguous_format)
        self._stream.wait_stream(torch.cuda.current_stream(blocks.device))
        with torch.cuda.stream(self._stream):
            for page, start, length in consecutive_runs(pages):
                by_page[page : page + length].copy_(staged[start : start + length], non_blocking=True)
        staged.record_stream(self._stream)

    def settle(self) -> None:
        """Wait until everything written so far has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


def consecutive_runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first page, its index, length) of each longest run of consecutive ascending pages.

    >>> list(consecutive_runs([4, 5, 6, 9, 8]))
    [(4, 0, 3), (9, 3, 1), (8, 4, 1)]
    """
    start = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1:
            yield pages[start], start, at - start
            start = at
