"""What launching costs: a kernel inside a graph, a graph replay, an eager launch, a synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from nosa_sys.kernels.timing import capture_graph, time_in_graph

_SMALL = 1024


def _host_us(function: Any, n_calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(n_calls):
        function()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / n_calls * 1e6


def cuda_overhead_points() -> Iterator[dict[str, Any]]:
    """Rows {what, median_us}: medians of 5 series."""
    x = torch.zeros(_SMALL, device="cuda")

    def tiny() -> None:
        x.add_(1.0)

    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    yield {"what": "kernel_in_graph", "median_us": time_in_graph(tiny, copies=64, flush="none").median_us}
    yield {"what": "eager_launch_host", "median_us": median([_host_us(tiny, 500) for _ in range(5)])}

    def eager_chain() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(500):
            tiny()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / 500

    yield {"what": "eager_kernel_device", "median_us": median([eager_chain() for _ in range(5)])}
    for n_kernels in (1, 100, 400):

        def chain(n: int = n_kernels) -> None:
            for _ in range(n):
                tiny()

        graph = capture_graph(chain)
        what = f"graph_replay_host_{n_kernels}"
        yield {"what": what, "median_us": median([_host_us(graph.replay, 50) for _ in range(5)])}

        def replay_and_wait(graph: torch.cuda.CUDAGraph = graph) -> None:
            graph.replay()
            torch.cuda.synchronize()

        what = f"graph_replay_and_sync_{n_kernels}"
        yield {"what": what, "median_us": median([_host_us(replay_and_wait, 50) for _ in range(5)])}
    yield {"what": "synchronize", "median_us": median([_host_us(torch.cuda.synchronize, 200) for _ in range(5)])}
