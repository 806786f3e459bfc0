"""A time mark on the device: one program of one warp that stores the global timer.

Floor: one launch, about 1 us in a graph. The interpreter has no such clock; tests compile the kernel and look for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import on_device


# Every mark of a step has its own index, and all of them are one kernel.
@triton.jit(do_not_specialize=["index"])
def mark_kernel(buffer, index):
    tl.store(buffer + index, tl.extra.cuda.globaltimer())


def mark(buffer: Tensor, index: int) -> None:
    """buffer[index] = the device's global nanosecond timer; buffer int64 [n] on CUDA."""
    with on_device(buffer):
        mark_kernel[(1,)](buffer, index, num_warps=1)


AOT_SPECS = [AotSpec("mark", mark_kernel, {"buffer": "*i64", "index": "i32"}, {}, 1)]
