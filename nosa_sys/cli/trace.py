"""``nosa trace``: does a trace keep its rules and the locality bound; its statistics; recovery of a killed run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.errors import ConfigError
from nosa_sys.outputs import check_output, partial_path, whole_directory

_FRAMES = (
    ("origins", "blocks by origin", ("origin", "n_blocks", "share", "n_misses", "miss_share")),
    ("by_layer", "by layer", ("layer", "gamma_macro_mean", "misses_per_row")),
)

app = typer.Typer(help="Work on trace directories.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Work on trace directories."""


@app.command("check")
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A trace directory.")],
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Recover the whole steps of a killed run.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Verify schema, ids, budgets, counting rules and the locality theorem; exit 1 when a row breaks a rule.

    Example: [bold]nosa trace check out/trace[/bold]
    """
    from nosa_sys.experiments.checks import check_document  # after the arguments: pyarrow takes its time
    from nosa_sys.traces.reader import Trace

    trace = Trace.recover(directory) if allow_incomplete else Trace.open(directory)
    document = check_document(trace)
    console = out.human(json)
    for note in document["notes"]:
        console.print(f"note: {note}")
    if document["n_problems"]:
        rows = [
            (p["table"], "-" if p["row"] is None else str(p["row"]), p["rule"], p["detail"])
            for p in document["problems"]
        ]
        console.print(out.table(f"{document['n_problems']} problems", ("table", "row", "rule", "detail"), rows))
    else:
        console.print(f"{document['n_rows']:,} rows keep every rule")
    console.print(out.facts("", [(key, _text(value)) for key, value in document["facts"].items()]))
    if json:
        out.print_json(document)
    if document["n_problems"]:
        first = document["problems"][0]
        where = first["table"] if first["row"] is None else f"{first['table']} row {first['row']}"
        more = document["n_problems"] - 1
        out.stderr().print(
            f"nosa: {directory} breaks rule {first['rule']} at {where}: {first['detail']}"
            + (f" (and {more} more)" if more else ""),
            soft_wrap=True,
        )
        raise typer.Exit(1)


@app.command("stats")
def stats(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A trace directory.")],
    json: JsonFlag = False,
) -> None:
    """Gamma, misses, bytes, reuse and origins of a trace; --json adds every layer, head and step.

    Example: [bold]nosa trace stats out/trace[/bold]
    """
    from nosa_sys.traces.reader import Trace
    from nosa_sys.traces.statistics import trace_statistics

    trace = Trace.open(directory)
    document = trace_statistics(trace).to_dict()
    console = out.human(json)
    figures = [(name, value) for name, value in document.items() if not isinstance(value, (list, dict))]
    title = f"{trace.meta.status} on {trace.meta.device or 'an unnamed device'}"
    console.print(out.table(title, ("figure", "value"), figures))
    for name, title, columns in _FRAMES:
        rows = [[str(record[columns[0]]), *(record[c] for c in columns[1:])] for record in document[name]]
        console.print(out.table(f"{title} (warm rows)", columns, rows))
    for note in document["notes"]:
        console.print(f"note: {note}")
    if json:
        out.print_json({"status": trace.meta.status, **document})


@app.command("recover")
def recover(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What a killed or interrupted capture left.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Where the recovered trace goes.")],
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Write the whole steps of a killed run as a trace that every verb reads.

    Example: [bold]nosa trace recover out/trace.partial --out out/recovered[/bold]
    """
    from nosa_sys.traces.reader import Trace
    from nosa_sys.traces.recover import save_recovered

    check_output(out_dir, overwrite=overwrite, reads=directory)
    if partial_path(out_dir).resolve() == directory.resolve():
        raise ConfigError(f"--out {out_dir} would be built in {directory}, which is read here; choose another --out")
    trace = Trace.recover(directory)
    with whole_directory(out_dir, overwrite=overwrite) as partial:
        save_recovered(trace, partial)
    console = out.human(json)
    for note in trace.notes:
        console.print(f"note: {note}")
    console.print(f"{trace.meta.n_steps:,} steps of {len(trace.meta.sequences)} sequences are in {out_dir}")
    if json:
        document = {"trace": str(out_dir), "n_steps": trace.meta.n_steps, "notes": list(trace.notes)}
        out.print_json({**document, "sequences": [info.id for info in trace.meta.sequences]})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else out.number(value)
