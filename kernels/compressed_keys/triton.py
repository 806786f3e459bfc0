"""Append of compressed keys in decode: means of the last ``kernel`` keys and betas where a window is complete.

One program a (row, KV head), which leaves at once unless the row's length completes a window (1 step in ``stride``).
Floor: one launch; where windows complete, kernel * head_dim keys a head are read from the ring. The sum is the
reference's fixed tree, so that the means are the reference's bits for a power-of-two ``kernel``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import on_device
from nosa_sys.work_splits import padded


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum over the rows of x [ROWS = 2**LEVELS, WIDTH] -> [WIDTH], halves added onto halves."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [2, ROWS >> (level + 1), WIDTH]), axis=0)
    return tl.reshape(x, [WIDTH])


@triton.jit
def ring_window_mean(
    ring, newest, length, channel, inside, ring_pitch, KERNEL: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    WIDTH: tl.constexpr
):  # fmt: skip
    """Mean [WIDTH] over the last KERNEL tokens of a ring (token t at t % KERNEL) at some channels, oldest first.

    ``newest`` [WIDTH] (or None: it is in the ring) is the last token's value, which another program may be writing.
    """
    age = tl.arange(0, ROWS)
    token = length - KERNEL + age
    stored = (age < KERNEL) & (token >= 0)
    if newest is not None:
        stored = stored & (age < KERNEL - 1)
    address = (token % KERNEL) * ring_pitch
    rows = tl.load(ring + address[:, None] + channel[None, :], mask=stored[:, None] & inside[None, :], other=0.0)
    rows = rows.to(tl.float32)
    if newest is not None:
        rows = tl.where((age == KERNEL - 1)[:, None], newest.to(tl.float32)[None, :], rows)
    return tree_sum(rows, ROWS, LEVELS, WIDTH) / KERNEL


@triton.jit
def beta_window_mean(
    betas, newest, length, KERNEL: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Mean [1] of the last KERNEL betas of one (lane, head), stored by token; ``newest`` as in ``ring_window_mean``."""
    age = tl.arange(0, ROWS)
    token = length - KERNEL + age
    stored = (age < KERNEL) & (token >= 0)
    if newest is not None:
        stored = stored & (age < KERNEL - 1)
    rows = tl.load(betas + token, mask=stored, other=0.0)
    if newest is not None:
        rows = tl.where(age == KERNEL - 1, newest, rows)
    return tree_sum(tl.reshape(rows, [ROWS, 1]), ROWS, LEVELS, 1) / KERNEL


@triton.jit
def append_windows_kernel(
    ring,
    token_betas,
    key_means,
    beta_means,
    lengths,
    lanes,
    n_tokens,
    n_windows,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One (row, KV head): see ``append_windows``."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = row
    if lanes is not None:
        lane = tl.load(lanes + row).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    window = (length - KERNEL) // STRIDE
    done = (length >= KERNEL) & ((length - KERNEL) % STRIDE == 0)
    if done & (lane >= 0) & (window < n_windows) & (length <= n_tokens):
        channel = tl.arange(0, DIM_PAD)
        inside = channel < DIM
        lane_head = lane * KV_HEADS + head
        source = ring + (lane * KERNEL * KV_HEADS + head) * DIM
        mean = ring_window_mean(source, None, length, channel, inside, KV_HEADS * DIM, KERNEL, ROWS, LEVELS, DIM_PAD)
        tl.store(key_means + (lane_head * n_windows + window) * DIM + channel, mean, mask=inside)
        beta = beta_window_mean(token_betas + lane_head * n_tokens, None, length, KERNEL, ROWS, LEVELS)
        tl.store(beta_means + lane_head * n_windows + window + tl.arange(0, 1), beta)


def window_shape(kernel: int) -> dict[str, int]:
    """Constants of the tree over ``kernel`` tokens, padded with zeros to a power of two."""
    rows = padded(kernel)
    return {"KERNEL": kernel, "ROWS": rows, "LEVELS": rows.bit_length() - 1}


def check_context(ring: Tensor, token_betas: Tensor, key_means: Tensor, beta_means: Tensor) -> None:
    """ConfigError unless the four tensors of ``append_windows`` are contiguous and of one batch and head count."""
    lanes, kernel, heads, dim = ring.shape
    n_windows = beta_means.shape[2]
    shapes = {
        "token_betas": (token_betas, (lanes, heads, *token_betas.shape[2:])),
        "key_means": (key_means, (lanes, heads, n_windows, dim)),
        "beta_means": (beta_means, (lanes, heads, n_windows)),
    }
    for name, (tensor, shape) in {"ring": (ring, (lanes, kernel, heads, dim)), **shapes}.items():
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ConfigError(
                f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}; it must be contiguous {shape} "
                f"beside a ring of {tuple(ring.shape)}"
            )


def append_windows(
    ring: Tensor,
    token_betas: Tensor,
    key_means: Tensor,
    beta_means: Tensor,
    lengths: Tensor,
    stride: int,
    *,
    lanes: Tensor | None = None,
    num_warps: int = 4,
) -> None:
    """Write the window that ends at token length - 1, in place, for the rows whose length completes one.

    ring [lane, kernel, kv_head, head_dim] with token t at t % kernel; token_betas fp32 [lane, kv_head, ...] by token;
    key_means [lane, kv_head, window, head_dim] (fp32 or the keys' type) and beta_means fp32 [lane, kv_head, window];
    lengths [row] on the device, tokens; lanes [row] (None: the row itself), -1 is padding. Nothing is read back.
    """
    check_context(ring, token_betas, key_means, beta_means)
    kernel, kv_heads, dim = ring.shape[1:]
    if lengths.numel() == 0 or key_means.numel() == 0:
        return
    with on_device(ring):
        append_windows_kernel[(lengths.numel(), kv_heads)](
            ring,
            token_betas,
            key_means,
            beta_means,
            lengths,
            lanes,
            token_betas[0, 0].numel(),
            beta_means.shape[2],
            KV_HEADS=kv_heads,
            DIM=dim,
            DIM_PAD=padded(dim),
            STRIDE=stride,
            **window_shape(kernel),
            num_warps=num_warps,
        )


def _aot_specs() -> list[AotSpec]:
    specs = []
    for keys, means, dim, lanes in (
        ("bf16", "fp32", 128, "*i64"),
        ("fp16", "fp16", 80, "*i32"),
        ("fp32", "fp32", 64, None),
    ):
        constants: dict[str, Any] = {"KV_HEADS": 2, "DIM": dim, "DIM_PAD": padded(dim), "STRIDE": 16} | window_shape(32)
        types = {"ring": f"*{keys}", "token_betas": "*fp32", "key_means": f"*{means}", "beta_means": "*fp32"}
        types |= {"lengths": "*i64", "lanes": lanes or "constexpr", "n_tokens": "i32", "n_windows": "i32"}
        types |= dict.fromkeys(constants, "constexpr")
        constants |= {} if lanes else {"lanes": None}
        specs.append(AotSpec(f"append_windows-{keys}", append_windows_kernel, types, constants))
    return specs


AOT_SPECS = _aot_specs()
