"""Cases of the compressed-key append: rows that complete a window beside rows that do not, padding, odd heads."""

from __future__ import annotations

from typing import Any

import torch

from nosa_sys.kernels.case import Case, Operation, Tensors, relative_error
from nosa_sys.kernels.compressed_keys import append_reference

_OUTPUTS = ("key_means", "beta_means")
# Lengths around the edges: below a window, exactly one, between, exactly two, then later ones.
_LENGTHS = (1, 31, 32, 33, 47, 48, 64, 100, 112, 128)


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``means``: 0 stores key means in fp32, 1 in the keys' type; ``lanes`` 1 permutes rows and pads one."""
    defaults = {"batch": 10, "kv_heads": 2, "head_dim": 64, "kernel": 32, "stride": 16, "windows": 10}
    defaults |= {"means": 0, "lanes": 0, "all_complete": 0}
    return Case(name, dtype, {**defaults, **params}, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    return [
        _case("edges", both),
        _case("edges-fp32", both, "float32", head_dim=80, kv_heads=3),
        _case("edges-fp16-means", both, "float16", head_dim=96, kv_heads=1, means=1),
        _case("lanes-and-padding", both, lanes=1, head_dim=128),
        _case("kernel-24", both, kernel=24, stride=12, windows=12),
        _case("room-runs-out", both, windows=3),
        _case("b130", "check", batch=130, kv_heads=8, head_dim=128, windows=16, lanes=1),
        _case("b64-none-complete", "bench", batch=64, head_dim=128, windows=1024),
        _case("b64-all-complete", "bench", batch=64, head_dim=128, windows=1024, all_complete=1),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Full rings, betas of every token so far (NaN beyond), poisoned means."""
    p, dtype = case.params, case.torch_dtype
    batch, heads, dim = p["batch"], p["kv_heads"], p["head_dim"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    if "bench" in case.uses:
        lengths = torch.full((batch,), 4096 + (0 if p["all_complete"] else 5), device=device)
    else:
        lengths = torch.tensor([_LENGTHS[i % len(_LENGTHS)] for i in range(batch)], device=device)
    n_tokens = int(lengths.max()) + 3
    betas = normal(batch, heads, n_tokens)
    inputs: dict[str, Any] = {
        "ring": normal(batch, p["kernel"], heads, dim).to(dtype),
        "token_betas": betas,
        "key_means": torch.full(
            (batch, heads, p["windows"], dim), torch.nan, dtype=dtype if p["means"] else torch.float32, device=device
        ),
        "beta_means": torch.full((batch, heads, p["windows"]), torch.nan, device=device),
        "lengths": lengths,
        "stride": p["stride"],
        "lanes": None,
    }
    lanes = (
        torch.randperm(batch, generator=generator, device=device) if p["lanes"] else torch.arange(batch, device=device)
    )
    for row, lane in enumerate(lanes.tolist()):
        betas[lane, :, int(lengths[row]) :] = torch.nan
        written = torch.arange(p["kernel"], device=device) < int(lengths[row])
        inputs["ring"][lane, ~written] = torch.nan
    if p["lanes"]:
        lanes[3] = -1
        inputs["lanes"] = lanes
    return inputs


def _with(inputs: dict[str, Any], function: Any) -> Tensors:
    outputs = {name: inputs[name].clone() for name in _OUTPUTS}
    function(
        inputs["ring"],
        inputs["token_betas"],
        outputs["key_means"],
        outputs["beta_means"],
        inputs["lengths"],
        inputs["stride"],
        lanes=inputs["lanes"],
    )
    return outputs


def _fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.compressed_keys.triton import append_windows

    return _with(inputs, append_windows)


def _launch(inputs: dict[str, Any]) -> None:
    from nosa_sys.kernels.compressed_keys.triton import append_windows

    means = (inputs["key_means"], inputs["beta_means"])
    append_windows(
        inputs["ring"], inputs["token_betas"], *means, inputs["lengths"], inputs["stride"], lanes=inputs["lanes"]
    )


def compare(case: Case, inputs: dict[str, Any], fast: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    """Error norms where a window was due; elsewhere the poison has to be untouched."""
    errors = {}
    for name in _OUTPUTS:
        written = ~expected[name].isnan()
        limit = 1e-2 if case.params["means"] and name == "key_means" else 1e-5
        errors[name] = (relative_error(fast[name][written], expected[name][written]), limit)
        errors[f"{name}_stray"] = (float((~fast[name][~written].isnan()).sum()), 0.0)
    return errors


def _complete(case: Case, inputs: dict[str, Any]) -> int:
    lengths, p = inputs["lengths"], case.params
    return int(((lengths >= p["kernel"]) & ((lengths - p["kernel"]) % p["stride"] == 0)).sum()) * p["kv_heads"]


def _bytes(case: Case, inputs: dict[str, Any]) -> int:
    p = case.params
    return _complete(case, inputs) * (
        p["kernel"] * (p["head_dim"] * inputs["ring"].element_size() + 4) + p["head_dim"] * 4
    )


def _flops(case: Case, inputs: dict[str, Any]) -> int:
    return _complete(case, inputs) * case.params["kernel"] * (case.params["head_dim"] + 1)


OPERATION = Operation(
    name="compressed_keys",
    cases=cases,
    make_inputs=make_inputs,
    fast=_fast,
    reference=lambda inputs: _with(inputs, append_reference.append_windows),
    compare=compare,
    bytes_moved=_bytes,
    flops=_flops,
    launch=_launch,
)
