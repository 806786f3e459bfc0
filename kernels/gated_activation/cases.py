"""Cases of silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.gated_activation import reference


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``scale``: standard deviation of gates and ups."""
    return Case(name, dtype, {"rows": 3, "inner": 512, "scale": 2} | params, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    return [
        *(_case(f"inner-{n}", both, inner=n) for n in (1, 7, 511, 512, 513, 1536)),
        _case("fp32-1025", both, "float32", inner=1025),
        _case("fp16-96", both, "float16", inner=96),
        _case("far-gates", both, "float32", scale=100),  # exp(-gate) leaves fp32's range
        _case("no-rows", both, rows=0),
        _case("fp16-13696", "check", "float16", inner=13696, rows=33),
        _case("fp32-16384", "check", "float32", inner=16384, rows=5),
        # Row 65,536 of 2 x 16,384 elements starts at element 2^31.
        _case("past-2^31-elements", "check", inner=16384, rows=65_540),
        *(_case(f"r{rows}-m16384", "check bench", inner=16384, rows=rows) for rows in (1, 16, 64)),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    p = case.params
    gate_up = torch.empty((p["rows"], 2 * p["inner"]), dtype=case.torch_dtype, device=device)
    return {"gate_up": gate_up.normal_(0.0, p["scale"], generator=generator)}


def fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.gated_activation.triton import silu_mul

    return {"out": silu_mul(inputs["gate_up"])}


def reference_product(inputs: dict[str, Any]) -> Tensors:
    """In float32, some rows at a time, which bounds the copy."""
    parts = inputs["gate_up"].split(4096)
    return {"out": torch.cat([reference.silu_mul(part.float()) for part in parts])}


def compare(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    """The worst stretch of rows counts, so that one wrong row among many is not averaged away."""
    pairs = zip(out["out"].split(64), expected["out"].split(64), strict=True)
    return {"out": (max(relative_error(*pair) for pair in pairs), RELATIVE_TOLERANCE[case.torch_dtype])}


def bytes_moved(case: Case, inputs: dict[str, Any]) -> int:
    return 3 * inputs["gate_up"].numel() * inputs["gate_up"].element_size() // 2


def flops(case: Case, inputs: dict[str, Any]) -> int:
    return 5 * inputs["gate_up"].numel() // 2


def torch_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch's activation and product, two launches."""
    gate, up = inputs["gate_up"].chunk(2, dim=-1)
    return functional.silu(gate) * up


OPERATION = Operation(
    name="gated_activation",
    cases=cases,
    make_inputs=make_inputs,
    fast=fast,
    reference=reference_product,
    compare=compare,
    bytes_moved=bytes_moved,
    flops=flops,
    baselines={"torch": torch_baseline},
)
