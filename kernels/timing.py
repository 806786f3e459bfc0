"""Device timing: median of CUDA-graph replays with the L2 flushed before every launch.

A graph holds ``copies`` times [flush, operation]; a second graph holds only the flushes. The difference, divided by
``copies``, is the operation's time inside a graph, its launch gap included and the event and graph-launch cost not.

Two flushes, each wrong for the other's case. A flush by reads leaves clean lines; use it for operations that read
much and write little (a flush by writes would make them pay for its dirty lines). A flush by writes suits copies:
they leave dirty lines themselves, which the next flush by reads would have to write back, at the copy's expense.
Two buffers take turns, so that no flush finds lines of its own last turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Flush = Literal["read", "write", "none"]
FLUSH_BYTES = 256 * 2**20  # an H200's L2 holds 60 MB


@dataclass(frozen=True)
class Timing:
    """Median, 10th and 90th percentile of one operation, microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    n_replays: int


def capture_graph(function: Callable[[], object], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream (compiles kernels, fills allocators), then capture one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    torch.cuda.synchronize()
    return graph


def _replays_us(graph: torch.cuda.CUDAGraph, n_replays: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n_replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def time_in_graph(
    function: Callable[[], object], *, copies: int = 8, n_replays: int = 15, flush: Flush = "read"
) -> Timing:
    """Time ``function`` (launches only, no host sync) by graph replays; see the module docstring."""
    stale = [
        torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda") for _ in range(0 if flush == "none" else 2)
    ]
    total = torch.empty((), dtype=torch.float32, device="cuda")

    def flush_once(turn: int) -> None:
        if flush == "read":
            torch.sum(stale[turn % 2], dim=0, out=total)
        elif flush == "write":
            stale[turn % 2].fill_(1.0)

    def flushes() -> None:
        for turn in range(copies):
            flush_once(turn)

    def flushes_and_function() -> None:
        for turn in range(copies):
            flush_once(turn)
            function()

    whole = capture_graph(flushes_and_function)
    _replays_us(whole, 2)
    if not stale:
        times = [t / copies for t in _replays_us(whole, n_replays)]
    else:
        base = capture_graph(flushes)
        _replays_us(base, 2)
        base_us = sorted(_replays_us(base, n_replays))[n_replays // 2]
        times = [(t - base_us) / copies for t in _replays_us(whole, n_replays)]
    times.sort()
    return Timing(times[len(times) // 2], times[len(times) // 10], times[-1 - len(times) // 10], n_replays)


def time_eager(function: Callable[[], object], *, n_calls: int = 20, warmup: int = 3) -> Timing:
    """Median of event-timed eager calls, for what a graph cannot hold (host-driven copies)."""
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(n_calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    times.sort()
    return Timing(times[len(times) // 2], times[len(times) // 10], times[-1 - len(times) // 10], n_calls)


def device_copy_gbps(n_bytes: int = 4 * 2**30) -> float:
    """Device-to-device copy rate, bytes read plus bytes written, GB/s: the HBM ceiling of this run."""
    source = torch.randint(0, 255, (n_bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Eager: a copy node of a graph took 1.6 times as long as the same copy on a stream (H200, driver 580).
    timing = time_eager(lambda: target.copy_(source), n_calls=9)
    return n_bytes / timing.median_us / 1e3


def environment() -> dict[str, str]:
    """Device, driver and versions, for the record beside every measured number."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "n_sms": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }
