"""One case list an operation serves tests, GPU checks and benchmarks (kernels/<op>/cases.py builds an Operation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

# Relative error ||out - ref|| / ||ref|| that a kernel may show against its fp32 reference.
RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One input situation. ``uses`` says who runs it: ``check`` (GPU correctness), ``small`` (also fit for the
    CPU interpreter and compute-sanitizer), ``bench`` (timed)."""

    name: str
    dtype: str
    params: Mapping[str, int]
    uses: frozenset[str]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Operation:
    """A kernel, its definition and its cases.

    ``make_inputs(case, device, generator)`` draws fresh random inputs, outputs poisoned (NaN or 777).
    ``fast(inputs)`` and ``reference(inputs)`` return named outputs; neither changes what the other reads.
    ``compare(case, inputs, fast_out, reference_out)`` returns named error norms or mismatch counts, each with its
    limit: {"out": (error, limit)}; anything above its limit fails. ``bytes_moved(case, inputs)`` and
    ``flops(case, inputs)`` count from the case. ``launch(inputs)`` is what a benchmark replays (default: fast).
    """

    name: str
    cases: Callable[[], list[Case]]
    make_inputs: Callable[[Case, torch.device, torch.Generator], dict[str, Any]]
    fast: Callable[[dict[str, Any]], Tensors]
    reference: Callable[[dict[str, Any]], Tensors]
    compare: Callable[[Case, dict[str, Any], Tensors, Tensors], dict[str, tuple[float, float]]]
    bytes_moved: Callable[[Case, dict[str, Any]], int]
    flops: Callable[[Case, dict[str, Any]], int]
    launch: Callable[[dict[str, Any]], Any] | None = None
    baselines: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in fp64; NaN anywhere gives infinity, so that it never passes."""
    out64, reference64 = out.double(), reference.double()
    error = torch.linalg.vector_norm(out64 - reference64) / torch.linalg.vector_norm(reference64).clamp_min(1e-30)
    value = float(error)
    return value if value == value else float("inf")
