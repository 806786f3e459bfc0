"""Time marks inside a stream or a captured graph: the device's clock on CUDA, the host's elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.step_marks import reference


def mark(buffer: Tensor, index: int) -> None:
    """buffer[index] = nanoseconds of one clock, once everything before it on the current stream is done.

    buffer int64 [n], contiguous. On CUDA the device's global timer, one for all streams, which a graph can hold; it may
    tick in steps of up to 1 us, and the launch takes about as long. Elsewhere the host's performance counter. Only
    differences mean something. Raises ConfigError for another type or layout, CapacityError for an index outside.
    """
    if buffer.dtype != torch.int64 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ConfigError(
            f"marks need a contiguous int64 vector; the buffer is {buffer.dtype} {tuple(buffer.shape)} with strides "
            f"{buffer.stride()}"
        )
    if not 0 <= index < buffer.numel():
        raise CapacityError(f"mark {index} is outside the buffer of {buffer.numel()}; allowed: 0..{buffer.numel() - 1}")
    if buffer.is_cuda:
        from nosa_sys.kernels.step_marks.triton import mark as fast

        fast(buffer, index)
    else:
        reference.mark(buffer, index)
