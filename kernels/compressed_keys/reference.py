"""Compressed keys: means of overlapping token windows of the roped keys, and of the betas (paper section 3).

Window i covers tokens [stride * i, stride * i + kernel). Only complete windows exist: a mean over a window that is
still filling would move both ways while tokens arrive, and the locality guarantee would be lost.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

from nosa_sys.kernels.numerics import acc_dtype, tree_sum


def window_means(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Means of all complete windows: x [tokens, ...] -> [window, ...], float32 (float64 for float64).

    There are max(0, (tokens - kernel) // stride + 1) windows. A slice that starts at a multiple of ``stride`` gives
    bit for bit the same means as the whole.
    """
    x = x.to(acc_dtype(x))
    if x.shape[0] < kernel:
        return x[:0]
    return tree_sum(x.unfold(0, kernel, stride)) / kernel


def window_mean_of_tail(tail: Tensor) -> Tensor:
    """Mean of the last ``kernel`` tokens of each sequence: tail [batch, kernel, ...] -> [batch, ...].

    Bit-equal to what ``window_means`` gives for the same rows: the incremental path of decoding.
    """
    tail = tail.to(acc_dtype(tail))
    return tree_sum(tail.movedim(1, -1)) / tail.shape[1]


@overload
def completes_window(length: int, kernel: int, stride: int) -> bool: ...
@overload
def completes_window(length: Tensor, kernel: int, stride: int) -> Tensor: ...
def completes_window(length: int | Tensor, kernel: int, stride: int) -> bool | Tensor:
    """Whether the token that made the context ``length`` tokens long completed a window."""
    return (length >= kernel) & ((length - kernel) % stride == 0)
