"""Pooling of windows to blocks. On CUDA the selection kernel pools by itself; this form is torch everywhere."""

from nosa_sys.kernels.block_pooling.reference import pool_windows

__all__ = ["pool_windows"]
