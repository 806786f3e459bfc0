"""Gradients of training: a whole model's by finite differences in float64, and each form of attention against another.

The sets are discrete, and nothing flows through them (paper section 3): what is held against finite differences is the
gradient of the loss with the sets as they are, under steps far too small to change them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nosa_sys.experiments.training_cases import SPARSE, tiny, tokens
from nosa_sys.kernels.launch import interpreting
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import attend, membership, select
from nosa_sys.training.model import TrainableModel
from nosa_sys.training.recipe import ATTENTION_NAMES

N_TOKENS = 150  # blocks of 16: everything is selected up to position 79, 5 of 6 to 10 blocks from there on
N_DIRECTIONS = 2
_LEAVES = ("q", "k", "v", "beta")
_STEP = 1e-4
# method, head, trained
MODELS = (
    ("nosa", "ed_dma", "all"),
    ("nosa", "ed_dma", "head"),
    ("nosa", "ed_dma", "low_rank"),
    ("nosa", "dma", "all"),
    ("dma", "ed_dma", "all"),
    ("infllmv2", "none", "low_rank"),
    ("full", "none", "all"),
)


def trainable(
    method: str, head: str, trained: str, *, dtype: str = "float64", attention: str = "sdpa"
) -> TrainableModel:
    """The tiny model; low-rank factors are drawn, so that both have gradients."""
    model = TrainableModel(tiny(dtype, head), SPARSE, method=method, trained=trained, rank=2, attention=attention)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.factors.values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=rng, dtype=torch.float64))
    return model


# ---- finite differences
def difference_rows(method: str, head: str, trained: str) -> Iterator[dict[str, Any]]:
    """For every tensor that learns, parts of a fused one apart: the largest relative error of its slope along random
    directions, against a difference of fourth order of the loss."""
    model, ids = trainable(method, head, trained), tokens(N_TOKENS)
    model.loss(ids).backward()  # type: ignore[no-untyped-call]
    rng = torch.Generator().manual_seed(1)
    for name, tensor in model.parameters.items():
        for part, rows in _parts(name, tensor, model.base.shape):
            errors = [_slope_error(model, ids, tensor, rows, rng) for _ in range(N_DIRECTIONS)]
            yield {
                **{"part": "difference", "method": method, "head": head, "trained": trained},
                **{"tensor": part, "dtype": "float64", "relative_error": max(errors, key=_badness)},
            }


def _badness(error: float) -> float:
    """NaN is the worst error of all."""
    return error if error == error else float("inf")


def _parts(name: str, tensor: Tensor, shape: ModelShape) -> Iterator[tuple[str, slice]]:
    """A fused matrix by its rows: (name, rows); anything else whole."""
    product = name.removesuffix(".b").rsplit(".", 1)[-1]
    kv = shape.n_kv_heads * shape.head_dim
    sizes = {
        "qkv": {"q": shape.n_q_heads * shape.head_dim, "k": kv, "v": kv},
        "gate_up": {"gate": shape.intermediate_size, "up": shape.intermediate_size},
    }.get(product, {})
    if sum(sizes.values()) != tensor.shape[0]:
        yield name, slice(None)
        return
    first = 0
    for part, size in sizes.items():
        yield f"{name} ({part})", slice(first, first + size)
        first += size


def _slope_error(model: TrainableModel, ids: Tensor, tensor: Tensor, rows: slice, rng: torch.Generator) -> float:
    """Relative error of the slope along one random direction of norm 1 within ``rows``."""
    direction = torch.zeros_like(tensor)
    direction[rows] = torch.randn(direction[rows].shape, generator=rng, dtype=direction.dtype)
    direction /= direction.norm()
    slope = 0.0 if tensor.grad is None else float((tensor.grad * direction).sum())
    start = tensor.detach().clone()

    def loss(step: float) -> float:
        with torch.no_grad():
            tensor.copy_(start + step * direction)
            return float(model.loss(ids))

    near, far = loss(_STEP) - loss(-_STEP), loss(2 * _STEP) - loss(-2 * _STEP)
    with torch.no_grad():
        tensor.copy_(start)
    difference = (8 * near - far) / (12 * _STEP)
    return abs(slope - difference) / abs(difference)


def sharing(method: str, head: str) -> dict[str, Any]:
    """How many queries select a block, over both layers' heads: the fewest and the median of blocks that the window has
    left, and how many queries are sparse."""
    from nosa_sys.engine.prefill import prefill_logits

    found = prefill_logits(tiny("float64", head), tokens(N_TOKENS).tolist(), SPARSE, method=method)
    member = torch.stack([membership(ids, SPARSE.n_blocks(N_TOKENS)) for ids in found.block_ids])
    queries = member.sum(2)[..., : -1 - SPARSE.local_blocks].flatten()
    return {
        **{"part": "sharing", "method": method, "head": head, "n_queries": N_TOKENS},
        "n_sparse_queries": N_TOKENS - SPARSE.topk_tokens,
        "fewest_queries_of_a_block": int(queries.min()),
        "median_queries_of_a_block": int(queries.median()),
    }


# ---- forms of attention
@dataclass(frozen=True)
class FormCase:
    """Sizes of one attention; ``mean`` of the betas, None for no bias."""

    name: str
    n_tokens: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    sparse: SparseConfig
    method: str
    mean: float | None = 0.0


_TINY = SparseConfig(16, 16, 8, topk=4, init_blocks=1, window_size=16, select_blocks=1)
_WIDE = SparseConfig(64, 32, 16, topk=3, init_blocks=0, window_size=64, select_blocks=2)
_UNEVEN = SparseConfig(48, 16, 8, topk=3, init_blocks=0, window_size=48, select_blocks=2)
_LONG = SparseConfig(topk=6, init_blocks=1, window_size=64, select_blocks=2)
FORM_CASES = (
    FormCase("nosa", 100, 3, 1, 16, _TINY, "nosa"),
    FormCase("two-kv-heads", 81, 4, 2, 8, _TINY, "nosa"),
    FormCase("infllmv2", 96, 2, 1, 16, _TINY, "infllmv2", None),
    FormCase("dma", 75, 2, 1, 24, _TINY, "dma"),
    FormCase("blocks-of-64", 210, 2, 1, 16, _WIDE, "nosa"),
    FormCase("blocks-of-48", 170, 2, 1, 16, _UNEVEN, "nosa"),
    FormCase("dense-biased", 75, 4, 2, 16, _TINY, "full"),
    FormCase("short", 5, 2, 1, 16, _TINY, "nosa"),
    FormCase("large-betas", 70, 2, 1, 8, _TINY, "nosa", 100.0),  # exp of them overflows fp32
    FormCase("dense-large-betas", 38, 2, 1, 8, _TINY, "full", 100.0),
)
# 64 channels: compiled kernels serve no smaller heads
GPU_CASES = tuple(FormCase(method, 1024, 6, 2, 64, _LONG, method) for method in ("nosa", "infllmv2", "dma", "full"))


def form_row(form: str, case: FormCase, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Output and gradients of one form against ``sdpa`` in float64 on the CPU: error norms over norms, by name.

    ``gradients`` False: torch has no backward pass of FlexAttention on a CPU, and the output alone is compared."""
    rng = torch.Generator().manual_seed(len(case.name) + case.n_tokens)
    size, kv_size = (case.n_tokens, case.n_q_heads, case.head_dim), (case.n_tokens, case.n_kv_heads, case.head_dim)
    whole = [torch.randn(shape, generator=rng) for shape in (size, kv_size, kv_size)]
    whole.append((case.mean or 0) + 2 * torch.randn(kv_size[:2], generator=rng))
    selected = select(whole[0], whole[1], whole[3], case.sparse, get_method(case.method))
    weights = torch.randn(size, generator=rng)
    learns = form != "flex" or device.type != "cpu"
    results = []
    for way, kind, where in (("sdpa", torch.float64, torch.device("cpu")), (form, dtype, device)):
        leaves = [x.to(where, kind, copy=True).requires_grad_(learns) for x in whole]
        ids = None if selected is None else selected.block_ids.to(where)
        q, k, v, beta = leaves
        out = attend(way, q, k, v, beta if case.mean is not None else None, ids, case.sparse.block_size)
        found = {"output": out.detach()}
        if learns:
            (out * weights.to(out)).sum().backward()
            found |= {name: x.grad for name, x in zip(_LEAVES, leaves, strict=True) if x.grad is not None}
        results.append({name: x.cpu().double() for name, x in found.items()})
    right, got = results
    return {
        **{"part": "form", "form": form, "case": case.name, "method": case.method, "device": device.type},
        **{"dtype": str(dtype).removeprefix("torch."), "gradients": learns},
        "errors": {name: float((got[name] - x).norm() / x.norm()) for name, x in right.items()},
    }


def form_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Every form that ``device`` runs; Triton's kernels on a CPU in its interpreter."""
    on_gpu = device.type == "cuda"
    for form in ATTENTION_NAMES:
        if form == "triton" and not (on_gpu or interpreting()):
            continue
        for case in GPU_CASES if on_gpu else FORM_CASES:
            if form != "flex" or case.sparse != _UNEVEN:  # its tiles of 128 tokens hold no blocks of 48
                yield form_row(form, case, device)


def model_form_row(attention: str, method: str, head: str) -> dict[str, Any]:
    """Gradients of the whole model in float32 under one form on the CPU, against ``sdpa`` in float64."""
    ids, grads = tokens(N_TOKENS), list[dict[str, Tensor]]()
    for way, dtype in (("sdpa", "float64"), (attention, "float32")):
        model = trainable(method, head, "all", dtype=dtype, attention=way)
        model.loss(ids).backward()
        grads.append({name: x.grad.double() for name, x in model.parameters.items() if x.grad is not None})
    right, got = grads
    errors = {name: float((got[name] - x).norm() / x.norm()) for name, x in right.items()}
    worst = max(errors, key=lambda name: _badness(errors[name]))
    return {
        **{"part": "model form", "form": attention, "method": method, "head": head, "dtype": "float32"},
        **{"n_tensors": len(errors), "worst": worst, "relative_error": errors[worst]},
    }
