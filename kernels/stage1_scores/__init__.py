"""Stage-1 scores: the Triton kernels on CUDA, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.launch import use_triton
from nosa_sys.kernels.stage1_scores import reference


def stage1_scores(q: Tensor, key_means: Tensor, n_windows: Tensor) -> Tensor:
    """As ``reference.stage1_scores``."""
    if use_triton(q, key_means):
        from nosa_sys.kernels.stage1_scores import triton

        return triton.stage1_scores(q, key_means, n_windows)
    return reference.stage1_scores(q, key_means, n_windows)


def stage1_scores_causal(q: Tensor, key_means: Tensor, positions: Tensor, kernel: int, stride: int) -> Tensor:
    """As ``reference.stage1_scores_causal``."""
    if use_triton(q, key_means):
        from nosa_sys.kernels.stage1_scores import triton

        return triton.stage1_scores_causal(q, key_means, positions, kernel, stride)
    return reference.stage1_scores_causal(q, key_means, positions, kernel, stride)
