"""Eviction head, rotary embedding and append of one decode token a row, in one launch a layer (grid: row x KV head).

``append_token`` reads the fused projection once and leaves the roped q and k, the beta, the key in the ring, the
windows that the token completes and, where the slot is known already, K, V and beta in the current block. A block
that is born at the step gets its slot later, from the step's slot plan, which then writes the token. ``eviction_beta``
scores the values of many tokens (prefill).

Floor: one launch and two dependent round trips, about 3 us, for decode; prefill reads tokens * kv_head * head_dim
values. Knobs worth scanning: num_warps (2, 4, 8); ``tokens`` a program in prefill (4, 8, 16).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.compressed_keys.triton import beta_window_mean, check_context, ring_window_mean, window_shape
from nosa_sys.kernels.eviction_head.append_reference import CurrentBlocks, HeadShape, TokenContext
from nosa_sys.kernels.eviction_head.reference import MAX_EXPONENT
from nosa_sys.kernels.launch import on_device
from nosa_sys.methods import HEADS
from nosa_sys.work_splits import padded

_HEAD_CODES = {"none": 0, "ed_dma": 1, "dma": 2}
_MAX_EXPONENT: tl.constexpr = tl.constexpr(MAX_EXPONENT)


@triton.jit
def _head_score(logit, scale, HEAD: tl.constexpr):
    """scale * softplus(logit) (1), its exponential (2), or 0.

    softplus(x) = max(x, 0) + log(1 + e^-|x|): nothing overflows; the logarithm is 2 atanh(e / (2 + e)) by its series,
    which keeps full relative precision where e is tiny.
    """
    if HEAD == 0:
        return tl.zeros_like(logit)
    e = tl.exp(-tl.abs(logit))
    z = e / (2.0 + e)
    y = z * z
    series = 1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * (1.0 / 7 + y * (1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13))))))
    beta = scale * (tl.maximum(logit, 0.0) + 2.0 * z * series)
    if HEAD == 2:
        # The softmax exponentiates once more: an infinite bias would make it NaN. A NaN stays one, and is reported.
        beta = tl.exp(tl.minimum(beta, _MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL))
    return beta


@triton.jit
def eviction_beta_kernel(
    v,
    A,
    delta,
    beta,
    n_tokens,
    v_pitch,
    KV_HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Betas of TOKENS tokens for one KV head."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    logit = tl.zeros([TOKENS], tl.float32)
    for first in range(0, VALUES, PART):
        value = first + tl.arange(0, PART)
        weight = tl.load(delta + head * VALUES + value, mask=value < VALUES, other=0.0).to(tl.float32)
        inside = (token < n_tokens)[:, None] & (value < VALUES)[None, :]
        x = tl.load(v + (token * v_pitch)[:, None] + value[None, :], mask=inside, other=0.0).to(tl.float32)
        logit += tl.sum(x * weight[None, :], axis=1)
    score = _head_score(logit, tl.load(A + head).to(tl.float32), HEAD)
    tl.store(beta + token * KV_HEADS + head, score, mask=token < n_tokens)


@triton.jit
def write_token(
    slots, slot_betas, slot_row, offset, channel, inside, BLOCK: tl.constexpr, DIM: tl.constexpr, k, v, beta
):
    """K, V [channel] and beta of one token into row ``offset`` of a block."""
    target = slots + (slot_row * 2 * BLOCK + offset) * DIM + channel
    tl.store(target, k, mask=inside)
    tl.store(target + BLOCK * DIM, v, mask=inside)
    if slot_betas is not None:
        tl.store(slot_betas + slot_row * BLOCK + offset, beta)


@triton.jit
def append_token_kernel(
    qkv,
    A,
    delta,
    cos,
    sin,
    positions,
    lanes,
    current_rows,
    q_out,
    k_out,
    beta_out,
    ring,
    token_betas,
    key_means,
    beta_means,
    slots,
    slot_betas,
    qkv_pitch,
    n_tokens,
    n_windows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PART: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One (row, KV head): see ``append_reference.append_token``."""
    HALF: tl.constexpr = DIM // 2
    VALUES: tl.constexpr = KV_HEADS * DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = row
    if lanes is not None:
        lane = tl.load(lanes + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    source = qkv + row * qkv_pitch
    keys = source + KV_HEADS * GROUP * DIM + head * DIM
    values = source + KV_HEADS * (GROUP + 1) * DIM

    logit = tl.zeros([PART], tl.float32)
    if HEAD != 0:
        for first in range(0, VALUES, PART):
            value = first + tl.arange(0, PART)
            weight = tl.load(delta + head * VALUES + value, mask=value < VALUES, other=0.0).to(tl.float32)
            logit += tl.load(values + value, mask=value < VALUES, other=0.0).to(tl.float32) * weight
    beta = _head_score(tl.sum(logit, axis=0), tl.load(A + head).to(tl.float32), HEAD)
    tl.store(beta_out + row * KV_HEADS + head, beta)

    channel = tl.arange(0, HALF_PAD)
    inside = channel < HALF
    c = tl.load(cos + row * HALF + channel, mask=inside, other=0.0)
    s = tl.load(sin + row * HALF + channel, mask=inside, other=0.0)
    member = tl.arange(0, GROUP_PAD)
    q_at = (head * GROUP + member)[:, None] * DIM + channel[None, :]
    q_inside = (member < GROUP)[:, None] & inside[None, :]
    q1 = tl.load(source + q_at, mask=q_inside, other=0.0).to(tl.float32)
    q2 = tl.load(source + q_at + HALF, mask=q_inside, other=0.0).to(tl.float32)
    q_out += row * KV_HEADS * GROUP * DIM
    tl.store(q_out + q_at, q1 * c[None, :] - q2 * s[None, :], mask=q_inside)
    tl.store(q_out + q_at + HALF, q2 * c[None, :] + q1 * s[None, :], mask=q_inside)

    x1 = tl.load(keys + channel, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(keys + channel + HALF, mask=inside, other=0.0).to(tl.float32)
    # Rounded to the stored type at once: windows are means of stored keys.
    k1 = (x1 * c - x2 * s).to(k_out.dtype.element_ty)
    k2 = (x2 * c + x1 * s).to(k_out.dtype.element_ty)
    k_out += (row * KV_HEADS + head) * DIM + channel
    tl.store(k_out, k1, mask=inside)
    tl.store(k_out + HALF, k2, mask=inside)

    if current_rows is not None:
        slot_row = tl.load(current_rows + row * KV_HEADS + head)
        if slot_row >= 0:
            own = values + head * DIM + channel
            v1 = tl.load(own, mask=inside, other=0.0)
            v2 = tl.load(own + HALF, mask=inside, other=0.0)
            write_token(slots, None, slot_row, position % BLOCK, channel, inside, BLOCK, DIM, k1, v1, beta)
            write_token(slots, slot_betas, slot_row, position % BLOCK, channel + HALF, inside, BLOCK, DIM, k2, v2, beta)

    if (lane >= 0) & (position < n_tokens):
        lane_head = lane * KV_HEADS + head
        betas = token_betas + lane_head * n_tokens
        tl.store(betas + position, beta)
        keys_of_head = ring + (lane * KERNEL * KV_HEADS + head) * DIM
        newest = keys_of_head + (position % KERNEL) * KV_HEADS * DIM + channel
        tl.store(newest, k1, mask=inside)
        tl.store(newest + HALF, k2, mask=inside)
        length = position + 1
        window = (length - KERNEL) // STRIDE
        if (length >= KERNEL) & ((length - KERNEL) % STRIDE == 0) & (window < n_windows):
            pitch: tl.constexpr = KV_HEADS * DIM
            to = key_means + (lane_head * n_windows + window) * DIM + channel
            mean = ring_window_mean(keys_of_head, k1, length, channel, inside, pitch, KERNEL, ROWS, LEVELS, HALF_PAD)
            tl.store(to, mean, mask=inside)
            mean = ring_window_mean(
                keys_of_head + HALF, k2, length, channel, inside, pitch, KERNEL, ROWS, LEVELS, HALF_PAD
            )
            tl.store(to + HALF, mean, mask=inside)
            beta_mean = beta_window_mean(betas, beta, length, KERNEL, ROWS, LEVELS)
            tl.store(beta_means + lane_head * n_windows + window + tl.arange(0, 1), beta_mean)


def eviction_beta(
    v: Tensor, A: Tensor, delta: Tensor, head: str = "ed_dma", *, tokens: int = 8, num_warps: int = 4
) -> Tensor:
    """As ``reference.eviction_beta``, without gradients; rows of v [tokens, kv_head * head_dim] may be strided."""
    if head not in HEADS:
        raise ConfigError(f"unknown eviction head {head!r}; known: {', '.join(HEADS)}")
    n_tokens, n_values = v.shape
    beta = torch.empty((n_tokens, A.shape[0]), dtype=torch.float32, device=v.device)
    if v.stride(1) != 1:
        raise ConfigError(f"v has strides {v.stride()}; the values of a token must be contiguous")
    if n_tokens == 0:
        return beta
    with on_device(v):
        eviction_beta_kernel[(-(-n_tokens // tokens), A.shape[0])](
            v,
            A,
            delta.contiguous(),
            beta,
            n_tokens,
            v.stride(0),
            KV_HEADS=A.shape[0],
            VALUES=n_values,
            PART=min(512, padded(n_values)),
            TOKENS=tokens,
            HEAD=_HEAD_CODES[head],
            num_warps=num_warps,
        )
    return beta


def append_token(
    qkv: Tensor,
    A: Tensor,
    delta: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    context: TokenContext,
    shape: HeadShape,
    *,
    lanes: Tensor | None = None,
    current: CurrentBlocks | None = None,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``append_reference.append_token``, one launch, capturable; v comes back as a view of ``qkv``."""
    batch, heads, dim = qkv.shape[0], shape.n_kv_heads, shape.head_dim
    width = (shape.n_q_heads + 2 * heads) * dim
    if qkv.shape[1] != width or qkv.stride(1) != 1 or dim % 2 or shape.n_q_heads % heads:
        raise ConfigError(
            f"projection of {tuple(qkv.shape)}, strides {qkv.stride()}: {shape.n_q_heads} query and 2 x {heads} KV "
            f"heads of an even size ({dim}) need rows of {width}, and query heads a multiple of KV heads"
        )
    if cos.shape != (batch, dim // 2) or not cos.is_contiguous() or not sin.is_contiguous():
        raise ConfigError(f"cos and sin are {tuple(cos.shape)}; give contiguous [{batch}, {dim // 2}]")
    check_context(context.ring, context.token_betas, context.key_means, context.beta_means)
    q = qkv.new_empty((batch, shape.n_q_heads, dim))
    k = qkv.new_empty((batch, heads, dim))
    v = qkv[:, (shape.n_q_heads + heads) * dim :].unflatten(1, (heads, dim))
    beta = torch.empty((batch, heads), dtype=torch.float32, device=qkv.device)
    if batch == 0:
        return q, k, v, beta
    group = shape.n_q_heads // heads
    with on_device(qkv):
        append_token_kernel[(batch, heads)](
            qkv,
            A,
            delta.contiguous(),
            cos,
            sin,
            positions,
            lanes,
            None if current is None else current.rows,
            q,
            k,
            beta,
            context.ring,
            context.token_betas,
            context.key_means,
            context.beta_means,
            None if current is None else current.slots,
            None if current is None else current.slot_betas,
            qkv.stride(0),
            context.token_betas[0, 0].numel(),
            context.beta_means.shape[2],
            KV_HEADS=heads,
            GROUP=group,
            GROUP_PAD=padded(group),
            DIM=dim,
            HALF_PAD=padded(dim // 2),
            PART=min(1024, padded(heads * dim)),
            HEAD=_HEAD_CODES[shape.head],
            BLOCK=1 if current is None else current.slots.shape[2],
            STRIDE=shape.stride,
            **window_shape(context.ring.shape[1]),
            num_warps=num_warps,
        )
    return q, k, v, beta


def _aot_specs() -> list[AotSpec]:
    specs = []
    sizes = ("qkv_pitch", "n_tokens", "n_windows", "v_pitch", "k_pitch", "beta_pitch")
    shapes = (("bf16", "bf16", 2, 16, 128, 1), ("fp16", "fp32", 8, 4, 80, 2), ("fp32", "fp32", 3, 3, 64, 1))
    for dtype, means, heads, group, dim, code in shapes:
        stored = ("qkv", "q_out", "k_out", "ring", "slots", "k", "v")
        types: dict[str, str] = dict.fromkeys(stored, f"*{dtype}") | dict.fromkeys(sizes, "i32")
        types |= dict.fromkeys(("positions", "lanes", "current_rows"), "*i64") | {"key_means": f"*{means}"}
        shape: dict[str, Any] = {"KV_HEADS": heads, "GROUP": group, "GROUP_PAD": padded(group), "DIM": dim}
        shape |= {"HALF_PAD": padded(dim // 2), "DIM_PAD": padded(dim), "VALUES": heads * dim, "TOKENS": 8}
        shape |= {"PART": min(512, padded(heads * dim)), "HEAD": code, "BLOCK": 64, "STRIDE": 16} | window_shape(32)
        for kernel in (append_token_kernel, eviction_beta_kernel):
            names = kernel.arg_names
            constants = {name: value for name, value in shape.items() if name in names}
            signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in names}
            specs.append(AotSpec(f"{kernel.__name__}-{dtype}", kernel, signature, constants))
    return specs


AOT_SPECS = _aot_specs()
