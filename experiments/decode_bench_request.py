"""One ``nosa bench decode``: from a request to a document of rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

from nosa_sys.engine.injection import Injection, Misses, synthetic_injection, trace_injection
from nosa_sys.engine.setup import resolve_runner, resolve_slots
from nosa_sys.errors import ConfigError
from nosa_sys.experiments.decode_bench import facts, measure
from nosa_sys.experiments.decode_bench_rates import Rates
from nosa_sys.experiments.decode_bench_run import DecodeCell, Segment, Workbench, distinct_prompts, n_table_steps
from nosa_sys.experiments.peers import PeerCache, peer_row, transformers_model
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import check_device, load_model
from nosa_sys.models.random import random_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.outputs import partial_path
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class BenchRequest:
    """Everything one bench depends on. One of ``model`` and ``model_shape``; at most one of misses, trace, prompts.
    ``runner`` None: graph on a GPU, the same launches without a graph on a CPU."""

    sparse: SparseConfig
    model: str | None
    model_shape: str | None
    method: str
    schedule: str
    slots: int | None
    policy: str | None
    batch: int
    context: int
    steps: int
    warmup: int
    misses: Misses | None
    trace: Path | None
    prompts: tuple[str, ...]
    peer: str | None
    offload: bool | None
    runner: str | None
    dtype: str | None
    device: str | None
    arena_bytes: int
    parts: bool
    seed: int
    key_means_dtype: str = "float32"


def bench_slots(
    slots: int | None,
    sparse: SparseConfig,
    method: str,
    *,
    offload: bool | None,
    runner: str | None,
    device: str | None,
) -> int | None:
    """The slots that the engine will have, None where nothing is offloaded. ConfigError for a device, method or runner
    that is not there and for slots without offloading, CapacityError for fewer than k."""
    device = device or _default_device()
    check_device(device)
    kind = torch.device(device).type
    name = resolve_runner(runner, kind) if runner or kind == "cuda" else "kernels"
    offloads = not get_method(method).dense and offload is not False
    found = resolve_slots(slots, sparse, offload=offloads, runner=name)
    return found if offloads else None


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_request(request: BenchRequest) -> dict[str, Any]:
    """Measure, and the peer after it: {status, facts, rows}. NosaError for what the user can mend."""
    device = request.device or _default_device()
    get_method(request.method).check(request.sparse)
    model, tokenizer = _model(request, device)
    cell = _cell(request, model, tokenizer)
    bench = Workbench(model, Rates.measure(model.device), make_arena(request.arena_bytes))
    rows = measure(bench, cell, [Segment("", request.warmup, request.steps)], parts=request.parts)
    document = {"kind": "bench decode", "facts": facts(model), "rates": vars(bench.rates), "rows": rows}
    shape, context = model.shape, int(np.mean(cell.row_contexts))
    if request.peer:
        del bench, model, cell  # the peer needs the device's memory
        cache = cast(PeerCache, request.peer)
        peer = transformers_model(shape, device, request.seed)
        rows.append(peer_row(peer, shape, batch=request.batch, context=context, cache=cache, seed=request.seed))
    return document


def make_arena(n_bytes: int) -> Any:
    """Pinned host memory for all engines of a process; None for none."""
    if not n_bytes:
        return None
    from nosa_sys.engine.pinned import PinnedArena

    return PinnedArena(n_bytes)


def _model(request: BenchRequest, device: str) -> tuple[LlamaModel, Tokenizer | None]:
    if request.model is not None:
        dtype = request.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        loaded = load_model(request.model, dtype=dtype, device=device)
        return loaded.model, loaded.tokenizer
    assert request.model_shape is not None
    shape = ModelShape.resolve(request.model_shape)
    return random_model(shape, request.seed, request.dtype, device=device), None


def _cell(request: BenchRequest, model: LlamaModel, tokenizer: Tokenizer | None) -> DecodeCell:
    shape, n_steps = model.shape, n_table_steps([Segment("", request.warmup, request.steps)])
    injection: Injection | None = None
    prompts: tuple[tuple[int, ...], ...] = ()
    contexts: list[int] = []
    if get_method(request.method).dense and not request.prompts:
        contexts = [request.context] * request.batch  # nothing is selected, so nothing is injected
    elif request.trace is not None:
        injection = trace_injection(
            request.trace, shape.n_layers, shape.n_kv_heads, request.batch, n_steps, request.seed, model.device
        )
    elif request.misses is not None:
        contexts = [request.context] * request.batch
        injection = synthetic_injection(
            request.sparse, request.method, shape.n_layers, shape.n_kv_heads, contexts, n_steps, request.misses,
            request.seed, model.device,
        )  # fmt: skip
    elif request.prompts:
        if tokenizer is None:
            raise ConfigError("--prompt-file needs a tokenizer, so give --model instead of --model-shape")
        tokens = [token for text in request.prompts for token in tokenizer.encode(text)]
        prompts = distinct_prompts(tokens, request.batch, request.context)
    else:
        rng = np.random.default_rng(request.seed)
        drawn = rng.integers(0, shape.vocab_size, (request.batch, request.context))
        prompts = tuple(tuple(row) for row in drawn.tolist())
    return DecodeCell(
        sparse=request.sparse,
        method=request.method,
        schedule=request.schedule,
        slots=request.slots,
        policy=request.policy,
        offload=request.offload,
        runner=request.runner or (None if model.device.type == "cuda" else "kernels"),
        injection=injection,
        prompts=prompts,
        contexts=tuple(contexts),
        seed=request.seed,
        key_means_dtype=request.key_means_dtype,
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as Parquet, whole or not at all."""
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(rows)).to_parquet(partial, compression="zstd", index=False)
    os.replace(partial, path)
