"""``nosa bench decode``: tokens/s of the engine in one situation, with the step's parts, bytes and peers beside it."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.budgets import resolve_budgets
from nosa_sys.cli.memory_rows import MemoryNeed, note_memory
from nosa_sys.cli.options import BudgetFlags, CacheFlags, JsonFlag, Overwrite, grouped
from nosa_sys.cli.requests import read_prompt
from nosa_sys.cli.settings import Settings
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.outputs import check_output, write_whole
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import TraceMeta

if TYPE_CHECKING:
    from nosa_sys.experiments.decode_bench_request import BenchRequest

_DEFAULT_CONTEXT = 16384
PEERS = ("none", "transformers-dynamic", "transformers-offloaded")
_SHOWN = (
    ("tokens/s, aggregate", "tokens_per_s"),
    ("tokens/s, each sequence", "tokens_per_s_per_sequence"),
    ("step, median ms", "step_ms_median"),
    ("step, p10 / p90 ms", ("step_ms_p10", "step_ms_p90")),
    ("prefill s / time to first token ms", ("prefill_s", "ttft_ms_mean")),
    ("cold step ms", "cold_step_ms"),
    ("select / attention / other ms", ("select_ms", "attention_ms", "other_ms")),
    ("transfer, exposed / hidden ms", ("h2d_exposed_ms", "h2d_hidden_ms")),
    ("misses a head / gamma", ("misses_per_head", "gamma")),
    ("H2D bytes a step", "h2d_bytes_per_step"),
    ("link / HBM utilisation", ("link_utilisation", "hbm_utilisation")),
    ("step over its bytes at the copy rate", "step_over_floor"),
    ("GPU bytes kept a sequence / FullAttn", ("sequence_gpu_bytes", "sequence_full_kv_bytes")),
    ("equivalent batch / paper's rule", ("equivalent_batch", "equivalent_batch_paper_rule")),
    ("device KV / context bytes, allocated", ("device_slot_bytes", "device_context_bytes")),
    ("host pool bytes, allocated / pinned", ("host_pool_bytes", "host_pinned_bytes")),
    ("GPU bytes, planned / peak", ("planned_gpu_bytes", "gpu_peak_bytes")),
    ("host bytes, planned", "planned_host_bytes"),
)


def _misses(text: str) -> float | dict[int, float]:
    """A mean ("4", "0.5") or a distribution of counts ("0:0.5,8:0.5")."""
    try:
        if ":" in text:
            return {int(count): float(weight) for count, weight in (part.split(":") for part in text.split(","))}
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--misses {text!r} must be a mean such as 4, or counts with weights such as 0:0.5,8:0.5"
        ) from None


@grouped
def command(
    budgets: BudgetFlags,
    cache: CacheFlags,
    model: Annotated[str | None, typer.Option("--model", help="smollm2-135m or a directory: real weights.")] = None,
    model_shape: Annotated[
        str | None, typer.Option("--model-shape", help="Preset or config.json: random weights of that shape.")
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help="serial, fused_kv, split_merge, two_batch, prefetch or auto.")
    ] = "fused_kv",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 8,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Prompt tokens of each sequence; default 16384, or the trace's."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps.")] = 256,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Warm steps before them.")] = 16,
    misses: Annotated[
        str | None, typer.Option("--misses", help="Inject synthetic sets: misses a head and step, or counts:weights.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Inject the sets of a trace.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", help="Text cut into distinct prompts; repeatable.")
    ] = None,
    peer: Annotated[str, typer.Option("--peer", help=f"Also run: {', '.join(PEERS)}.")] = "none",
    offload: Annotated[
        bool | None, typer.Option("--offload/--resident", help="KV on the host, or all of it on the device.")
    ] = None,
    runner: Annotated[str | None, typer.Option("--runner", help="graph, kernels or eager.")] = None,
    key_means_dtype: Annotated[
        str | None, typer.Option("--key-means-dtype", help="Compressed keys: float32 (default) or model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Default: the model's own; bfloat16 for a shape.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Default: cuda where there is one.")] = None,
    arena_gib: Annotated[
        float, typer.Option("--arena-gib", min=0, max=2**20, help="Pin this much host memory once.")
    ] = 0.0,
    parts: Annotated[bool, typer.Option("--parts/--no-parts", help="Further runs that split the step.")] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")] = 0,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the rows as .json or .parquet.")] = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Decode throughput: distinct prompts or injected sets, warm-up and prefill apart, the step's parts, peers.

    Example: [bold]nosa bench decode --model-shape nosa-8b --batch 64 --context 16384 --misses 4 --schedule two_batch
    [/bold]
    """
    if sum(x is not None for x in (misses, trace, prompt_file)) > 1:
        raise ConfigError("--misses, --trace and --prompt-file are three sources of selections; give at most one")
    if context is not None and trace is not None:
        raise ConfigError("--trace fixes the contexts, of which its sets were recorded; leave --context out")
    if (model is None) == (model_shape is None):
        raise ConfigError("give --model (real weights) or --model-shape (random weights), one of them")
    if peer not in PEERS:
        raise ConfigError(f"--peer {peer!r} must be one of {', '.join(PEERS)}")
    if out_file:
        if out_file.suffix not in (".json", ".parquet"):
            raise ConfigError(f"--out {out_file} must end in .json or .parquet")
        check_output(out_file, overwrite=overwrite)
    settings = Settings()
    base, origin = SparseConfig(), "default"
    if trace is not None:
        from nosa_sys.traces.reader import Trace

        base, origin = Trace.open(trace).meta.sparse, "trace"
    sparse = resolve_budgets(budgets, settings, base, origin)
    if trace is not None and sparse != base:
        raise ConfigError("--trace fixes the budgets, whose sets it holds; leave budget options out")
    from nosa_sys.experiments.decode_bench_request import BenchRequest, bench_slots, run_request

    method = cache.method or "nosa"
    given = None if cache.slots is None else slots_of(cache.slots, sparse.topk)
    request = BenchRequest(
        sparse=sparse,
        model=model,
        model_shape=model_shape,
        method=method,
        schedule=schedule,
        slots=bench_slots(given, sparse, method, offload=offload, runner=runner, device=device),
        policy=cache.policy,
        batch=batch,
        context=_DEFAULT_CONTEXT if context is None else context,
        steps=steps,
        warmup=warmup,
        misses=None if misses is None else _misses(misses),
        trace=trace,
        prompts=tuple(read_prompt(path) for path in prompt_file or ()),
        peer=None if peer == "none" else peer.removeprefix("transformers-"),
        offload=offload,
        runner=runner,
        dtype=dtype,
        device=device,
        arena_bytes=int(arena_gib * 2**30),
        parts=parts,
        seed=seed,
        key_means_dtype=settings.pick("key_means_dtype", key_means_dtype, "float32"),
    )
    _refuse_unless_fits(_memory(settings, request), request)
    settings.banner(out.stderr(), "bench decode")
    document = run_request(request)
    console = out.human(json)
    for row in document["rows"]:
        console.print(_table(row))
    if out_file:
        _write(out_file, document, overwrite=overwrite)
    if json:
        out.print_json(document)


def _memory(settings: Settings, request: BenchRequest) -> MemoryNeed:
    """Bytes at the end of the run, noted; of a trace's sets for its longest sequence."""
    import torch

    from nosa_sys.experiments.decode_bench_run import Segment, n_table_steps

    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = ModelShape.resolve(str(request.model or request.model_shape))
    default = shape.dtype if request.model is None else "bfloat16" if device.startswith("cuda") else "float32"
    tokens = request.context + n_table_steps([Segment("", request.warmup, request.steps)])
    if request.trace is not None:
        sequences = TraceMeta.load(request.trace).sequences
        tokens = max((s.prompt_tokens + s.new_tokens for s in sequences), default=tokens)
    return note_memory(
        settings,
        dataclasses.replace(shape, dtype=request.dtype or default),
        request.sparse,
        request.method,
        n_slots=request.slots or request.sparse.topk,
        offload=request.offload,
        batch=request.batch,
        tokens=tokens,
        device=device,
        key_means_dtype=request.key_means_dtype,
    )


def _refuse_unless_fits(need: MemoryNeed, request: BenchRequest) -> None:
    """CapacityError where memory is short; it names a GPU first that is missing and that nobody chose to do without."""
    try:
        need.refuse_unless_fits()
    except CapacityError as error:
        if request.device is not None or need.device != "cpu":
            raise
        raise CapacityError(
            f"this benchmark needs an NVIDIA GPU, and torch sees none here; on the CPU {error}"
        ) from None


def _table(row: dict[str, Any]) -> Any:
    """One row for people; what was not measured is left out."""
    lines = [("status", str(row["status"]))]
    if row.get("skipped"):
        lines.append(("skipped", row["skipped"]))
    for name, keys in _SHOWN:
        values = [row.get(key) for key in ((keys,) if isinstance(keys, str) else keys)]
        if any(value is not None for value in values):
            lines.append((name, " / ".join(out.number(value) for value in values)))
    title = " ".join(str(row[key]) for key in ("what", "model_shape", "method", "schedule") if row.get(key))
    return out.facts(f"{title}, batch {row['batch']} x {row['context']} tokens", lines)


def _write(path: Path, document: dict[str, Any], *, overwrite: bool) -> None:
    if path.suffix == ".parquet":
        from nosa_sys.experiments.decode_bench_request import write_rows

        write_rows(path, document["rows"])
        return
    write_whole(path, json_module.dumps(out.plain(document), indent=1) + "\n", overwrite=overwrite)
