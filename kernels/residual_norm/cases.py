"""Cases of residual addition with RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.launch import interpreting
from nosa_sys.kernels.residual_norm import reference

_EPS = 1e-5


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``added``: 0 where there is no second summand; ``scale``: standard deviation of the summands."""
    return Case(name, dtype, {"rows": 3, "hidden": 256, "added": 1, "scale": 1} | params, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    return [
        *(_case(f"hidden-{n}", both, hidden=n) for n in (1, 7, 64, 65, 576, 2048)),
        _case("fp32-576", both, "float32", hidden=576),
        _case("fp32-alone", both, "float32", added=0, hidden=96),
        _case("bf16-alone", both, added=0),
        _case("bf16-16384", both, hidden=16384, rows=1),
        _case("fp16-large-values", both, "float16", scale=300),  # squares leave fp16's range
        _case("zero-rows-of-values", both, scale=0),
        _case("no-rows", both, rows=0),
        _case("fp16-5120", "check", "float16", hidden=5120, rows=33),
        _case("fp32-16384", "check", "float32", hidden=16384, rows=130),
        _case("bf16-3072-r1000", "check", hidden=3072, rows=1000),
        *(_case(f"r{rows}-h4096", "check bench", hidden=4096, rows=rows) for rows in (1, 16, 64)),
        _case("r64-h4096-alone", "bench", hidden=4096, rows=64, added=0),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    p = case.params

    def draw(*shape: int) -> Tensor:
        return (p["scale"] * torch.randn(shape, generator=generator, device=device)).to(case.torch_dtype)

    weight = 1 + torch.randn(p["hidden"], generator=generator, device=device)
    x = draw(p["rows"], p["hidden"])
    return {"x": x, "y": draw(*x.shape) if p["added"] else None, "weight": weight.to(case.torch_dtype), "eps": _EPS}


def fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.residual_norm.triton import add_norm

    total, normed = add_norm(**inputs)
    return {"total": total, "normed": normed}


def reference_norm(inputs: dict[str, Any]) -> Tensors:
    """The rounded sum as it is, its norm in float32."""
    total, _ = reference.add_norm(**inputs)
    _, normed = reference.add_norm(total.float(), None, inputs["weight"].float(), inputs["eps"])
    return {"total": total, "normed": normed}


def compare(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    """The sum is exact; only Triton's interpreter, which cuts bf16 off instead of rounding, may be a digit away."""
    total: tuple[float, float] = (float((out["total"] != expected["total"]).sum()), 0.0)
    if interpreting() and case.torch_dtype == torch.bfloat16:
        total = (relative_error(out["total"], expected["total"]), RELATIVE_TOLERANCE[case.torch_dtype])
    normed = relative_error(out["normed"], expected["normed"])
    return {"total": total, "normed": (normed, RELATIVE_TOLERANCE[case.torch_dtype])}


def bytes_moved(case: Case, inputs: dict[str, Any]) -> int:
    x = inputs["x"]
    return ((4 if case.params["added"] else 2) * x.numel() + inputs["weight"].numel()) * x.element_size()


def flops(case: Case, inputs: dict[str, Any]) -> int:
    return (4 + case.params["added"]) * inputs["x"].numel()


def torch_baseline(inputs: dict[str, Any]) -> Tensor:
    """torch's addition and fused norm, two launches."""
    x, y, weight = inputs["x"], inputs["y"], inputs["weight"]
    return functional.rms_norm(x if y is None else x + y, weight.shape, weight, inputs["eps"])


OPERATION = Operation(
    name="residual_norm",
    cases=cases,
    make_inputs=make_inputs,
    fast=fast,
    reference=reference_norm,
    compare=compare,
    bytes_moved=bytes_moved,
    flops=flops,
    baselines={"torch": torch_baseline},
)
