"""The rate at which SMs read pinned host memory: what every fetch is held against."""

from __future__ import annotations

import torch

from nosa_sys.kernels.timing import time_in_graph


def sm_read_ceiling_gbps(
    n_bytes: int = 256 * 2**20, *, n_ctas: int = 132, num_warps: int = 16, tile_bytes: int = 32768
) -> float:
    """Streaming read of one pinned buffer of ``n_bytes`` by ``n_ctas`` CTAs, GB/s (median of graph replays)."""
    from nosa_sys.kernels.block_fetch.triton import stream_read_kernel

    source = torch.zeros(n_bytes // 4, dtype=torch.int32, pin_memory=True)
    sink = torch.empty((n_ctas, tile_bytes // 4), dtype=torch.int32, device="cuda")
    n_tiles = n_bytes // tile_bytes

    def launch() -> None:
        stream_read_kernel[(n_ctas,)](source, sink, n_tiles, TILE_WORDS=tile_bytes // 4, num_warps=num_warps)

    timing = time_in_graph(launch, copies=2, n_replays=9, flush="none")
    return n_tiles * tile_bytes / timing.median_us / 1e3
