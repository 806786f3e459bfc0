"""Cases of a step's geometry: padding, block edges, unknown pages, blocks past the table."""

from __future__ import annotations

from typing import Any

import torch

from nosa_sys.kernels.case import Case, Operation, Tensors
from nosa_sys.kernels.step_prepare import reference

_NAMES = ("lanes", "positions", "page_table", "inverse_frequencies", "n_kv_heads", "block_size")
# Two roundings of values up to 1: the angle itself is the same single product.
_ROTARY_LIMIT = 2e-6


def _case(name: str, uses: str, **params: int) -> Case:
    """n_rows rows of n_blocks blocks at most; ``past``: positions reach that many blocks past the table."""
    filled = {"n_rows": 5, "n_blocks": 6, "heads": 2, "block": 64, "head_dim": 128, "past": 0, **params}
    return Case(name, "float32", filled, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    return [
        _case("edges", both),
        _case("one-row", both, n_rows=1, n_blocks=1, heads=1),
        _case("odd", both, heads=3, block=48, head_dim=80, past=1),
        _case("block-16", both, n_rows=9, heads=8, block=16, head_dim=96, past=2),
        _case("batch-64", "check", n_rows=64, n_blocks=2048, heads=8),
        _case("b64-hkv2", "bench", n_rows=64, n_blocks=2048),
        _case("b64-hkv8", "bench", n_rows=64, n_blocks=2048, heads=8),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Positions within two tokens of an edge of blocks; a row in four is padding, a page in eight unknown; the table is
    part of a wider one."""
    p, n = case.params, case.params["n_rows"]

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    lanes = torch.randperm(n, generator=generator, device=device)
    lanes[3::4] = -1
    positions = (draw(p["n_blocks"] + p["past"], n) * p["block"] + draw(5, n) - 2).clamp(min=0)
    if not p["past"]:
        positions = positions.clamp(max=p["n_blocks"] * p["block"] - 1)
    table = draw(2**40, n, p["n_blocks"] + 3)
    table[draw(8, *table.shape) == 0] = -1
    exponents = torch.arange(0, p["head_dim"], 2, device=device) / p["head_dim"]
    return {
        "lanes": lanes,
        "positions": positions,
        "page_table": table[:, : p["n_blocks"]],
        "inverse_frequencies": 1e4**-exponents,
        "n_kv_heads": p["heads"],
        "block_size": p["block"],
    }


def fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.step_prepare.triton import prepare_step

    return prepare_step(*(inputs[name] for name in _NAMES))._asdict()


def reference_prepare(inputs: dict[str, Any]) -> Tensors:
    return reference.prepare_step(*(inputs[name] for name in _NAMES))._asdict()


def compare(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    """Entries that differ; for cosine and sine the largest difference."""
    errors = {}
    for name, want in expected.items():
        if want.is_floating_point():
            errors[name] = (float((out[name] - want).abs().max()), _ROTARY_LIMIT)
        else:
            errors[name] = (float((out[name] != want).sum()) + float(out[name].dtype != want.dtype), 0.0)
    return errors


def bytes_moved(case: Case, inputs: dict[str, Any]) -> int:
    """What is written."""
    p = case.params
    return p["n_rows"] * (8 + p["heads"] * 28 + 4 * p["head_dim"])


OPERATION = Operation(
    name="step_prepare",
    cases=cases,
    make_inputs=make_inputs,
    fast=fast,
    reference=reference_prepare,
    compare=compare,
    bytes_moved=bytes_moved,
    flops=lambda case, inputs: 0,
    baselines={"torch": reference_prepare},
)
