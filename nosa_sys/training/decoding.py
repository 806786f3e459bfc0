"""Decoding for evaluation: prompts through the engine, with what moved, and measures of what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to go on, and how to draw them."""

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Decoded:
    """New tokens of each request, and what warm steps moved: misses a KV head and step, bytes a sequence and step."""

    tokens: list[list[int]]
    misses_per_head_step: float | None
    h2d_bytes_per_step: float | None
    d2h_bytes_per_step: float | None


def decode(
    model: LlamaModel,
    requests: Sequence[Request],
    sparse: SparseConfig,
    *,
    method: str,
    slots: int | None,
    max_batch: int,
    eos_ids: Sequence[int] = (),
    on_tokens: Callable[[int], None] | None = None,
) -> Decoded:
    """Decode all requests, ``max_batch`` at a time; ``on_tokens`` hears of every step's tokens."""
    rule = get_method(method)
    # every schedule gives the same tokens: on a GPU one is captured, not all tried
    schedule = "fused_kv" if model.device.type == "cuda" and not rule.dense else None
    engine = Engine(
        model,
        sparse,
        method=method,
        slots=None if rule.dense else slots,
        schedule=schedule,
        max_batch=min(max_batch, len(requests)),
    )
    ids = [engine.add(r.prompt, r.max_new_tokens, r.sampling, eos_ids) for r in requests]
    while not engine.idle:
        events = engine.step()
        if on_tokens is not None:
            on_tokens(len(events))
    figures = engine.summary()
    n_rows = int(figures["new_tokens"])  # type: ignore[call-overload]
    n_warm = n_rows - len(requests)
    heads = model.n_layers * model.shape.n_kv_heads
    warm_loads = int(figures["blocks_loaded_warm"])  # type: ignore[call-overload]
    return Decoded(
        [engine.outputs[i] for i in ids],
        warm_loads / n_warm / heads if n_warm else None,
        warm_loads * engine.memory.block_bytes / n_warm if n_warm else None,
        int(figures["d2h_bytes"]) / n_rows if n_rows else None,  # type: ignore[call-overload]
    )


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens agree from the start."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def distinct_share(tokens: Sequence[int], n: int = 4) -> float | None:
    """Share of different n-grams among all: 1 for text that never repeats itself; None for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
