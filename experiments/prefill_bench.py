"""Seconds of one prompt's prefill by method and context, whole and by part, as the engine runs it and as a score does.

    python -m nosa_sys.experiments.prefill_bench --out FILE.json [--contexts 8192,16384] [--random nosa-8b]

SmolLM2-135M with its shipped eviction head, or with --random a shape of random weights, reads a prompt of drawn tokens
(or of --prompt-file). ``stored``: finished blocks go to host memory, or for method full stay on the device, as before
decoding; ``scored``: nothing is stored, as in ``nosa eval``. Each is run once untimed and then --repeats times.

Parts are those of one more run, on a GPU by events around the calls: waiting for the host counts as part of what waits,
so where launches are slower than the work they launch, parts show the launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.engine import prefill
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.setup import default_prefill_chunk
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.decode_bench import facts
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import load_model
from nosa_sys.models.random import random_model
from nosa_sys.outputs import check_output, write_whole
from nosa_sys.sparse_config import SparseConfig

# names in the module of the engine's prefill
_PARTS = {"selection": "queue_selection", "attention": "prefill_attention"}


class PartClock:
    """Seconds spent in some functions of a module while ``watching``; ``seconds`` once all work is done."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {part: [] for part in _PARTS}

    @contextmanager
    def watching(self) -> Iterator[None]:
        plain = {part: getattr(prefill, name) for part, name in _PARTS.items()}
        for part, name in _PARTS.items():
            setattr(prefill, name, self._timed(part, plain[part]))
        try:
            yield
        finally:
            for part, name in _PARTS.items():
                setattr(prefill, name, plain[part])

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self._now()
            result = call(*arguments)
            self._spans[part].append((start, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        return {
            part: sum(start.elapsed_time(end) / 1e3 if self._on_gpu else end - start for start, end in spans)
            for part, spans in self._spans.items()
        }


class _Nothing(prefill.PrefillOutput):
    """Asks for every layer's output and keeps none of it: logits are no part of prefill."""

    def keep_selection(self, layer: int, chunk_first: int, block_ids: torch.Tensor) -> None:
        pass

    def keep_hidden(self, chunk_first: int, x: torch.Tensor) -> None:
        pass

    def finish(self, model: LlamaModel) -> None:
        pass


def stored(model: LlamaModel, tokens: list[int], sparse: SparseConfig, method: str, chunk: int) -> float:
    """Seconds of a prefill into memory made for it before."""
    rule = get_method(method)
    memory = Memory(model, sparse, rule, n_slots=sparse.topk, offload=not rule.dense)
    memory.preallocate(1, len(tokens))
    memory.clear_lane(0, [])
    pages = memory.pool.allocate(memory.pages_for(len(tokens)))
    start = time.perf_counter()  # the run ends by waiting for the device
    prefill.PrefillRunner(model, memory, chunk).run(tokens, 0, pages)
    return time.perf_counter() - start


def scored(model: LlamaModel, tokens: list[int], sparse: SparseConfig, method: str, chunk: int) -> float:
    """Seconds of a prefill that stores nothing, its small memory made within."""
    start = time.perf_counter()
    prefill.prefill_only(model, tokens, sparse, _Nothing(len(tokens)), method=method, chunk=chunk)
    return time.perf_counter() - start


def measure(
    model: LlamaModel, tokens: list[int], sparse: SparseConfig, method: str, chunk: int, repeats: int
) -> dict[str, Any]:
    """One row: medians of ``repeats`` runs, and the parts of one more."""
    row: dict[str, Any] = {"method": method, "context": len(tokens), "chunk": chunk, "status": "measured"}
    for run in (stored, scored):
        name = run.__name__
        row[f"{name}_first_s"] = run(model, tokens, sparse, method, chunk)  # kernels are compiled in it
        times = [run(model, tokens, sparse, method, chunk) for _ in range(repeats)]
        row[f"{name}_s"], row[f"{name}_all_s"] = statistics.median(times), times
    row["stored_tokens_per_s"] = len(tokens) / row["stored_s"]
    clock = PartClock(model.device)
    with clock.watching():
        row["parts_run_s"] = scored(model, tokens, sparse, method, chunk)
    parts = clock.seconds()
    return (
        row
        | {f"{part}_s": value for part, value in parts.items()}
        | {"rest_s": row["parts_run_s"] - sum(parts.values())}
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure all cells; 0, or 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--contexts", default="8192,16384", help="tokens")
    parser.add_argument("--methods", default="full,infllmv2,nosa,dma")
    parser.add_argument("--random", metavar="SHAPE", help="a shape of random weights in place of SmolLM2-135M")
    parser.add_argument("--topk", type=int, help="blocks; default 64, for SmolLM2-135M 32; other budgets go with it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunk", type=int, help="tokens a prefill pass; default the device's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-file", type=Path, help="text for the prompt, with SmolLM2-135M")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        check_output(options.out, overwrite=options.overwrite)
        document = run(options)
    except NosaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_whole(options.out, json.dumps(document, indent=1, allow_nan=False) + "\n", overwrite=options.overwrite)
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The document of all rows, each printed as it comes."""
    given = options.contexts.split(",")
    if not all(context.isdecimal() and int(context) >= 2 for context in given):
        raise ConfigError(f"--contexts {options.contexts} must be numbers of tokens >= 2, comma separated")
    contexts = [int(context) for context in given]
    text: list[int] = []
    if options.random:
        shape = ModelShape.preset(options.random)
        model = random_model(shape, options.seed, options.dtype, device=options.device)
    else:
        loaded = load_model("smollm2-135m", dtype=options.dtype, device=options.device)
        model = loaded.model
        if options.prompt_file:
            text = loaded.tokenizer.encode(options.prompt_file.read_text(encoding="utf-8"))
    if options.prompt_file and len(text) < max(contexts):
        raise ConfigError(f"the prompt has {len(text)} tokens; give a longer --prompt-file, or shorter --contexts")
    drawn = np.random.default_rng(options.seed).integers(0, model.shape.vocab_size, max(contexts)).tolist()
    sparse = SparseConfig().with_topk(options.topk or (64 if options.random else 32))
    chunk = options.chunk or default_prefill_chunk(model.device.type)
    rows = []
    for context in contexts:
        for method in options.methods.split(","):
            row = measure(model, (text or drawn)[:context], sparse, method, chunk, options.repeats)
            rows.append(row)
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    prompt = str(options.prompt_file.name) if options.prompt_file else "drawn tokens"
    return facts(model) | {"sparse": sparse.to_dict(), "prompt": prompt, "seed": options.seed, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
