"""Cases of the eviction head: betas of many tokens (prefill), and the append of one token a row (decode)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.case import RELATIVE_TOLERANCE, Case, Operation, Tensors, relative_error
from nosa_sys.kernels.eviction_head import append_reference, reference
from nosa_sys.kernels.eviction_head.append_reference import CurrentBlocks, HeadShape, TokenContext

_HEADS = ("ed_dma", "dma", "none")
# Logits at which a naive softplus overflows or loses everything, and the usual ones between.
_LOGITS = (-100.0, -12.0, -1.0, 0.0, 1.0, 12.0, 89.0, 1000.0)
_POSITIONS = (0, 30, 31, 32, 46, 47, 63, 64, 127, 128)


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    """``head`` indexes ed_dma, dma, none; ``extreme`` puts logits from -100 to 1000 in,
    ``broken`` a NaN into the values of token 1 and the A of head 1."""
    defaults = {"tokens": 6, "kv_heads": 2, "group": 4, "head_dim": 64, "head": 0, "extreme": 0, "broken": 0}
    return Case(name, dtype, {**defaults, **params}, frozenset(uses.split()))


def beta_cases() -> list[Case]:
    both = "check small"
    return [
        _case("ed-dma", both),
        _case("one-token", both, tokens=1, kv_heads=1, head_dim=128),
        _case("dma", both, "float16", head=1, kv_heads=3, group=3),
        _case("none", both, head=2),
        _case("extreme-fp32", both, "float32", extreme=1, tokens=8),
        _case("extreme-bf16", both, extreme=1, tokens=8),
        _case("extreme-dma", both, "float32", extreme=1, tokens=8, head=1),
        _case("nan", both, broken=1),
        _case("nan-dma", both, head=1, broken=1),
        _case("head-dim-80", both, "float32", head_dim=80, kv_heads=3, tokens=9),
        _case("8-heads-513-tokens", "check", tokens=513, kv_heads=8, head_dim=128),
        _case("8-heads-512", "bench", tokens=512, kv_heads=8, head_dim=128),
        _case("2-heads-512", "bench", tokens=512, kv_heads=2, group=16, head_dim=128),
        _case("2-heads-8192", "bench", tokens=8192, kv_heads=2, group=16, head_dim=128),
    ]


def append_cases() -> list[Case]:
    both = "check small"
    sizes = {"batch": 10, "lanes": 0, "placed": 0, "block": 32, "windows": 8, "means": 0}
    made = [
        _case("edges", both, "bfloat16", **sizes),
        _case("edges-fp32-3-heads", both, "float32", **sizes, kv_heads=3, group=3),
        _case("placed-head-80", both, "float32", **{**sizes, "placed": 1}, head_dim=80),
        _case("placed-lanes-padding", both, "float16", **{**sizes, "placed": 1, "lanes": 1}, head_dim=96),
        _case("dma", both, "bfloat16", **sizes, head=1),
        _case("bf16-means", both, "bfloat16", **{**sizes, "placed": 1, "lanes": 1, "means": 1}),
        _case("no-head", both, "bfloat16", **{**sizes, "placed": 1}, head=2),
        _case("group-1-heads-4", both, "bfloat16", **sizes, kv_heads=4, group=1),
    ]
    for kv_heads, group, batch in ((2, 16, 64), (8, 4, 64), (2, 16, 16)):
        shape = {"kv_heads": kv_heads, "group": group, "head_dim": 128, "block": 64, "windows": 1030, "placed": 1}
        uses = "check bench" if batch == 64 else "bench"
        made.append(
            _case(f"b{batch}-{kv_heads}-heads", uses, "bfloat16", **{**sizes, **shape, "batch": batch, "lanes": 1})
        )
    return made


def _head(case: Case) -> str:
    return _HEADS[case.params["head"]]


def make_beta_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Values as the last columns of a fused projection; delta scaled so that logits are of order one."""
    p = case.params
    n_values = p["kv_heads"] * p["head_dim"]
    width = n_values * (p["group"] + 2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    qkv = normal(p["tokens"], width).to(case.torch_dtype)
    delta = normal(p["kv_heads"], n_values) / n_values**0.5
    if p["extreme"]:
        # One value carries the whole logit: exact in every type.
        qkv[:, -n_values:] = 0
        qkv[:, -n_values] = torch.tensor(_LOGITS, device=device)[: p["tokens"]].to(qkv.dtype)
        delta[:, 0] = 1.0
    A = normal(p["kv_heads"]) if _head(case) != "dma" else normal(p["kv_heads"]) * 0.3
    if p["broken"]:
        qkv[1, -1], A[1] = torch.nan, torch.nan
    return {"qkv": qkv, "v": qkv[:, -n_values:], "A": A, "delta": delta, "head": _head(case)}


def _fast_beta(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.eviction_head.triton import eviction_beta

    return {"beta": eviction_beta(inputs["v"], inputs["A"], inputs["delta"], inputs["head"])}


def _reference_beta(inputs: dict[str, Any]) -> Tensors:
    return {"beta": reference.eviction_beta(inputs["v"], inputs["A"], inputs["delta"], inputs["head"])}


def compare_beta(
    case: Case, inputs: dict[str, Any], fast: Tensors, expected: Tensors
) -> dict[str, tuple[float, float]]:
    """Norm over all, and the worst entry: selection ranks by these, small ones too. An exponential head multiplies the
    error of its exponent, up to 80. NaN stands where the reference has it, and there alone."""
    a, b = fast["beta"].double(), expected["beta"].double()
    different = (a.isnan() != b.isnan()).sum()
    a, b = (torch.where(b.isnan(), 0.0, x) for x in (a, b))
    scale = 20.0 if case.params["head"] == 1 else 1.0
    worst = ((a - b).abs() / b.abs().clamp_min(1e-6)).max()
    limits = {"beta": (relative_error(a, b), 1e-5 * scale), "worst": (float(worst), 1e-4 * scale)}
    return limits | {"nan": (float(different), 0.0)}


def make_append_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Contexts in the middle of their life: rings and betas of the earlier tokens, poison everywhere else. ``means``: 0
    keeps key means in fp32, 1 in the keys' type."""
    p, dtype, kernel = case.params, case.torch_dtype, 32
    batch, heads, dim, block = p["batch"], p["kv_heads"], p["head_dim"], p["block"]
    inputs = make_beta_inputs(Case(case.name, case.dtype, {**p, "tokens": batch}, case.uses), device, generator)
    base = p["windows"] * 16 - 160 if p["windows"] > 100 else 0
    positions = torch.tensor([base + _POSITIONS[i % len(_POSITIONS)] for i in range(batch)], device=device)
    angles = positions[:, None].float() / 1e4 ** (torch.arange(dim // 2, device=device) / (dim // 2))
    lanes = torch.arange(batch, device=device)
    if p["lanes"]:
        lanes = torch.randperm(batch, generator=generator, device=device)
    n_tokens = -(-(int(positions.max()) + 1) // block) * block
    ring = torch.randn((batch, kernel, heads, dim), generator=generator, device=device).to(dtype)
    betas = torch.randn((batch, heads, n_tokens), generator=generator, device=device)
    for lane, position in zip(lanes.tolist(), positions.tolist(), strict=True):
        ring[lane, position % kernel] = torch.nan
        ring[lane, position:] = torch.nan
        betas[lane, :, position:] = torch.nan
    rows = torch.randperm(2 * batch * heads, generator=generator, device=device)[: batch * heads].view(batch, heads)
    if p["lanes"]:
        lanes[2], rows[2] = -1, -1
    return inputs | {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": positions,
        "lanes": lanes if p["lanes"] else None,
        "ring": ring,
        "token_betas": betas,
        "key_means": torch.full(
            (batch, heads, p["windows"], dim), torch.nan, dtype=dtype if p["means"] else torch.float32, device=device
        ),
        "beta_means": torch.full((batch, heads, p["windows"]), torch.nan, device=device),
        "slots": torch.full((2 * batch * heads, 2, block, dim), torch.nan, dtype=dtype, device=device),
        "slot_betas": torch.full((2 * batch * heads, block), torch.nan, device=device),
        "rows": rows if p["placed"] else None,
        "shape": HeadShape(heads * p["group"], heads, dim, inputs["head"], 16),
    }


_STATE = ("ring", "token_betas", "key_means", "beta_means", "slots", "slot_betas")


def _append_with(inputs: dict[str, Any], state: dict[str, Tensor], function: Any) -> Tensors:
    current = None
    if inputs["rows"] is not None:
        current = CurrentBlocks(state["slots"], state["slot_betas"], inputs["rows"])
    q, k, v, beta = function(
        inputs["qkv"],
        inputs["A"],
        inputs["delta"],
        inputs["cos"],
        inputs["sin"],
        inputs["positions"],
        TokenContext(*(state[name] for name in _STATE[:4])),
        inputs["shape"],
        lanes=inputs["lanes"],
        current=current,
    )
    return {"q": q, "k": k, "v": v, "beta": beta}


def _fast_append(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.eviction_head.triton import append_token

    state = {name: inputs[name].clone() for name in _STATE}
    return _append_with(inputs, state, append_token) | state


def _reference_append(inputs: dict[str, Any]) -> Tensors:
    state = {name: inputs[name].clone() for name in _STATE}
    return _append_with(inputs, state, append_reference.append_token) | state


def _launch_append(inputs: dict[str, Any]) -> None:
    from nosa_sys.kernels.eviction_head.triton import append_token

    _append_with(inputs, {name: inputs[name] for name in _STATE}, append_token)


def compare_append(
    case: Case, inputs: dict[str, Any], fast: Tensors, expected: Tensors
) -> dict[str, tuple[float, float]]:
    """Error norms over what the reference wrote; what it left poisoned must still be."""
    errors: dict[str, tuple[float, float]] = {}
    for name, reference_out in expected.items():
        written = ~reference_out.isnan()
        exact = reference_out.dtype == torch.float32 and name not in ("key_means",)
        limit = 1e-5 if exact else RELATIVE_TOLERANCE[case.torch_dtype]
        limit *= 20 if case.params["head"] == 1 and exact else 1
        errors[name] = (relative_error(fast[name][written], reference_out[written]), limit)
        errors[f"{name}_stray"] = (float((~fast[name][~written].isnan()).sum()), 0.0)
    return errors


def _beta_bytes(case: Case, inputs: dict[str, Any]) -> int:
    v, delta = inputs["v"], inputs["delta"]
    return v.numel() * v.element_size() + delta.numel() * 4 + v.shape[0] * delta.shape[0] * 4


def _append_bytes(case: Case, inputs: dict[str, Any]) -> int:
    p, size = case.params, inputs["qkv"].element_size()
    written = p["batch"] * p["kv_heads"] * p["head_dim"] * size * (p["group"] + 2 + 2 * p["placed"])
    return inputs["qkv"].numel() * size + inputs["delta"].numel() * 4 + written


def _flops(case: Case, inputs: dict[str, Any]) -> int:
    return 2 * inputs["qkv"].shape[0] * inputs["delta"].numel()


BETA = Operation(
    name="eviction_head",
    cases=beta_cases,
    make_inputs=make_beta_inputs,
    fast=_fast_beta,
    reference=_reference_beta,
    compare=compare_beta,
    bytes_moved=_beta_bytes,
    flops=_flops,
    baselines={"torch": _reference_beta},
)

APPEND = Operation(
    name="append_token",
    cases=append_cases,
    make_inputs=make_append_inputs,
    fast=_fast_append,
    reference=_reference_append,
    compare=compare_append,
    bytes_moved=_append_bytes,
    flops=_flops,
    launch=_launch_append,
)

OPERATIONS = (BETA, APPEND)
