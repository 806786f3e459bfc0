"""Compressed keys in decode: the Triton kernel on CUDA tensors, else the reference."""

from __future__ import annotations

from torch import Tensor

from nosa_sys.kernels.compressed_keys import append_reference
from nosa_sys.kernels.launch import use_triton


def append_windows(
    ring: Tensor,
    token_betas: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    lengths: Tensor,
    stride: int,
    *,
    lanes: Tensor | None = None,
) -> None:
    """As ``append_reference.append_windows``."""
    if use_triton(ring, token_betas, key_means, beta_means):
        from nosa_sys.kernels.compressed_keys.triton import append_windows as fast

        fast(ring, token_betas, key_means, beta_means, lengths, stride, lanes=lanes)
    else:
        append_reference.append_windows(ring, token_betas, key_means, beta_means, lengths, stride, lanes=lanes)
