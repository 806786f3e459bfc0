"""Cases of stage-1 scoring."""

from __future__ import annotations

from typing import Any

import torch

from nosa_sys.kernels.case import Case, Operation, Tensors, relative_error
from nosa_sys.kernels.stage1_scores import reference

# Products are exact and sums fp32 whatever the types, so short types get no looser limit than their rounding in q.
_LIMIT = {"float32": 1e-5, "bfloat16": 1e-4, "float16": 1e-4}


def _case(name: str, uses: str, dtype: str = "bfloat16", **params: int) -> Case:
    filled = {"batch": 2, "kv_heads": 2, "group": 4, "head_dim": 64, "windows": 40, "fp32_means": 1, **params}
    return Case(name, dtype, filled, frozenset(uses.split()))


def cases() -> list[Case]:
    both = "check small"
    return [
        _case("fp32-d64-g3", both, "float32", group=3, windows=70),
        _case("fp32-d80-g1", both, "float32", head_dim=80, group=1, kv_heads=1, windows=33),
        _case("bf16-d96-g16", both, head_dim=96, group=16, kv_heads=1, windows=65),
        _case("bf16-means", both, head_dim=128, kv_heads=3, fp32_means=0),
        _case("fp16-fp32-means", both, "float16", head_dim=128),
        _case("fp16-means", both, "float16", head_dim=80, fp32_means=0),
        _case("one-window", both, windows=1, batch=3),
        _case("fp32-4097", "check", "float32", windows=4097, kv_heads=3, group=3, head_dim=128),
        _case("bf16-fp32-means-1023", "check", windows=1023, batch=5, kv_heads=2, group=16, head_dim=128),
        _case("bf16-means-8191", "check", windows=8191, batch=3, kv_heads=8, group=4, head_dim=128, fp32_means=0),
        _case("fp16-fp32-means-1023", "check", "float16", windows=1023, batch=5, kv_heads=1, group=32, head_dim=96),
        # 2 x 8 x 1,050,000 x 128 = 2.15e9 elements: past 2^31.
        _case(
            "past-2^31-elements",
            "check",
            windows=1_050_000,
            batch=2,
            kv_heads=8,
            group=1,
            head_dim=128,
            fp32_means=0,
        ),
        _case("16K-b64-fp32-means", "bench", windows=1023, batch=64, group=16, head_dim=128),
        _case("16K-b64-bf16-means", "bench", windows=1023, batch=64, group=16, head_dim=128, fp32_means=0),
        _case("128K-b16-fp32-means", "bench", windows=8191, batch=16, group=16, head_dim=128),
        _case("128K-b16-bf16-means", "bench", windows=8191, batch=16, group=16, head_dim=128, fp32_means=0),
    ]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Rows of different lengths (all full in a benchmark); means past a row's windows are NaN."""
    p = case.params
    means_dtype = torch.float32 if p["fp32_means"] else case.torch_dtype

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    q = 2 * draw(p["batch"], p["kv_heads"] * p["group"], p["head_dim"])
    shape = (p["batch"], p["kv_heads"], p["windows"], p["head_dim"])
    key_means = torch.empty(shape, dtype=means_dtype, device=device)
    for sequence in range(p["batch"]):  # one at a time: the largest case would need 4 times its size at once
        key_means[sequence] = draw(*shape[1:]).to(means_dtype)
    n_windows = torch.full((p["batch"],), p["windows"], dtype=torch.int32, device=device)
    if "bench" not in case.uses:
        for sequence in range(1, p["batch"]):
            n = 0 if sequence == 2 else p["windows"] * (p["batch"] - sequence) // p["batch"]
            n_windows[sequence] = n
            key_means[sequence, :, n:] = float("nan")
    return {"q": q.to(case.torch_dtype), "key_means": key_means, "n_windows": n_windows}


def fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.stage1_scores import triton

    return {"scores": triton.stage1_scores(inputs["q"], inputs["key_means"], inputs["n_windows"])}


def reference_scores(inputs: dict[str, Any]) -> Tensors:
    parts = [
        reference.stage1_scores(
            inputs["q"][i : i + 1].float(), inputs["key_means"][i : i + 1], inputs["n_windows"][i : i + 1]
        )
        for i in range(len(inputs["q"]))
    ]
    return {"scores": torch.cat(parts)}


def compare(case: Case, inputs: dict[str, Any], out: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    return {"scores": (relative_error(out["scores"], expected["scores"]), _LIMIT[case.dtype])}


def bytes_moved(case: Case, inputs: dict[str, Any]) -> int:
    """Means of existing windows and the queries in, scores out."""
    means, q = inputs["key_means"], inputs["q"]
    row_bytes = means.shape[1] * (means.shape[3] * means.element_size() + 4)
    return int(inputs["n_windows"].sum()) * row_bytes + q.numel() * q.element_size()


def flops(case: Case, inputs: dict[str, Any]) -> int:
    return 2 * int(inputs["n_windows"].sum()) * inputs["q"].shape[1] * inputs["q"].shape[2]


OPERATION = Operation(
    name="stage1_scores",
    cases=cases,
    make_inputs=make_inputs,
    fast=fast,
    reference=reference_scores,
    compare=compare,
    bytes_moved=bytes_moved,
    flops=flops,
    baselines={
        "torch": lambda inputs: reference.stage1_scores(inputs["q"], inputs["key_means"], inputs["n_windows"]),
    },
)
