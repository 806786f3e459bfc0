"""``nosa locality``: fit a model of block selection to captured scores, and hold one against captures."""

from __future__ import annotations

import json as json_module
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.errors import ConfigError
from nosa_sys.outputs import check_output, write_whole

_COLUMNS = ("misses captured", "drawn", "error %", "bytes error %", "gamma captured", "error", "KS distance")

app = typer.Typer(help="Locality models: fit one to captured scores, hold one against captures.", no_args_is_help=True)

Traces = Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Trace directories captured with --scores.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")]


@app.callback()
def _root() -> None:
    """Locality models: fit one to captured scores, hold one against captures."""


@app.command("fit")
def fit(
    traces: Traces,
    out_file: Annotated[Path, typer.Option("--out", help="The JSON file to write.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name (default: that of the file).")] = None,
    block_sizes: Annotated[
        str | None, typer.Option("--block-sizes", help="Tokens a block, comma separated (default: as captured).")
    ] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Fit a score process for every layer and KV head; `--locality fitted:FILE.json` then draws from it.

    Example: [bold]nosa locality fit out/trace-1 out/trace-2 --out out/novels.json --block-sizes 32,64,128[/bold]
    """
    from nosa_sys.cli.decode_progress import DecodeProgress
    from nosa_sys.simulator.locality.fitting import fit_traces  # after the arguments: scipy takes its time
    from nosa_sys.traces.reader import Trace

    check_output(out_file, overwrite=overwrite)
    sizes = [Trace.open(traces[0]).meta.sparse.block_size] if block_sizes is None else _sizes(block_sizes)
    with DecodeProgress(out.stderr()) as bar:
        model = fit_traces(traces, sizes, name=name or out_file.stem, seed=seed, progress=partial(bar, "fit"))
    write_whole(out_file, model.to_json(), overwrite=overwrite)
    low, high = model.contexts
    facts = [
        ("fitted to", f"{len(traces)} traces of {model.model}, {low:,} to {high:,} tokens of context"),
        ("block sizes", ", ".join(map(str, sorted(model.processes)))),
        ("file", f"{out_file} ({out.size(out_file.stat().st_size)})"),
        ("use it", f"--locality fitted:{out_file}"),
    ]
    out.human(json).print(out.facts(f"locality model {model.name}", facts))
    if json:
        out.print_json({"kind": "locality_fit", "name": model.name, "file": str(out_file), **model.provenance})


@app.command("check")
def check(
    model_name: Annotated[str, typer.Argument(metavar="MODEL", help="simple, fitted:NAME or fitted:FILE.json.")],
    traces: Traces,
    block_size: Annotated[
        int | None, typer.Option("--block-size", min=1, help="Tokens a block (default: captured).")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Sequences drawn for each captured one.")] = 4,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write every figure as JSON.")] = None,
    seed: Seed = 1,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Misses, bytes and gamma of a model beside those of captured scores, under the same budgets, slots and policies.

    Example: [bold]nosa locality check fitted:smollm2-135m out/trace[/bold]
    """
    from nosa_sys.cli.decode_progress import DecodeProgress
    from nosa_sys.simulator.locality.captured import captured_sequences
    from nosa_sys.simulator.locality.heldout import compare, standard_settings
    from nosa_sys.simulator.locality.registry import get_locality
    from nosa_sys.traces.reader import Trace

    if out_file is not None:
        check_output(out_file, overwrite=overwrite)
    model = get_locality(model_name)
    opened = [Trace.open(path) for path in traces]
    first = opened[0].meta
    for trace in opened[1:]:
        if (trace.meta.sparse, trace.meta.model) != (first.sparse, first.model):
            raise ConfigError(f"{trace.directory} has another model or other budgets than {traces[0]}; check it alone")
    size = first.sparse.block_size if block_size is None else block_size
    captures = [sequence for trace in opened for sequence in captured_sequences(trace, size)]
    settings = standard_settings(first.sparse.with_block_size(size))
    with DecodeProgress(out.stderr()) as bar:
        found = compare(
            model, captures, settings, shape=first.model, draws=draws, seed=seed, progress=partial(bar, "draw")
        )
    rows = [row_of(comparison.to_dict()) for comparison in found]
    console = out.human(json)
    console.print(
        out.table(
            f"{model_name} against {len(captures)} captured sequences",
            ("method, block, k/k_q, slots, policy", *_COLUMNS),
            rows,
        )
    )
    console.print("captured: measured scores, selected and served by replay; drawn: projected")
    document = {
        "kind": "locality_check",
        "model": model_name,
        "traces": [str(path) for path in traces],
        "comparisons": [comparison.to_dict() for comparison in found],
    }
    if out_file is not None:
        text = json_module.dumps(out.plain(document), indent=1, allow_nan=False) + "\n"
        write_whole(out_file, text, overwrite=overwrite)
    if json:
        out.print_json(document)


def row_of(comparison: dict[str, Any]) -> tuple[Any, ...]:
    """One comparison as a row of the table."""

    def percent(value: float | None) -> float | None:
        return None if value is None else 100.0 * value

    s = comparison["setting"]
    budgets = f"b{s['block_size']} {s['topk']}/{s['select_blocks']}"
    return (
        f"{s['method']} {budgets} {s['slots'] / s['topk']:.3g}k {s['policy']}",
        comparison["captured"]["misses"],
        comparison["drawn"]["misses"],
        percent(comparison["misses_error"]),
        percent(comparison["bytes_error"]),
        comparison["captured"]["gamma_macro"],
        comparison["gamma_error"],
        comparison["kolmogorov_smirnov"],
    )


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--block-sizes={text!r} must be whole numbers, as in 32,64,128") from None
