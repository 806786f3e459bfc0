"""The host link: runs by size x count x path x CTAs in both directions, duplex, and copies beside compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nosa_sys.kernels.block_fetch.bulk import bulk_copy_runs, nvcc_path
from nosa_sys.kernels.block_fetch.dma import batched_copy_runs
from nosa_sys.kernels.block_fetch.overlap import measure_overlap, side_by_side
from nosa_sys.kernels.block_fetch.triton import copy_runs
from nosa_sys.kernels.timing import time_eager, time_in_graph

RUN_BYTES = (4096, 8192, 16384, 32768, 65536, 262144)
COUNTS = (1, 8, 64, 512, 4096)
CTAS = (4, 8, 16, 32, 132)
MAX_POINT_BYTES = 2**28


class Pools:
    """A pinned host pool and a device pool, viewed as rows of any run size; rows are drawn at random."""

    def __init__(self, n_bytes: int, seed: int) -> None:
        self._host = torch.empty(n_bytes // 4, dtype=torch.int32, pin_memory=True)
        self._device = torch.empty(n_bytes // 4, dtype=torch.int32, device="cuda")
        self._host.random_(generator=torch.Generator().manual_seed(seed))
        self._device.copy_(self._host)
        self._rng = np.random.default_rng(seed)

    def rows(self, run_bytes: int, count: int) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
        """(host pool, device pool) as [row, 2, 1, words / 2], and two lists of distinct rows."""
        words = run_bytes // 8
        host, device = self._host.view(-1, 2, 1, words), self._device.view(-1, 2, 1, words)
        lists = [self._rng.permutation(host.shape[0])[:count].astype(np.int64) for _ in range(2)]
        return host, device, lists[0], lists[1]


def _point(
    direction: str, path: str, run_bytes: int, count: int, n_ctas: int, work: Callable[[], object], *, graph: bool
) -> dict[str, Any]:
    timing = time_in_graph(work, copies=4, n_replays=7, flush="write") if graph else time_eager(work, n_calls=9)
    return {
        "direction": direction,
        "path": path,
        "run_bytes": run_bytes,
        "n_runs": count,
        "n_ctas": n_ctas,
        "bytes": run_bytes * count,
        "mode": "graph" if graph else "eager",
        **dataclasses.asdict(timing),
    }


def run_points(seed: int = 0) -> Iterator[dict[str, Any]]:
    """H2D and D2H by run size, count, path and CTAs. Paths: uva (gather kernel), bulk (bulk copy engine), dma (one
    batched copy call), memcpy (one contiguous copy of the same bytes)."""
    pools = Pools(2 * MAX_POINT_BYTES, seed)
    has_bulk = nvcc_path() is not None
    for run_bytes in RUN_BYTES:
        for count in COUNTS:
            if run_bytes * count > MAX_POINT_BYTES:
                continue
            host, device, host_list, device_list = pools.rows(run_bytes, count)
            host_rows, device_rows = (torch.from_numpy(x).cuda() for x in (host_list, device_list))
            number = torch.tensor([count], dtype=torch.int32, device="cuda")
            for n_ctas in CTAS:

                def uva(n_ctas: int = n_ctas, lists: Any = (host, device, host_rows, device_rows, number)) -> None:
                    copy_runs(*lists, n_ctas=n_ctas)

                yield _point("h2d", "uva", run_bytes, count, n_ctas, uva, graph=True)
            for n_ctas in (2, 4) if has_bulk else ():

                def bulk(n_ctas: int = n_ctas, lists: Any = (host, device, host_rows, device_rows, number)) -> None:
                    bulk_copy_runs(*lists, n_ctas=n_ctas)

                bulk()
                yield _point("h2d", "bulk", run_bytes, count, n_ctas, bulk, graph=True)

            def dma(lists: Any = (host, device, host_list, device_list)) -> None:
                batched_copy_runs(*lists)

            yield _point("h2d", "dma", run_bytes, count, 0, dma, graph=False)

            def write(lists: Any = (device, host, device_rows, host_rows, number)) -> None:
                copy_runs(*lists, n_ctas=16)

            yield _point("d2h", "uva", run_bytes, count, 16, write, graph=True)
            whole = slice(0, run_bytes * count // 4)
            flat_host, flat_device = host.view(-1)[whole], device.view(-1)[whole]
            pairs = (("h2d", flat_device, flat_host), ("d2h", flat_host, flat_device))
            for direction, target, source in pairs if run_bytes == RUN_BYTES[-1] or count == 1 else ():

                def copy(target: Tensor = target, source: Tensor = source) -> None:
                    target.copy_(source, non_blocking=True)

                yield _point(direction, "memcpy", run_bytes, count, 0, copy, graph=False)


def duplex_points(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Gather and write-back of equal bytes, each alone and both at once on two streams."""
    pools = Pools(2 * MAX_POINT_BYTES, seed)
    stream = torch.cuda.Stream()
    for run_bytes, count in ((32768, 512), (32768, 4096)):
        host, device, host_list, device_list = pools.rows(run_bytes, 2 * count)
        host_rows, device_rows = (torch.from_numpy(x).cuda() for x in (host_list, device_list))

        def up(lists: Any = (host, device, host_rows[:count], device_rows[:count])) -> None:
            copy_runs(*lists, n_ctas=16)

        def down(lists: Any = (device, host, device_rows[count:], host_rows[count:])) -> None:
            copy_runs(*lists, n_ctas=16)

        times = {
            name: time_in_graph(work, copies=4, n_replays=7, flush="none").median_us
            for name, work in (("h2d_us", up), ("d2h_us", down), ("both_us", side_by_side(up, down, stream)))
        }
        yield {"run_bytes": run_bytes, "n_runs": count, "bytes_each_way": run_bytes * count, **times}


def contention_points() -> Iterator[dict[str, Any]]:
    """Fetch beside GEMMs and beside attention, by path and CTAs."""
    for compute in ("gemm", "attention"):
        for row in measure_overlap(compute):
            yield {**dataclasses.asdict(row), "slowdown": row.slowdown}
