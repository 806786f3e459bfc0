"""``nosa simulate``: the step time that a trace would have on given hardware."""

from __future__ import annotations

import json as json_module
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.budgets import resolve_budgets
from nosa_sys.cli.options import (
    BudgetFlags,
    CacheFlags,
    ConfigFile,
    DryRun,
    JsonFlag,
    Overwrite,
    Seed,
    field_names,
    grouped,
)
from nosa_sys.cli.prediction_tables import error_table, fetch_path_document, fetch_path_tables
from nosa_sys.cli.replay import resolve_cache
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.outputs import check_output, whole_directory, whole_file
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import TraceMeta

NAME = "simulate"
_OWN_KEYS = (
    *("hardware", "model_shape", "context", "batch", "steps", "schedule", "prefetch_blocks", "prefetch_hit_share"),
    *("link", "h2d_gbps", "host_kv_dtype", "dequant_gbps", "dequant_fixed_us", "extrapolate", "engine"),
    *("locality", "seed"),
)


@grouped
def command(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace whose misses drive the model.")],
    budgets: BudgetFlags,
    cache: CacheFlags,
    hardware: Annotated[str | None, typer.Option("--hardware", help="Profile name or bundle directory.")] = None,
    model_shape: Annotated[str | None, typer.Option("--model-shape", help="Preset or config.json.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Context length in tokens.", min=1)] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Sequences decoded together.", min=1)] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Decode steps to simulate.", min=1)] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="serial, fused_kv, split_merge, two_batch or prefetch.")
    ] = None,
    prefetch_blocks: Annotated[
        int | None, typer.Option("--prefetch-blocks", help="Guesses a head and step (default: all slots > k).", min=1)
    ] = None,
    prefetch_hit_share: Annotated[
        float | None, typer.Option("--prefetch-hit-share", help="Share of guesses that spare a miss, in [0, 1].")
    ] = None,
    link: Annotated[
        str | None, typer.Option("--link", help="Another link than the profile's own: a name (nosa ls) or a file.")
    ] = None,
    h2d_gbps: Annotated[float | None, typer.Option("--h2d-gbps", help="Link bandwidth, GB = 1e9 bytes.")] = None,
    host_kv_dtype: Annotated[
        str | None,
        typer.Option("--host-kv-dtype", help="Format of host blocks: bf16, fp8, int4, or int4:GROUP:SCALE (assumed)."),
    ] = None,
    dequant_gbps: Annotated[
        float | None, typer.Option("--dequant-gbps", help="Bytes read plus written a second by their conversion.")
    ] = None,
    dequant_fixed_us: Annotated[
        float | None, typer.Option("--dequant-fixed-us", help="Launch of that conversion, a layer.")
    ] = None,
    extrapolate: Annotated[
        bool | None, typer.Option("--extrapolate", help="Price beyond what the profile was measured at, and say so.")
    ] = None,
    locality: Annotated[
        str | None,
        typer.Option("--locality", help="Draw all misses from a model: simple, fitted:NAME (nosa ls) or fitted:FILE."),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="recurrence (fast) or simpy.")] = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Write Chrome trace events (json.gz).")] = None,
    with_measured: Annotated[
        bool, typer.Option("--with-measured", help="Put the trace's own run beside the simulated one in --timeline.")
    ] = False,
    fetch_paths: Annotated[
        bool, typer.Option("--fetch-paths", help="Also compare ways of fetching by block bytes, count and layout.")
    ] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Also write DIR/prediction.json for reports.")] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Price a trace on hardware: step time, exposed and hidden transfers, tokens/s, what limits it.

    Example: [bold]nosa simulate out/trace --hardware h200 --model-shape nosa-8b --batch 32[/bold]
    """
    known = [*field_names(BudgetFlags, CacheFlags), *_OWN_KEYS]
    settings = Settings(read_yaml_mapping(config, known) if config else {})
    settings.note("trace", str(trace), "flag")
    meta = TraceMeta.load(trace)
    hardware_name, origin = settings.find("hardware", hardware, str)
    if hardware_name is None:
        raise ConfigError("--hardware is missing; give a profile name (nosa ls shows them) or a bundle directory")
    settings.note("hardware", hardware_name, str(origin))
    sparse = resolve_budgets(budgets, settings, meta.sparse, "trace")
    shape_name = settings.pick("model_shape", model_shape, meta.model.name, "trace")
    shape = meta.model if shape_name == meta.model.name else ModelShape.resolve(shape_name)
    method = settings.pick("method", cache.method, meta.method, "trace")
    changed = sparse != meta.sparse or method != meta.method
    slots, policy = resolve_cache(settings, cache, meta, sparse, method)
    kept = not changed and slots == meta.slots
    arguments: dict[str, Any] = {
        "model_shape": None if shape == meta.model else shape,
        "context": _optional(settings, "context", context, int, "trace"),
        "batch": _optional(settings, "batch", batch, int, "trace"),
        "steps": _optional(settings, "steps", steps, int, "trace"),
        "schedule": settings.pick("schedule", schedule, "serial"),
        **_given(
            settings,
            ("prefetch_blocks", prefetch_blocks, int),
            ("prefetch_hit_share", prefetch_hit_share, float),
        ),
        "sparse": sparse if changed else None,
        "method": method if changed else None,
        "slots": None if kept else slots,
        "policy": None if kept and policy == meta.policy else policy,
        "link": _optional(settings, "link", link, str, "hardware profile"),
        "h2d_gbps": _optional(settings, "h2d_gbps", h2d_gbps, float, "hardware profile" if link is None else "link"),
        "host_kv_dtype": _optional(settings, "host_kv_dtype", host_kv_dtype, str, "trace"),
        **_given(settings, ("dequant_gbps", dequant_gbps, float), ("dequant_fixed_us", dequant_fixed_us, float)),
        "extrapolate": settings.pick("extrapolate", extrapolate, False),
        "locality": _optional(settings, "locality", locality, str, "trace"),
        "engine": settings.pick("engine", engine, "recurrence"),
        "seed": settings.pick("seed", seed, 0),
    }
    _note_bytes(settings, meta, shape, sparse, arguments["host_kv_dtype"])
    if out_dir is not None:
        check_output(out_dir, overwrite=overwrite, reads=trace)
    if timeline is not None:
        check_output(timeline, overwrite=overwrite)
    from nosa_sys.simulator.fetch_paths import FetchPaths
    from nosa_sys.simulator.hardware import load_hardware

    profile = load_hardware(hardware_name).with_link(arguments.pop("link")).with_h2d_gbps(arguments.pop("h2d_gbps"))
    _ = profile.link_gbps  # refuse a missing bandwidth before any table
    paths = FetchPaths(hardware_name) if fetch_paths else None
    settings.banner(out.stderr(), f"simulate {trace}")
    if dry_run:
        if json:
            out.print_json({"options": settings.to_dict(), "dry_run": True})
        return
    from nosa_sys.simulator.simulate import simulate  # after the settings: scipy and simpy take their time

    with ExitStack() as files:
        events = None if timeline is None else files.enter_context(whole_file(timeline, overwrite=overwrite))
        prediction = simulate(
            trace, hardware=profile, **arguments, timeline=events, with_measured=with_measured
        ).to_dict()
        document = {"kind": "prediction", "trace": str(trace), **prediction, "options": settings.to_dict()}
        if paths is not None:
            document["fetch_paths"] = fetch_path_document(paths, document, shape)
        if out_dir is not None:
            with whole_directory(out_dir, overwrite=overwrite) as partial:
                text = json_module.dumps(out.plain(document), indent=1, allow_nan=False)
                (partial / "prediction.json").write_text(text + "\n", encoding="utf-8")
    console = out.human(json)
    console.print(summary_table(document))
    if prediction["model_errors"]:
        console.print(error_table(prediction["model_errors"], prediction["settings"]["hardware"]))
    for table in fetch_path_tables(document["fetch_paths"]) if fetch_paths else ():
        console.print(table)
    for line in prediction["extrapolated"]:
        out.stderr().print(f"extrapolated: {line}", markup=False)
    for line in prediction["limits"]:
        out.stderr().print(f"limit: {line}", markup=False)
    for line in prediction["rules"]:
        out.stderr().print(f"rule: {line}", style="dim", markup=False)
    if json:
        out.print_json(document)


def _note_bytes(
    settings: Settings, meta: TraceMeta, shape: ModelShape, sparse: SparseConfig, host_kv_dtype: str | None
) -> None:
    """Bytes of a block on both sides."""
    own = shape == meta.model
    sides = {"host": host_kv_dtype or (meta.host_kv_dtype if own else None), "device": meta.kv_dtype if own else None}
    for side, dtype in sides.items():
        settings.note(f"bytes per block, {side}", f"{shape.kv_block_bytes(sparse.block_size, dtype):,}", "derived")


def _optional(settings: Settings, name: str, flag: Any, kind: type, default_text: str) -> Any:
    """A setting whose absence means 'as there'."""
    value, origin = settings.find(name, flag, kind)
    if value is None:
        settings.note(name, f"as in the {default_text}", "default")
        return None
    return settings.note(name, value, str(origin))


def _given(settings: Settings, *options: tuple[str, Any, type]) -> dict[str, Any]:
    """Options that only some situations have; noted where they were given."""
    found: dict[str, Any] = {}
    for name, flag, kind in options:
        value, origin = settings.find(name, flag, kind)
        if origin is not None:
            found[name] = settings.note(name, value, origin)
    return found


def summary_table(document: dict[str, Any]) -> Any:
    """One prediction as a table of figures."""
    names = (
        ("step time, us", "step_time_us"),
        ("  selection, us", "select_us"),
        ("  exposed H2D, us", "h2d_exposed_us"),
        ("  attention, us", "attention_us"),
        ("  GEMM, us", "gemm_us"),
        ("  host overhead, us", "host_overhead_us"),
        ("  exposed D2H, us", "d2h_exposed_us"),
        ("limited by (the largest part)", "limited_by"),
        ("step time p50, us", "step_time_p50_us"),
        ("step time p90, us", "step_time_p90_us"),
        ("tokens/s, aggregate", "tokens_per_s"),
        ("tokens/s per sequence", "tokens_per_s_per_sequence"),
        ("misses per head and step", "misses_per_head_step"),
        ("H2D bytes per step", "h2d_bytes_per_step"),
        ("hidden H2D, us", "h2d_hidden_us"),
        ("converting formats, us (in selection and attention)", "conversion_us"),
        ("link utilisation", "link_utilisation"),
    )
    rows = [(text, document[key]) for text, key in names if key in document]
    memory = document.get("memory", {})
    places = (("GPU memory, GB", "gpu_bytes"), ("host memory, GB", "host_pool_bytes"))
    rows += [(text, memory[key] / 1e9) for text, key in places if key in memory]
    rows.append(("batch that fits", document.get("batch_that_fits")))
    label = f"{document['status']}, extrapolated" if document.get("extrapolated") else document["status"]
    return out.table(f"prediction ({label})", ("figure", "value"), rows)
