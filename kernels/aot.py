"""Ahead-of-time compilation of the Triton kernels for sm_90: needs no GPU, catches what the interpreter lets through.

Each operation's triton module lists its kernels as ``AOT_SPECS``; the tests compile every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARED_MEMORY_LIMIT_BYTES = 227 * 1024


@dataclass(frozen=True)
class AotSpec:
    """One kernel at one type and shape. ``signature`` names every argument: a pointer ("*bf16"), a scalar ("i32") or
    "constexpr"; ``constexprs`` holds the values of the last kind (None for an absent pointer)."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2


def compile_for_sm90(spec: AotSpec) -> Any:
    """Compile with every pointer 16-byte aligned, as torch allocates them; returns Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = spec.kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(arguments) if spec.signature[name][0] == "*"}
    source = ASTSource(spec.kernel, dict(spec.signature), dict(spec.constexprs), aligned)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
