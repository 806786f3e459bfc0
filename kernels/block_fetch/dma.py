"""Host-driven fetches: the copy engine with one batched call, and the naive copy per block to compare with.

Both need the list on the host, so neither can follow a list that a kernel made without a synchronisation, and a graph
would freeze it. No SM is used. Batched copies lose below about 32 KiB a run (the CPU submits each one) and win above
the device's crossover, which a profile measures.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nosa_sys.errors import HardwareError
from nosa_sys.kernels.block_fetch.triton import run_words

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def _batch_copy() -> tuple[Callable[..., int], bool]:
    """The driver's batched copy and whether it takes a fail index (before CUDA 13)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HardwareError(f"no CUDA driver library: {error}") from error
    for name, takes_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(driver, name, None)
        if function is not None:
            function.restype = ctypes.c_int
            return function, takes_fail_index
    raise HardwareError("this CUDA driver has no batched copy (12.8 or newer is needed); use the path 'uva' instead")


def batched_copy_runs(source: Tensor, target: Tensor, source_rows: np.ndarray, target_rows: np.ndarray) -> None:
    """target[target_rows[i]] = source[source_rows[i]] by one cuMemcpyBatchAsync on the current stream.

    source and target [row, 2, block, head_dim], one of them pinned; rows int64 [n] on the host, pairs with -1 are left
    out. The order among the copies of one call is free. Raises HardwareError when the driver refuses, RuntimeError
    while the stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a batched copy takes its list from the host: capture in a graph would freeze it")
    run_bytes = 4 * run_words(source, target, "source", "target")
    wanted = (source_rows >= 0) & (target_rows >= 0)
    n = int(wanted.sum())
    if n == 0 or run_bytes == 0:
        return
    if int(source_rows.max()) >= source.shape[0] or int(target_rows.max()) >= target.shape[0]:
        raise HardwareError(f"a row is outside its pool of {source.shape[0]} source or {target.shape[0]} target rows")
    stream = torch.cuda.current_stream()
    if stream.cuda_stream == 0:
        # The driver takes no batch on the legacy default stream: a side stream runs it, ordered on both sides.
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            batched_copy_runs(source, target, source_rows, target_rows)
        stream.wait_stream(side)
        return
    from_addresses = source.data_ptr() + source_rows[wanted].astype(np.uint64) * np.uint64(run_bytes)
    to_addresses = target.data_ptr() + target_rows[wanted].astype(np.uint64) * np.uint64(run_bytes)
    sizes = np.full(n, run_bytes, dtype=np.uint64)
    attributes = _Attributes(_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _PREFER_OVERLAP)
    first = ctypes.c_size_t(0)
    fail_index = ctypes.c_size_t(0)
    copy, takes_fail_index = _batch_copy()
    status = copy(
        ctypes.c_void_p(to_addresses.ctypes.data),
        ctypes.c_void_p(from_addresses.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(n),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        *((ctypes.byref(fail_index),) if takes_fail_index else ()),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if status:
        raise HardwareError(f"cuMemcpyBatchAsync failed with CUDA error {status} for {n} runs of {run_bytes} bytes")


def naive_copy_runs(source: Tensor, target: Tensor, source_rows: list[int], target_rows: list[int]) -> None:
    """One asynchronous copy call a block: the baseline that needs no kernel; rows of -1 are skipped."""
    for source_row, target_row in zip(source_rows, target_rows, strict=True):
        if source_row >= 0 and target_row >= 0:
            target[target_row].copy_(source[source_row], non_blocking=True)
