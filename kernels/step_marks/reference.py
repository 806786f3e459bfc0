"""A time mark on the host: what stands in for the device's clock where operations run in the order of their calls."""

from __future__ import annotations

import time

from torch import Tensor


def mark(buffer: Tensor, index: int) -> None:
    """buffer[index] = nanoseconds of the host's performance counter; buffer int64 [n]."""
    buffer[index] = time.perf_counter_ns()
