"""Residual addition and RMSNorm in one pass: a program a row, the row in registers between the two.

Floor: x and y read, sum and norm written, once each: 64 rows of 4,096 in bf16 are 2.1 MB, 0.5 us at 4.2 TB/s, so a
decode step pays the launch and one round trip to memory. Every thread moves 16 bytes at a time where ``hidden``
allows. Knob worth scanning: ``num_warps`` (4, 8, 16).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.launch import on_device
from nosa_sys.work_splits import padded

MAX_HIDDEN = 16_384


@triton.jit
def add_norm_kernel(x, y, weight, total, normed, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """x, y, total, normed [row, HIDDEN]; y None: x is normed as it is and ``total`` is not written."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, WIDTH)
    inside = columns < HIDDEN
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        values += tl.load(y + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    result = values * factor * gain.to(tl.float32)
    tl.store(normed + row + columns, result.to(normed.dtype.element_ty), mask=inside)


def default_warps(hidden: int) -> int:
    """Sixteen elements a thread, in 1 to 16 warps.

    >>> [default_warps(hidden) for hidden in (64, 576, 4096, 16384)]
    [1, 2, 8, 16]
    """
    return min(16, max(1, padded(hidden) // 512))


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """As ``reference.add_norm``, one launch; errors name a hidden size past 16,384 and shapes or types that differ."""
    n_rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ConfigError(f"hidden size {hidden} does not fit one program's registers; at most {MAX_HIDDEN}")
    if weight.shape != (hidden,):
        raise ConfigError(f"weight has shape {tuple(weight.shape)}, rows {hidden} elements; they must agree")
    if y is not None and (y.shape != x.shape or y.dtype != x.dtype):
        raise ConfigError(f"x is {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}; they must be alike")
    rows = x.contiguous()
    normed = torch.empty_like(rows)
    total = x if y is None else torch.empty_like(rows)
    if n_rows:
        with on_device(x):
            add_norm_kernel[(n_rows,)](
                rows,
                None if y is None else y.contiguous(),
                weight.contiguous(),
                None if y is None else total,
                normed,
                eps,
                HIDDEN=hidden,
                WIDTH=padded(hidden),
                num_warps=num_warps or default_warps(hidden),
            )
    return total, normed


def _spec(dtype: str, hidden: int, added: bool) -> AotSpec:
    constants: dict[str, Any] = {"HIDDEN": hidden, "WIDTH": padded(hidden)}
    constants |= {} if added else {"y": None, "total": None}
    signature = dict.fromkeys(("x", "y", "weight", "total", "normed"), f"*{dtype}") | {"eps": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    name = f"{'add-norm' if added else 'norm'}-{dtype}-{hidden}"
    return AotSpec(name, add_norm_kernel, signature, constants, default_warps(hidden))


AOT_SPECS = [
    _spec(dtype, hidden, added)
    for dtype, hidden, added in (
        ("bf16", 4096, True),
        ("bf16", 4096, False),
        ("bf16", 576, True),
        ("bf16", 16384, True),
        ("fp16", 5120, True),
        ("fp32", 2048, True),
        ("fp32", 16384, True),
    )
]
