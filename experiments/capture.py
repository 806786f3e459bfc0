"""A capture: load a model, decode prompts with recording on, summarise what moved (loads torch)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.experiments.forced_tokens import TOKENS_FILE, ForcedTokens, forced_facts
from nosa_sys.machine import cpu_name, git_revision, nvidia_link, versions
from nosa_sys.methods import get_method
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import write_text_whole

CAPTURE_FILE = "capture.json"

# (stage, done, total): stages are "load", "prefill" and "decode"; total 0 where it is not known
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CaptureRequest:
    """Everything a capture depends on; ``prompts`` are texts, one sequence each.

    ``force_tokens`` are decoded whatever the model says; bare token ids are one tuple a sequence, or one for all.
    ``rope_theta`` replaces the model's rotary base, for contexts longer than it was made for.
    """

    sparse: SparseConfig
    prompts: tuple[str, ...]
    max_new_tokens: int
    model: str = "smollm2-135m"
    method: str = "nosa"
    slots: int | None = None
    policy: str | None = None
    head: str = "ed_dma"
    dtype: str = "float32"
    device: str = "cpu"
    adapter: str | None = None
    convert_dense: bool = False
    rope_theta: float | None = None
    schedule: str | None = None
    runner: str | None = None
    offload: bool | None = None
    n_prefetch: int | None = None
    key_means_dtype: str = "float32"
    prefill_chunk: int = 512
    timed: bool = False
    record_scores: bool = False
    force_tokens: ForcedTokens | tuple[tuple[int, ...], ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    max_prompt_tokens: int | None = None
    threads: int | None = None

    def engine_options(self) -> dict[str, Any]:
        """What an Engine takes of it."""
        names = ("method", "schedule", "slots", "policy", "runner", "offload", "n_prefetch", "key_means_dtype")
        return {name: getattr(self, name) for name in (*names, "prefill_chunk", "timed")}


def open_model(request: CaptureRequest) -> LoadedModel:
    """Load the request's model and set torch's threads."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    return load_model(
        request.model,
        dtype=request.dtype,
        device=request.device,
        head=request.head,
        adapter=request.adapter,
        convert_dense=request.convert_dense,
        rope_theta=request.rope_theta,
    )


def encode_prompts(request: CaptureRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt, cut to max_prompt_tokens."""
    return [tokenizer.encode(text)[: request.max_prompt_tokens] for text in request.prompts]


def run_capture(
    request: CaptureRequest,
    directory: Path,
    progress: Progress,
    loaded: LoadedModel | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Capture into ``directory`` (made by the caller) and return the summary, also left there as capture.json.

    ``loaded`` saves loading the model again; ``warn`` hears before the work begins what may spoil it. Raises NosaError
    for whatever the user can mend.
    """
    if loaded is None:
        progress("load", 0, 0)
        loaded = open_model(request)
    prompts = encode_prompts(request, loaded.tokenizer)
    trained = loaded.model.config.max_positions
    longest = max(map(len, prompts)) + request.max_new_tokens
    if warn is not None and longest > trained:
        warn(
            f"contexts will reach {longest} tokens and the model was made for {trained}: expect poor text; "
            "--max-prompt-tokens cuts the prompt"
        )
    facts: dict[str, Any] = {
        "device": device_name(request.device),
        "versions": versions(),
        "git_revision": git_revision(),
        "seed": request.sampling.seed,
    }
    forced: list[tuple[int, ...]] = [()] * len(prompts)
    if request.force_tokens is not None:
        given = request.force_tokens
        source = given if isinstance(given, ForcedTokens) else ForcedTokens("tokens", given)
        forced = source.resolve(request.prompts, prompts, request.max_new_tokens, loaded.tokenizer)
        facts["forced_tokens"] = forced_facts(source, forced)
    link = nvidia_link() if request.device.startswith("cuda") else None
    if link is not None:
        facts |= {"driver": link[0], "pcie": link[1]}
    prefilled = 0

    def on_prefill(n_tokens: int) -> None:
        nonlocal prefilled
        prefilled += n_tokens
        progress("prefill", prefilled, total_prefill)

    # the last token of a prompt runs as the first decode step
    total_prefill = sum(len(prompt) - 1 for prompt in prompts)
    on_gpu = request.device.startswith("cuda")
    with Recorder(directory, facts=facts, overwrite=True, background=on_gpu) as recorder:
        engine = Engine(
            loaded.model,
            request.sparse,
            max_batch=len(prompts),
            recorder=recorder,
            record_scores=request.record_scores,
            on_prefill=on_prefill,
            **request.engine_options(),
        )
        eos = () if request.ignore_eos else loaded.tokenizer.eos_ids
        for prompt, tokens in zip(prompts, forced, strict=True):
            engine.add(prompt, request.max_new_tokens, request.sampling, eos, tokens)
        total = request.max_new_tokens * len(prompts)
        progress("prefill", 0, total_prefill)
        done = 0
        while not engine.idle:
            done += len(engine.step())
            progress("decode", done, total)
    document = _document(request, loaded, engine, directory)
    outputs = [engine.outputs[sequence] for sequence in sorted(engine.outputs)]
    document["text"] = [loaded.tokenizer.decode(tokens) for tokens in outputs]
    write_text_whole(directory / TOKENS_FILE, json.dumps(outputs) + "\n")
    write_text_whole(directory / CAPTURE_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def device_name(device: str) -> str:
    """What the run is measured on."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}, {cpu_name()}"


def _document(request: CaptureRequest, loaded: LoadedModel, engine: Engine, directory: Path) -> dict[str, Any]:
    summary = engine.summary()
    rows = Trace.open(directory).selections
    warm = ~rows.cold
    known = np.isfinite(rows.gamma)
    n_blocks = max((request.sparse.n_blocks(int(p) + 1) for p in rows.position[-1:]), default=0)
    gamma, sizes = rows.gamma[known], rows.n_selected[known]
    method = get_method(request.method)
    return {
        "kind": "capture",
        "status": "measured",
        "device": device_name(request.device),
        "command": " ".join(["nosa", *sys.argv[1:]]),
        "model": loaded.shape.name,
        "source": loaded.source,
        "sparse": request.sparse.to_dict(),
        "slots_over_k": None if method.dense else engine.slots / request.sparse.topk,
        "record_scores": request.record_scores,
        "misses_per_head_step": float(rows.n_misses[warm].mean()) if warm.any() else None,
        "gamma_macro": float(gamma.mean()) if len(gamma) else None,
        "gamma_weighted": float(np.average(gamma, weights=sizes)) if len(gamma) else None,
        "gamma_min": float(gamma.min()) if len(gamma) else None,
        "guaranteed_gamma": request.sparse.guaranteed_gamma if method.name == "nosa" else None,
        "context_blocks": n_blocks,
        **summary,
        "notes": [*loaded.notes, *(summary["notes"] if isinstance(summary["notes"], list) else [])],
    }
