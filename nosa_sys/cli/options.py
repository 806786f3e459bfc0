"""Options shared by the verbs, so that one name means one thing everywhere.

Groups are dataclasses whose fields are the options; ``grouped`` spreads them over a command's signature.
Every option defaults to None: what was not given never hides a value from a file.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line of stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Resolve and print every setting, then stop.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that is already there.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of option names (with underscores) and values; flags win over it."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of everything random.")]


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_BUDGET = "Budgets (blocks or tokens)"
_CACHE = "Method and slot cache"
_ENGINE = "Engine"
_MODEL = "Model"
_DECODE = "Decoding"


@dataclass(frozen=True)
class BudgetFlags:
    """Sparse budgets, each in blocks or in tokens but not both."""

    block_size: Annotated[int | None, _option("--block-size", panel=_BUDGET, text="Tokens per KV block.")] = None
    topk: Annotated[
        int | None,
        _option("--topk", panel=_BUDGET, text="k: blocks attended, forced included; window and select stay."),
    ] = None
    topk_tokens: Annotated[int | None, _option("--topk-tokens", panel=_BUDGET, text="k in tokens.")] = None
    init_blocks: Annotated[int | None, _option("--init-blocks", panel=_BUDGET, text="Sink blocks.")] = None
    init_tokens: Annotated[int | None, _option("--init-tokens", panel=_BUDGET, text="Sinks in tokens.")] = None
    window_size: Annotated[
        int | None, _option("--window-size", "--window-tokens", panel=_BUDGET, text="Sliding window in tokens.")
    ] = None
    window_blocks: Annotated[int | None, _option("--window-blocks", panel=_BUDGET, text="Window in blocks.")] = None
    select_blocks: Annotated[int | None, _option("--select-blocks", panel=_BUDGET, text="k_q: query-aware.")] = None
    select_tokens: Annotated[int | None, _option("--select-tokens", panel=_BUDGET, text="k_q in tokens.")] = None
    k_e: Annotated[
        int | None, _option("--k-e", panel=_BUDGET, text="k_e: guaranteed blocks; sets select = k - k_e.")
    ] = None
    kernel_stride: Annotated[
        int | None, _option("--kernel-stride", panel=_BUDGET, text="Stride of the pooling windows in tokens.")
    ] = None


@dataclass(frozen=True)
class CacheFlags:
    """Method and device slot cache."""

    method: Annotated[str | None, _option("--method", panel=_CACHE, text="nosa, infllmv2, dma or full.")] = None
    slots: Annotated[
        str | None,
        _option("--slots", panel=_CACHE, text="Device block slots per head, >= k (default); 1.5x for 1.5 k."),
    ] = None
    policy: Annotated[
        str | None, _option("--policy", panel=_CACHE, text="exact (slots = k), lru, beta; belady in replay.")
    ] = None


@dataclass(frozen=True)
class EngineFlags:
    """How the engine runs its steps."""

    schedule: Annotated[
        str | None,
        _option(
            "--schedule",
            panel=_ENGINE,
            text="Order of copies and compute: serial, fused_kv, split_merge, two_batch, prefetch, or auto, which "
            "tries some and keeps the fastest. Default: serial with runner eager, else auto.",
        ),
    ] = None
    runner: Annotated[
        str | None,
        _option(
            "--runner",
            panel=_ENGINE,
            text="graph (CUDA graphs; default on a GPU), kernels (the same launches without a graph) or eager "
            "(operations one by one; default on a CPU).",
        ),
    ] = None
    offload: Annotated[
        bool | None,
        _option("--offload/--no-offload", panel=_ENGINE, text="KV in host memory, or all of it on the device."),
    ] = None
    n_prefetch: Annotated[
        int | None,
        _option(
            "--n-prefetch", panel=_ENGINE, text="Guesses a head of schedule prefetch (default: all slots > k).", min=1
        ),
    ] = None
    key_means_dtype: Annotated[
        str | None,
        _option(
            "--key-means-dtype",
            panel=_ENGINE,
            text="Compressed keys: float32 (default), or model: half the bytes with bfloat16; near ties may differ.",
        ),
    ] = None


@dataclass(frozen=True)
class ModelFlags:
    """Which model, how it is held, and on what."""

    model: Annotated[
        str | None, _option("--model", panel=_MODEL, text="smollm2-135m, or a directory with config.json.")
    ] = None
    head: Annotated[str | None, _option("--head", panel=_MODEL, text="Eviction head: ed_dma, dma or none.")] = None
    dtype: Annotated[str | None, _option("--dtype", panel=_MODEL, text="float32, bfloat16, float16, float64.")] = None
    adapter: Annotated[
        Path | None, _option("--adapter", panel=_MODEL, text="Safetensors with A and delta, or a low-rank change too.")
    ] = None
    rope_theta: Annotated[
        float | None,
        _option("--rope-theta", panel=_MODEL, text="Rotary base in place of the adapter's or model's."),
    ] = None
    convert_dense: Annotated[
        bool | None,
        _option("--convert-dense/--no-convert-dense", panel=_MODEL, text="Give a dense Llama a fresh eviction head."),
    ] = None
    device: Annotated[str | None, _option("--device", panel=_MODEL, text="cpu or cuda.")] = None
    threads: Annotated[int | None, _option("--threads", panel=_MODEL, text="CPU threads of torch.", min=1)] = None


@dataclass(frozen=True)
class DecodeFlags:
    """Prompts, length and sampling."""

    prompt_file: Annotated[
        list[Path] | None, _option("--prompt-file", panel=_DECODE, text="UTF-8 text; repeat it for a batch.")
    ] = None
    max_prompt_tokens: Annotated[
        int | None, _option("--max-prompt-tokens", panel=_DECODE, text="Cut each prompt to its first tokens.", min=1)
    ] = None
    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", panel=_DECODE, text="Tokens to decode per sequence.", min=1)
    ] = None
    temperature: Annotated[float | None, _option("--temperature", panel=_DECODE, text="0 is greedy.")] = None
    top_p: Annotated[float | None, _option("--top-p", panel=_DECODE, text="Nucleus mass in (0, 1].")] = None
    ignore_eos: Annotated[
        bool | None, _option("--ignore-eos/--stop-at-eos", panel=_DECODE, text="Decode on past the end token.")
    ] = None


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose dataclass parameters appear as one option per field, and arrive filled in."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        field_hints = typing.get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):  # type: ignore[arg-type]
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field_hints[field.name],
                )
            )

    def command(**given: Any) -> Any:
        for name, kind in groups.items():
            fields = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
            given[name] = kind(**{field: given.pop(field) for field in fields})  # type: ignore[operator]
        return function(**given)

    # not functools.wraps: typing would follow __wrapped__ back to the ungrouped annotations
    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def field_names(*groups: type) -> list[str]:
    """Option names of the groups, as a --config file may use them."""
    return [field.name for group in groups for field in dataclasses.fields(group)]
