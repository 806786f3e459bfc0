"""Fetch beside compute: each alone, then both on two streams, by path and number of CTAs.

Few CTAs overlap almost perfectly, many serialise with the compute that they take SMs from; the knee is what a profile's
default CTA count comes from. Target: both together at most 1.05 x the longer of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nosa_sys.errors import HardwareError
from nosa_sys.kernels.block_fetch.cases import make_inputs
from nosa_sys.kernels.case import Case
from nosa_sys.kernels.timing import time_in_graph

Work = Callable[[], object]


@dataclass(frozen=True)
class Overlap:
    """One measurement, microseconds; ``slowdown`` is both together over the longer of the two."""

    path: str
    n_ctas: int
    bytes: int
    compute: str
    fetch_us: float
    compute_us: float
    both_us: float

    @property
    def slowdown(self) -> float:
        return self.both_us / max(self.fetch_us, self.compute_us)


def side_by_side(fetch: Work, compute: Work, stream: torch.cuda.Stream) -> Work:
    """Both at once: the fetch on ``stream``, forked from and joined to the current one; a graph can hold it."""

    def run() -> None:
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            fetch()
        compute()
        main.wait_stream(stream)

    return run


def gemm_work(rows: int = 64, k: int = 4096, n: int = 28672, repeats: int = 16) -> Work:
    """bf16 products of decode shape, [rows, k] x [k, n], alternating over two weights that the L2 cannot hold."""
    x = torch.randn((rows, k), device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn((k, n), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty((rows, n), device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for repeat in range(repeats):
            torch.mm(x, weights[repeat % 2], out=out)

    return run


def attention_work(
    batch: int = 64, kv_heads: int = 2, group: int = 16, head_dim: int = 128, blocks: int = 64, repeats: int = 16
) -> Work:
    """The engine's own decode attention over slots, blocks of 64 tokens."""
    from nosa_sys.kernels.sparse_decode_attention import sparse_decode_attention

    rows = batch * kv_heads * blocks
    q = torch.randn((batch, kv_heads * group, head_dim), device="cuda", dtype=torch.bfloat16)
    slots = torch.randn((rows, 2, 64, head_dim), device="cuda", dtype=torch.bfloat16)
    betas = torch.randn((rows, 64), device="cuda")
    slot_rows = torch.arange(rows, device="cuda").view(batch, kv_heads, blocks)
    block_ids = torch.arange(blocks, device="cuda", dtype=torch.int32).expand(batch, kv_heads, blocks).contiguous()
    lengths = torch.full((batch,), blocks * 64, device="cuda", dtype=torch.int32)

    def run() -> None:
        for _ in range(repeats):
            sparse_decode_attention(q, slots, betas, slot_rows, block_ids, lengths)

    return run


COMPUTE: dict[str, Callable[..., Work]] = {"gemm": gemm_work, "attention": attention_work}


def measure_overlap(
    compute: str = "gemm",
    *,
    n_runs: int = 2048,
    head_dim: int = 128,
    uva_ctas: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 64, 132),
    bulk_ctas: tuple[int, ...] = (1, 2, 3, 4, 8),
    high_priority: bool = True,
    seed: int = 0,
) -> Iterator[Overlap]:
    """Yield one row for every path and CTA count; the compute is repeated until it lasts about as long as the fetch.

    Runs are 2 * 64 * head_dim bf16 values (32 KiB at 128). ``high_priority`` launches the copy on a priority stream, so
    that its CTAs find a place before the compute fills the SMs. Raises HardwareError without a GPU; the bulk path is
    left out where it cannot be built.
    """
    from nosa_sys.kernels.block_fetch.bulk import bulk_copy_runs, nvcc_path
    from nosa_sys.kernels.block_fetch.triton import copy_runs

    if not torch.cuda.is_available():
        raise HardwareError("fetch beside compute can only be measured on a CUDA device")
    params = {"block": 64, "head_dim": head_dim, "n_runs": n_runs, "n_listed": -1, "skip_every": 0, "n_ctas": 16}
    params |= {"n_host_rows": max(2 * n_runs, 8192), "n_slot_rows": 2 * n_runs}
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    case = Case("overlap", "bfloat16", params, frozenset({"bench"}))
    inputs = make_inputs(case, torch.device("cuda"), generator)
    lists = (inputs["host"], inputs["slots"], inputs["host_rows"], inputs["slot_rows"], inputs["count"])

    def microseconds(work: Work) -> float:
        return time_in_graph(work, copies=4, n_replays=9, flush="none").median_us

    one = COMPUTE[compute](repeats=1)
    target_us = microseconds(lambda: copy_runs(*lists))
    work = COMPUTE[compute](repeats=max(1, round(target_us / microseconds(one))))
    compute_us = microseconds(work)
    stream = torch.cuda.Stream(priority=-1 if high_priority else 0)
    paths: list[tuple[str, Callable[..., None], int]] = [("uva", copy_runs, n) for n in uva_ctas]
    if nvcc_path() is not None:
        paths += [("bulk", bulk_copy_runs, n) for n in bulk_ctas]
    for path, copy, n_ctas in paths:

        def fetch(copy: Callable[..., None] = copy, n_ctas: int = n_ctas) -> None:
            copy(*lists, n_ctas=n_ctas)

        fetch_us = microseconds(fetch)
        both_us = microseconds(side_by_side(fetch, work, stream))
        yield Overlap(path, n_ctas, inputs["bytes"], compute, fetch_us, compute_us, both_us)
